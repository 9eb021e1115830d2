#!/usr/bin/env bash
# Train a recipe with torchrun, on one node or as one of several; run it on each node.
#
#     NUM_GPUS=2 launch/torchrun.sh recipes/quickstart train.max_steps=20
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 launch/torchrun.sh ~/my-run   # and NODE_RANK=1
#     NNODES=1:4 RDZV=10.0.0.1:29400 RDZV_ID=my-run RESTARTS=20 launch/torchrun.sh ~/my-run     # the same on each
#
# NNODES=1:4 is elastic: when a node leaves or comes, the others start again from the newest checkpoint, and the run
# keeps its global batch. RDZV: host and port of one of the nodes, at which they meet. NUM_GPUS: ranks on this node.
# RDZV_CONF: more for torchrun, such as last_call_timeout=5, the seconds that it waits for more nodes (30).
# SIGTERM, SIGUSR1 or Ctrl-C: the ranks finish their step and save, this script waits for them and ends with status 75.
# RESTARTS: how often the ranks are started again. On several nodes torchrun does it, whatever they ended with, and each
# node that leaves or comes back takes one as well.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[[ $# -ge 1 && $1 != -* ]] || usage
need torchrun
check_recipe "$@"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # as torchrun would set it, with a warning; CPU ranks share out the cores
defaults ""
ranks=${NUM_GPUS:-1}
if [[ -z ${NUM_GPUS:-} ]] && has_gpu; then ranks=gpu; fi
nodes=${NNODES:-1}
again=0
[[ $nodes == 1 ]] || again=${RESTARTS:-0} RESTARTS=0 # by torchrun, for all nodes at once
options=(--nnodes "$nodes" --nproc-per-node "$ranks" --max-restarts "$again")
if [[ $nodes == *:* ]]; then
    [[ -n ${RDZV:-} ]] || fail "NNODES=$nodes is elastic: set RDZV=HOST:PORT, at which the nodes meet"
    # With one store for all attempts a node that comes later waits for an address that nobody writes again (torch 2.13).
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    # Without --local-addr torchrun tells the others this host's name, which they may not know.
    own=${LOCAL_ADDR:-$(module dstrain.hosts own "${RDZV%:*}")}
    options+=(--rdzv-backend c10d --rdzv-endpoint "$RDZV" --rdzv-id "${RDZV_ID:-dstrain}" --local-addr "$own")
    [[ -z ${RDZV_CONF:-} ]] || options+=(--rdzv-conf "$RDZV_CONF")
elif [[ $nodes == 1 ]]; then
    options+=(--master-addr 127.0.0.1 --master-port "${MASTER_PORT:-$(free_port)}")
else
    [[ -n ${MASTER_ADDR:-} && -n ${MASTER_PORT:-} ]] || fail "NNODES=$nodes: set MASTER_ADDR and MASTER_PORT, and NODE_RANK on each node"
    options+=(--node-rank "${NODE_RANK:?set it to 0 on the first node, 1 on the second ...}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
fi
supervise python -P "$repository/launch/torchrun.py" "${options[@]}" "$repository/train.py" --config "$@"
