#!/usr/bin/env bash
# Set up, then lint and test. Arguments go to pytest: -m "not slow" for the fast tests alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/setup.sh
source .venv/bin/activate
ruff check .
ruff format --check .
exec python -m pytest "$@"
