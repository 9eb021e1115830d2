#!/usr/bin/env bash
# Train a recipe on several hosts, with the deepspeed launcher: over ssh and pdsh, or started on each host by hand.
#
#     launch/multi_node.sh recipes/quickstart --hostfile hosts.txt train.max_steps=20
#     launch/multi_node.sh recipes/quickstart --hostfile hosts.txt --no_ssh --node_rank 0 \
#         --master_addr 10.0.0.1 --master_port 29500           # and so on each host, with its own --node_rank
#
# hosts.txt has a line `HOST slots=N` for each host; N ranks run there. Every host has this repository, its .venv and
# the output folder at the same path. --master_addr and --master_port: where rank 0 listens, found if not given.
# HF_*, WANDB_*, NCCL_* and the like are carried to the hosts, secrets among them, and none shows in a process list.
# SIGTERM, SIGUSR1 or Ctrl-C: the ranks finish their step and save, this script waits for them and ends with status 75;
# a second one ends them at once. RESTARTS: how often a run is started again by itself after a rank or a host died.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[[ $# -ge 1 && $1 != -* ]] || usage
recipe=$1
shift
options=() arguments=() by_hand=0 hostfile=""
while [[ $# -gt 0 ]]; do
    case $1 in
        --no_ssh) by_hand=1; shift; continue ;;
        --hostfile | --master_addr | --master_port | --node_rank) ;;
        *) arguments+=("$1"); shift; continue ;;
    esac
    [[ $# -ge 2 ]] || fail "command line: $1 has no value"
    [[ $1 == --hostfile ]] && hostfile=$2
    options+=("$1" "$2")
    shift 2
done
[[ -n $hostfile ]] || fail "command line: --hostfile FILE is missing"
need deepspeed
check_recipe "$recipe" "${arguments[@]}"
export PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH}
if [[ $by_hand -eq 1 ]]; then
    for name in --node_rank --master_addr --master_port; do
        [[ " ${options[*]} " == *" $name "* ]] || fail "command line: --no_ssh needs $name"
    done
    hosts=$(mktemp)
    trap 'rm -f "$hosts"' EXIT
    module dstrain.remote hostfile --hostfile "$hostfile" >"$hosts" # DeepSpeed takes a comment behind a host amiss
    bind_cores
    defaults "${binding[@]}"
    supervise deepspeed --log_level critical "${options[@]}" --hostfile "$hosts" --no_ssh "${binding[@]}" \
        "$repository/train.py" --config "$recipe" "${arguments[@]}"
fi
need ssh "install the package 'openssh-client'; or start the run on each host with --no_ssh"
need pdsh "install the package 'pdsh'; or start the run on each host with --no_ssh"
passes_on=1 # to the ranks on all hosts
supervise python -P -m dstrain.remote run "${options[@]}" "$recipe" "${arguments[@]}"
