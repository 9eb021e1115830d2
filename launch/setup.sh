#!/usr/bin/env bash
# Make .venv beside this folder: the pinned packages, and DeepSpeed's ops, built once.
# Needs Python 3.11 with headers, git and g++. Run again, it does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "error: $1" >&2; exit 2; }

python=""
for name in "${PYTHON:-}" python3.11 python3 python; do
    if [[ -n $name ]] && "$name" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        python=$name
        break
    fi
done
[[ -n $python ]] || fail "Python 3.11 is missing; install the package 'python3.11' (or set PYTHON)"
header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
[[ -f $header ]] || fail "Python's headers are missing; install the package 'python3.11-dev'"
command -v git >/dev/null || fail "git is missing; install the package 'git'"
command -v g++ >/dev/null || fail "g++ is missing; install the package 'g++'"

# What the environment was made of. Another requirements.txt or Python makes it anew in place.
stamp="$("$python" -V) $(cksum <requirements.txt)"
if [[ $(cat .venv/stamp 2>/dev/null) != "$stamp" ]]; then
    echo "installing the packages of requirements.txt into .venv ..."
    "$python" -c 'import ensurepip' 2>/dev/null || fail "venv is missing; install the package 'python3.11-venv'"
    "$python" -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check --requirement requirements.txt
    # Ops belong to the packages they were built against; one for each op says whether it fits.
    echo "$stamp" >.venv/stamp
fi
if [[ ! -f .venv/ops-stamp || $(cat .venv/ops-stamp) != "$stamp $(uname -m)" ]]; then
    .venv/bin/python -m dstrain doctor --build-ops
    echo "$stamp $(uname -m)" >.venv/ops-stamp
fi
