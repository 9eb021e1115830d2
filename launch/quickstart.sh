#!/usr/bin/env bash
# Set up, then pretrain a small model on shipped text: three minutes on two cores.
# More arguments go to train.py, such as train.max_steps=20.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/setup.sh
source .venv/bin/activate
# DeepSpeed warns when it looks for a GPU and finds none.
command -v nvidia-smi >/dev/null || export DS_ACCELERATOR=cpu
exec deepspeed --log_level error train.py --config recipes/quickstart/recipe.yaml "$@"
