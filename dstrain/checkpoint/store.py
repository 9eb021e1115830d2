"""Checkpoints on disk: what they hold, whether they are whole, and how any layout reads them.

    output_dir/checkpoints/step-100/manifest.json           what is in it, with sizes and checksums
    output_dir/checkpoints/step-100/rank-00000.safetensors  the pieces that one rank held
    output_dir/checkpoints/latest                           the newest step's folder name

Pieces are named by parameter and first element, so any number of ranks and any ZeRO stage finds its own part,
and reads no more than that. There is no pickle in a checkpoint: reading one runs no code.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dstrain.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
MASTER = "master"  # the kind of a piece of the weights; other kinds are the optimizer's states


def steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in `checkpoints/`, whole or damaged, oldest first."""
    names = [folder.name.removeprefix("step-") for folder in root.glob("step-*")]
    return sorted(int(name) for name in names if name.isdigit())


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step."""
    return root / f"step-{step}"


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_text(file: Path, text: str) -> None:
    """Write a file so that after a crash it has either its old or its new content."""
    temporary = file.with_name(f"{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, body: Mapping[str, Any]) -> None:
    """Write the manifest, which vouches for every other file and for itself."""
    text = json.dumps(body, sort_keys=True)
    whole = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}
    write_text(folder / MANIFEST, json.dumps(whole, sort_keys=True))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raises UserError if it is missing, damaged or of another kind."""
    try:
        whole = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        body = whole["body"]
        good = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest() == whole["sha256"]
    except FileNotFoundError:
        raise UserError(f"{folder}: {MANIFEST} is missing") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder}/{MANIFEST}: damaged ({type(error).__name__})") from None
    if not good:
        raise UserError(f"{folder}/{MANIFEST}: damaged (its checksum is wrong)")
    if body["format"] != FORMAT:
        raise UserError(f"{folder}: written in format {body['format']}, this version reads {FORMAT}")
    return body


def problem(folder: Path, share: slice = slice(None)) -> str | None:
    """Say what is wrong with a checkpoint, or None. share: of its files, whose content this call checks."""
    try:
        body = read_manifest(folder)
    except UserError as error:
        return str(error)
    if folder.is_symlink() and not folder.resolve().is_relative_to(folder.parent.resolve()):
        return f"{folder}: a link that leads outside"
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink() and not entry.resolve().is_relative_to(folder.resolve()):
            return f"{entry}: a link that leads outside"
        if entry.name != MANIFEST and entry.name not in body["files"]:
            return f"{entry}: not in the manifest"
    for name, expected in sorted(body["files"].items())[share]:
        file = folder / name
        if not file.is_file():
            return f"{file}: missing"
        if (size := file.stat().st_size) != expected["size"]:
            return f"{file}: {size} bytes, {expected['size']} were written"
        if digest(file) != expected["sha256"]:
            return f"{file}: damaged (its checksum is wrong)"
    return None


def prune(root: Path, keep: int) -> None:
    """Delete the oldest checkpoints beyond `keep`; one that is half deleted is none."""
    for step in steps(root)[:-keep]:
        delete(folder_of(root, step))


def delete(folder: Path) -> None:
    """Delete a checkpoint, its name first, so that it is never half there."""
    trash = folder.with_name(f"trash-{folder.name}")
    shutil.rmtree(trash, ignore_errors=True)
    if folder.exists():
        folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def sweep(root: Path) -> None:
    """Delete what a killed run has left half written or half deleted."""
    for leftover in (*root.glob("tmp-*"), *root.glob("trash-*")):
        shutil.rmtree(leftover, ignore_errors=True)


class Reader:
    """Reads pieces of any layout from the files of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self.fragments: dict[str, dict[str, list]] = self.manifest["fragments"]
        self._files = sorted(self.manifest["files"])
        self._open: dict[str, Any] = {}

    @property
    def states(self) -> list[str]:
        """Kinds of optimizer states."""
        return sorted(set(self.fragments) - {MASTER})

    def read(self, kind: str, name: str, start: int, into: torch.Tensor) -> None:
        """Fill a 1-D tensor with the elements of a flattened parameter from `start` on.

        Raises UserError if the checkpoint lacks some of them.
        """
        stop, filled = start + into.numel(), 0
        for number, first, numel in self.fragments.get(kind, {}).get(name, []):
            low, high = max(start, first), min(stop, first + numel)
            if low < high:
                piece = self._slice(self._files[number], f"{kind}:{name}:{first}", low - first, high - first)
                into[low - start : high - start].copy_(piece)
                filled += high - low
        if filled != into.numel():
            raise UserError(
                f"{self.folder}: holds {filled} of {into.numel()} elements of {kind} {name} that are needed"
            )

    def whole(self, kind: str, name: str) -> torch.Tensor:
        """Return a parameter or state in its own shape."""
        shape = self.manifest["parameters"][name]
        number, first, _ = self.fragments[kind][name][0]
        dtype = self._slice(self._files[number], f"{kind}:{name}:{first}", 0, 1).dtype
        flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
        self.read(kind, name, 0, flat)
        return flat.view(shape)

    def tensors(self, file: str, prefix: str) -> dict[str, torch.Tensor]:
        """Return the small tensors of one file whose keys begin with `prefix`, by the rest of their keys."""
        if file not in self.manifest["files"]:
            return {}
        handle = self._handle(file)
        keys = [key for key in handle.keys() if key.startswith(prefix)]  # noqa: SIM118
        return {key.removeprefix(prefix): handle.get_tensor(key) for key in keys}

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, "pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{self.folder / file}: cannot be read: {error}") from None
        return self._open[file]

    def _slice(self, file: str, key: str, low: int, high: int) -> torch.Tensor:
        return self._handle(file).get_slice(key)[low:high]


def describe(root: Path, chosen: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """Return step, tokens, loss, size and problem of each checkpoint."""
    rows = []
    for step in steps(root) if chosen is None else chosen:
        folder = folder_of(root, step)
        wrong = problem(folder)
        row: dict[str, Any] = {"step": step, "problem": wrong}
        row["bytes"] = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        try:
            trainer = read_manifest(folder)["trainer"]
        except UserError:
            trainer = {}
        rows.append(row | {"tokens": trainer.get("tokens_seen"), "loss": trainer.get("loss")})
    return rows
