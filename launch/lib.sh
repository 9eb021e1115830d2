# shellcheck shell=bash disable=SC2034
# What the scripts beside this one have in common; they source it.
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { echo "error: $1" >&2; exit 2; }
# The comment at the top of the script is its help.
usage() { sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
need() { command -v "$1" >/dev/null || fail "$1 is missing; ${2:-source $repository/.venv/bin/activate}"; }
free_port() { python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }
module() { PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH} python -P -m "$@"; }
# A mistake in a recipe is said here, once and at once, rather than by ranks.
check_recipe() { output_dir=$(module dstrain.config "$@") || exit $?; }
has_gpu() { command -v nvidia-smi >/dev/null; }

# What a device wants to be set, unless it is; said in one line.
defaults() {
    if has_gpu; then
        # Memory that is freed can be joined again: less is lost to fragments.
        [[ -n ${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-} ]] || export PYTORCH_ALLOC_CONF=expandable_segments:True
        echo "GPU defaults: PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-}} $*" >&2
    else
        export DS_ACCELERATOR=cpu # DeepSpeed warns when it looks for a GPU and finds none
    fi
}

# Words for the deepspeed launcher that give each rank cores and memory of its own NUMA node, into `binding`. It numbers
# cores from 0: not where this process may use only some of them, nor where ranks outnumber them.
bind_cores() {
    binding=()
    if has_gpu && command -v numactl >/dev/null && [[ -z ${KMP_AFFINITY:-}${OMP_NUM_THREADS:-} && $(nproc) -eq $(nproc --all) &&
        $(nproc) -ge $((2 * $(nvidia-smi -L | wc -l))) ]]; then
        binding=(--bind_cores_to_rank)
    fi
}

trap 'exit 75' TERM USR1 INT # until `supervise`: nothing runs yet

stopped=0
group=0
# The processes of the run, those with sessions of their own and those whose launcher has died among them. Signals to this
# script's group, such as a second Ctrl-C, must not end what looks for them.
of_run() (
    trap '' TERM USR1 INT
    grep -lsz "^LAUNCHED_BY=$mark\$" /proc/[0-9]*/environ | cut -d / -f 3
)
trains() (
    trap '' TERM USR1 INT
    for pid in $(of_run); do
        if grep -qsz '/train\.py$' "/proc/$pid/cmdline"; then exit 0; fi
    done
    exit 1
)
# Whether another process has the run's folder, such as a rank on another host that still saves.
is_taken() { [[ -e $output_dir/.lock ]] && ! flock --nonblock "$output_dir/.lock" true 2>/dev/null; }
# A signal for all of them; where `passes_on` is set, for its command alone. A launcher may die of it; the ranks finish
# their step, save and end.
stop() {
    stopped=1
    [[ $group -ne 0 ]] || return 0
    local processes=()
    [[ -n ${passes_on:-} ]] || mapfile -t processes < <(of_run)
    kill -USR1 -- "$group" "-$group" "${processes[@]}" 2>/dev/null || true
}

# Run a command, RESTARTS times more when it fails, and end with train.py's status: 75 once a signal has come.
# `output_dir` is the run's, in which it says how it ended: launchers have statuses of their own.
supervise() {
    trap stop TERM USR1 INT
    local attempt status before words waited
    for ((attempt = 0; ; attempt++)); do
        [[ $attempt -eq 0 ]] || export DSTRAIN_RESTARTS=$attempt
        before=$(module dstrain.failure mark "$output_dir") || before="[null, null]"
        [[ $stopped -eq 0 ]] || exit 75
        mark=$$.$attempt.$EPOCHREALTIME
        LAUNCHED_BY=$mark setsid "$@" &
        group=$!
        [[ $stopped -eq 0 ]] || stop
        status=0
        wait "$group" 2>/dev/null || status=$? # bash would add a line of its own for a launcher that was killed
        # A signal ends the wait, not the launcher; and ranks outlive a launcher that dies, to save.
        while kill -0 "$group" 2>/dev/null || trains; do sleep 0.2 || true; done
        if [[ -n ${passes_on:-} && $status -ne 2 ]]; then # those on other hosts
            for ((waited = 0; waited < 300; waited++)); do
                is_taken || break
                sleep 0.2 || true
            done
        fi
        group=0
        [[ $stopped -eq 0 ]] || exit 75
        words=""
        if [[ $status -ne 2 && $status -ne 75 ]]; then
            words=$(module dstrain.failure words "$output_dir" "$status" "$before") || words=$status
            status=${words%%$'\n'*}
            words=${words#"$status"}
        fi
        [[ $stopped -eq 0 ]] || exit 75
        # 0 done, 2 a mistake to mend, 3 a loss that is not finite: started again, they would end the same way.
        # 75: somebody asked a rank to stop.
        case $status in 0 | 2 | 3 | 75) break ;; esac
        [[ $attempt -lt ${RESTARTS:-0} ]] || break
        echo "the run ended with status $status; starting it again ($((attempt + 1)) of $RESTARTS)" >&2
    done
    words=${words#$'\n'}
    [[ -z $words ]] || echo "$words" >&2
    exit "$status"
}
