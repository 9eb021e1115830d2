#!/usr/bin/env bash
# Train a recipe on this machine: on all its GPUs, on NUM_GPUS of them, or on the CPU (NUM_GPUS ranks, 1 unless set).
#
#     launch/single_node.sh recipes/quickstart train.max_steps=20
#     NUM_GPUS=2 RESTARTS=3 launch/single_node.sh ~/my-run
#
# SIGTERM, SIGUSR1 or Ctrl-C: the ranks finish their step and save, this script waits for them and ends with status 75.
# RESTARTS: how often a run is started again by itself after a rank died; it goes on from its newest checkpoint.
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ $# -ge 1 ]] || usage
recipe=$1
shift
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command -v deepspeed >/dev/null || { echo "error: deepspeed is missing; source $repository/.venv/bin/activate" >&2; exit 2; }
# DeepSpeed warns when it looks for a GPU and finds none.
command -v nvidia-smi >/dev/null || export DS_ACCELERATOR=cpu
gpus=()
[[ -z ${NUM_GPUS:-} ]] || gpus=(--num_gpus "$NUM_GPUS")

stopped=0
group=0
# To all processes of the run. The launcher dies of it; the ranks save and end.
stop() {
    stopped=1
    [[ $group -eq 0 ]] || kill -USR1 -- "-$group" 2>/dev/null || true
}
trap stop TERM USR1 INT

for ((attempt = 0; ; attempt++)); do
    export DSTRAIN_RESTARTS=$attempt
    setsid deepspeed --log_level error "${gpus[@]}" "$repository/train.py" --config "$recipe" "$@" &
    group=$!
    status=0
    wait "$group" || status=$?
    while kill -0 -- "-$group" 2>/dev/null; do sleep 0.2; done  # ranks that outlive their launcher to save
    [[ $stopped -eq 0 ]] || exit 75
    # 0 done, 2 a mistake to mend, 3 a loss that is not finite: started again, they would end the same way.
    case $status in 0 | 2 | 3) exit "$status" ;; esac
    [[ $attempt -lt ${RESTARTS:-0} ]] || exit "$status"
    echo "the run ended with status $status; starting it again ($((attempt + 1)) of $RESTARTS)" >&2
done
