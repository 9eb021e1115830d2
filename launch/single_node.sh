#!/usr/bin/env bash
# Train a recipe on this machine: on all its GPUs, on NUM_GPUS of them, or on the CPU (NUM_GPUS ranks, 1 unless set).
#
#     launch/single_node.sh recipes/quickstart train.max_steps=20
#     NUM_GPUS=2 RESTARTS=3 launch/single_node.sh ~/my-run
#
# SIGTERM, SIGUSR1 or Ctrl-C: the ranks finish their step and save, this script waits for them and ends with status 75.
# RESTARTS: how often a run is started again by itself after a rank died; it goes on from its newest checkpoint.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[[ $# -ge 1 && $1 != -* ]] || usage
need deepspeed
check_recipe "$@"
ranks=()
[[ -z ${NUM_GPUS:-} ]] || ranks=(--num_gpus "$NUM_GPUS")
bind_cores
defaults "${binding[@]}"
supervise deepspeed --log_level critical --master_port "${MASTER_PORT:-$(free_port)}" "${ranks[@]}" "${binding[@]}" \
    "$repository/train.py" --config "$@"
