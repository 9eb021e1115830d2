#!/usr/bin/env bash
# Set up, then pretrain a small model on shipped text: three minutes on two cores.
# More arguments go to train.py, such as train.max_steps=20.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/setup.sh
source .venv/bin/activate
exec ./launch/single_node.sh recipes/quickstart/recipe.yaml "$@"
