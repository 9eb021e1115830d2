"""The output folder of a run: which recipe it belongs to, and that one process at a time writes there."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dstrain import distributed, failure
from dstrain.checkpoint.store import write_text
from dstrain.errors import UserError

# Recipe keys that may change between the two halves of one run.
_MAY_CHANGE = (
    "output_dir",
    "deepspeed",
    "model.gradient_checkpointing",  # changes no bit
    "train.max_steps",
    "train.num_train_epochs",
    "train.init_timeout_seconds",
    "train.train_timeout_seconds",
    # What the batch, the optimizer and the schedule come to is compared under `in_force`.
    "train.train_micro_batch_size_per_gpu",
    "train.gradient_accumulation_steps",
    "train.global_batch",
    "data.cache_dir",
    "data.preprocessing_num_workers",
    "eval.",
    "checkpoint.",
    "logging.",
)


def claim(output_dir: Path, recipe: Mapping[str, Any], allowed: Sequence[str] = ()) -> None:
    """Raise UserError if `output_dir` holds a run of another recipe, with all that differs.

    recipe: all options by dotted key. allowed: keys, or sections, that may differ.
    """
    for parent in (output_dir, *output_dir.parents):
        if parent.exists():
            if not (parent.is_dir() and os.access(parent, os.W_OK)):
                raise UserError(
                    f"output_dir={str(output_dir)!r}: {parent} is no folder that can be written to"
                )
            break
    file = output_dir / "resolved" / "recipe.json"
    if not file.exists():
        if (output_dir / "checkpoints").exists() or (output_dir / "metrics.jsonl").exists():
            raise UserError(
                f"output_dir={str(output_dir)!r}: holds a run without its recipe; choose another folder"
            )
        return
    saved, now = _by_leaf(json.loads(file.read_text(encoding="utf-8"))), _by_leaf(recipe)
    changed = [
        key
        for key in sorted(saved.keys() | now.keys(), key=lambda key: (key.startswith("in_force."), key))
        if saved.get(key) != now.get(key) and not key.startswith(_MAY_CHANGE) and not _is_in(key, allowed)
    ]
    # What is in force follows from the keys before it; by itself it tells of a change in the JSON.
    shown = [key for key in changed if not key.startswith("in_force.")] or changed
    if changed:
        diff = ", ".join(f"{key} is {saved.get(key)!r} there and {now.get(key)!r} here" for key in shown)
        raise UserError(
            f"output_dir={str(output_dir)!r}: holds a different run: {diff}; choose another output_dir, or "
            f"go on so with {' '.join(f'--allow-change {key}' for key in shown)}"
        )


def _is_in(key: str, allowed: Sequence[str]) -> bool:
    leaf = key.rpartition(".")[2]
    return any(
        key == name
        or key.startswith(f"{name}.")
        or (key.startswith("in_force.") and name.rpartition(".")[2] in (leaf, f"adam_{leaf}", "optimizer"))
        for name in allowed
    )


_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
_RECIPE_BATCH = (
    *(f"train.{key}" for key in _BATCH[:2]),
    "train.global_batch_size",
    "train.global_batch_tokens",
)


def held_batch(output_dir: Path, recipe: Mapping[str, Any], ds_json: Mapping[str, Any]) -> int | None:
    """Return the global batch of the run in a folder, if recipe and JSON ask for the batch as they did then.

    On another number of ranks the same words would mean another batch, and so another run.
    """
    try:
        saved = json.loads((output_dir / "resolved" / "recipe.json").read_text(encoding="utf-8"))
        saved_json = json.loads((output_dir / "ds_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = all(saved.get(key) == recipe[key] for key in _RECIPE_BATCH)
    same = same and all(saved_json.get(key, "auto") == ds_json.get(key, "auto") for key in _BATCH)
    return saved.get("in_force.global_batch") if same else None


_TIMES = 3


def guard_restarts(output_dir: Path) -> None:
    """Count restarts that a launcher made by itself. Raises UserError once the same step has failed 3 times.

    torchrun counts its restarts in TORCHELASTIC_RESTART_COUNT; scripts may do so in DSTRAIN_RESTARTS.
    """
    environment = os.environ
    restarts = environment.get("DSTRAIN_RESTARTS") or environment.get("TORCHELASTIC_RESTART_COUNT") or "0"
    file, log = output_dir / "restarts.json", output_dir / "metrics.jsonl"
    if not restarts.isdecimal() or int(restarts) == 0 or not log.exists():
        file.unlink(missing_ok=True)
        return
    try:
        step = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])["step"]
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (ValueError, KeyError, IndexError):  # a line that was cut off as the process died
        return
    times = before.get("times", 0) + 1 if before.get("step") == step else 1
    if times >= _TIMES:
        raise UserError(
            f"output_dir={str(output_dir)!r}: the run failed {times} times in a row after step {step}; it is "
            "not started again by itself. Its last error is above; start it by hand to try once more"
        )
    write_text(file, json.dumps({"step": step, "times": times}))


def lock(output_dir: Path) -> FileLock:
    """Take the output folder for this process until it ends, and forget how the run before failed.

    Raises UserError if another run has it, or if it cannot be written.
    """
    held = _lock(output_dir, "output_dir")
    try:
        failure.clear(output_dir)
    except OSError as error:
        raise UserError(f"output_dir={str(output_dir)!r}: cannot be written: {error.strerror}") from None
    return held


def _lock(folder: Path, key: str) -> FileLock:
    """Take a folder, made if it is missing. key: what the user calls it. Raises UserError as `lock` does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / ".lock")
        held.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{key}={str(folder)!r}: another run is writing there") from None
    except OSError as error:
        raise UserError(f"{key}={str(folder)!r}: cannot be written: {error.strerror}") from None
    return held


def lock_nvme(folders: Sequence[str], place: distributed.World) -> list[FileLock]:
    """Take the folders that tensors are offloaded to: files of two runs have the same names.

    One process of each host takes them. Raises UserError for a folder that does not exist, which a run that
    made it would fill with terabytes on whichever disk it came to lie, or that another run has.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"nvme_path={folder!r}: no such folder; name one on a local NVMe disk")
    places = sorted({Path(folder).resolve() for folder in folders})
    return [_lock(folder, "nvme_path") for folder in places if place.local_rank == 0]


def _by_leaf(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return every value inside nested mappings and lists by its dotted place."""
    if isinstance(value, Mapping | list) and value:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        leaves = [_by_leaf(inner, f"{prefix}{key}.") for key, inner in items]
        return {key: inner for leaf in leaves for key, inner in leaf.items()}
    return {prefix.removesuffix("."): value}


def describe(
    output_dir: Path,
    options: Mapping[str, Any],
    recipe: str,
    ds_json: Mapping[str, Any],
    resolved: Mapping[str, Any],
) -> None:
    """Write what makes `output_dir` a recipe folder that reruns, and what `claim` compares.

    recipe: YAML that names `ds_config.json`. ds_json: the JSON as given. resolved: what the engine got.
    """
    (output_dir / "resolved").mkdir(parents=True, exist_ok=True)
    write_text(output_dir / "recipe.yaml", recipe)
    write_text(output_dir / "ds_config.json", json.dumps(ds_json, indent=2) + "\n")
    write_text(output_dir / "resolved" / "ds_config.json", json.dumps(resolved, indent=2) + "\n")
    write_text(output_dir / "resolved" / "recipe.json", json.dumps(options, indent=2) + "\n")
