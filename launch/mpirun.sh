#!/usr/bin/env bash
# Train a recipe with OpenMPI's mpirun: NP ranks here, or on the hosts of HOSTFILE, whose lines are `HOST slots=N`.
#
#     NP=2 launch/mpirun.sh recipes/quickstart train.max_steps=20
#     NP=16 HOSTFILE=hosts.txt RESTARTS=3 launch/mpirun.sh ~/my-run
#
# Ranks find their place in OpenMPI's own variables; mpi4py is not needed. Variables are carried by name, so that no
# value shows in a process list. SIGTERM, SIGUSR1 or Ctrl-C: the ranks save, then status 75; RESTARTS as elsewhere.
set -euo pipefail
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[[ $# -ge 1 && $1 != -* ]] || usage
need mpirun "install the package 'openmpi-bin'"
need deepspeed
check_recipe "$@"
export PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH}
defaults ""
options=(--bind-to none) # its own default is a core a rank; the ranks share out the cores by themselves
[[ $EUID -ne 0 ]] || options+=(--allow-run-as-root)
if [[ -n ${HOSTFILE:-} ]]; then
    place=$(module dstrain.remote meet --hostfile "$HOSTFILE") || exit $?
    read -r MASTER_ADDR MASTER_PORT <<<"$place"
    options+=(--hostfile "$HOSTFILE" --mca plm_rsh_args "${PDSH_SSH_ARGS_APPEND:--x}")
else
    MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-$(free_port)}
fi
export MASTER_ADDR MASTER_PORT
while read -r name; do options+=(-x "$name"); done < <(module dstrain.remote names)
supervise mpirun -np "${NP:?set NP to the number of ranks}" "${options[@]}" -x MASTER_ADDR -x MASTER_PORT \
    "$(command -v python)" -u "$repository/train.py" --config "$@"
