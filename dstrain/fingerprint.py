"""What must be the same on every host of a run: Python, the packages, and this code."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path

_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "tokenizers")
_ROOT = Path(__file__).resolve().parent.parent


def fingerprint() -> dict[str, str]:
    """Return versions of Python and of the packages, and a digest of train.py and this library."""
    facts = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "missing"
    code = hashlib.sha256()
    for file in (_ROOT / "train.py", *sorted((_ROOT / "dstrain").rglob("*.py"))):
        code.update(f"{file.relative_to(_ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return facts | {"code": code.hexdigest()[:12]}


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return what differs, as `torch 2.13.0 (here 2.12.1)`; empty if nothing does."""
    return ", ".join(
        f"{name} {theirs.get(name, 'missing')} (here {ours.get(name, 'missing')})"
        for name in (*ours, *(theirs.keys() - ours.keys()))
        if ours.get(name) != theirs.get(name)
    )
