"""What must be the same on every host of a run: Python, the packages, this code. Standard library only."""

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def fingerprint() -> dict[str, str]:
    """Return versions of Python and of the packages of requirements.txt, and a digest of our code."""
    code = hashlib.sha256()
    for file in (REPOSITORY / "train.py", *sorted((REPOSITORY / "dstrain").rglob("*.py"))):
        code.update(f"{file.relative_to(REPOSITORY)}\0".encode() + file.read_bytes() + b"\0")
    facts = {"python": platform.python_version(), "code": code.hexdigest()[:12]}
    pinned = REPOSITORY / "requirements.txt"  # a copied train.py and dstrain/ may be without it
    for line in pinned.read_text(encoding="utf-8").splitlines() if pinned.exists() else ():
        match = re.match(r"[\w.-]+", line)
        if match:
            try:
                facts[match[0]] = importlib.metadata.version(match[0])
            except importlib.metadata.PackageNotFoundError:
                facts[match[0]] = "missing"
    return facts


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the first things that differ, as `torch is 2.12.1 there and 2.13.0 here`, or nothing."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    shown = [f"{name} is {theirs.get(name)} there and {ours.get(name)} here" for name in names[:3]]
    return "; ".join(shown) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
