#!/usr/bin/env bash
# Run the recipe of this folder; DSTRAIN names the checkout if the folder was copied out of it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
train=${DSTRAIN:-$here/../..}/train.py
exec deepspeed --log_level error "$train" --config "$here/recipe.yaml" "$@"
