# shellcheck shell=bash disable=SC2034
# What the scripts beside this one have in common; they source it.
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { echo "error: $1" >&2; exit 2; }
# The comment at the top of the script is its help.
usage() { sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
need() { command -v "$1" >/dev/null || fail "$1 is missing; ${2:-source $repository/.venv/bin/activate}"; }
free_port() { python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }
module() { PYTHONPATH=$repository python -P -m "$@"; }
# A mistake in a recipe is said here, once and at once, rather than by ranks.
check_recipe() { module dstrain.config "$@" || exit 2; }
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

stopped=0
group=0
ranks_left=()
descendants() { local child; for child in $(pgrep -P "$1"); do echo "$child"; descendants "$child"; done; }
# To all processes of the run, those with sessions of their own among them; where `passes_on` is set, to its command
# alone. A launcher may die of it; the ranks finish their step, save and end.
stop() {
    stopped=1
    [[ $group -ne 0 ]] || return 0
    [[ -n ${passes_on:-} ]] || mapfile -t ranks_left < <(descendants "$group")
    kill -USR1 -- "-$group" "${ranks_left[@]}" 2>/dev/null || true
}
is_left() {
    local pid
    for pid in "-$group" "${ranks_left[@]}"; do
        if kill -0 -- "$pid" 2>/dev/null; then return 0; fi
    done
    return 1
}

# Run a command, RESTARTS times more when it fails, and end with train.py's status: 75 once a signal has come.
# `last_words` are the arguments of train.py, which tell whose first failure to show as the last thing.
supervise() {
    trap stop TERM USR1 INT
    local attempt status began words=""
    for ((attempt = 0; ; attempt++)); do
        [[ $attempt -eq 0 ]] || export DSTRAIN_RESTARTS=$attempt
        began=$(date +%s)
        setsid "$@" &
        group=$!
        status=0
        wait "$group" || status=$?
        while is_left; do sleep 0.2; done # ranks that outlive their launcher to save
        [[ $stopped -eq 0 ]] || exit 75
        case $status in
            0 | 2 | 75) words="" ;;
            *) # a launcher's own: what did it mean?
                words=$(module dstrain last-failure --launcher-status "$status" --since "$began" "${last_words[@]}" 2>/dev/null) || true
                [[ -z $words ]] || status=${words%%$'\n'*}
                words=${words#*$'\n'}
                ;;
        esac
        # 0 done, 2 a mistake to mend, 3 a loss that is not finite: started again, they would end the same way.
        # 75: somebody asked a rank to stop.
        case $status in 0 | 2 | 3 | 75) break ;; esac
        [[ $attempt -lt ${RESTARTS:-0} ]] || break
        echo "the run ended with status $status; starting it again ($((attempt + 1)) of $RESTARTS)" >&2
    done
    [[ -z $words ]] || echo "$words" >&2
    exit "$status"
}
