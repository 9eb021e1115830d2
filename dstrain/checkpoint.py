"""Save, find, resume and prune checkpoints, and tell one run's output folder from another's.

    output_dir/checkpoints/step-100/   DeepSpeed's files, rng-rank0.pt ..., trainer.json
    output_dir/checkpoints/latest      the newest step's folder name

A checkpoint is written into `tmp-STEP`, and gets its name when it is whole; `latest` is replaced last.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dstrain import distributed
from dstrain.errors import UserError

_FALL_BACK = "delete this folder to go on from the checkpoint before it"
_HYPERPARAMETERS = ("initial_lr", "betas", "eps", "weight_decay", "momentum")

# Recipe keys that may change between the two halves of one run.
_MAY_CHANGE = (
    "output_dir",
    "deepspeed",
    "train.max_steps",
    "train.num_train_epochs",
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


def save(
    engine: Any,
    output_dir: Path,
    step: int,
    trainer: Mapping[str, Any],
    keep: int | None,
    place: distributed.World,
) -> None:
    """Write a checkpoint of all ranks, then delete the oldest beyond `keep` (None keeps all).

    trainer: what the loop needs to go on, as plain numbers and strings.
    """
    root = output_dir / "checkpoints"
    temporary = root / f"tmp-{step}"
    if place.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    distributed.barrier()
    engine.save_checkpoint(str(root), tag=temporary.name, save_latest=False)
    torch.save(distributed.rng_state(), temporary / f"rng-rank{place.rank}.pt")
    distributed.barrier()
    if place.is_main:
        body = {"step": step, **_layout(engine, place), **trainer}
        _write(temporary / "trainer.json", json.dumps(body, indent=2))
        final = root / f"step-{step}"
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _write(root / "latest", final.name)
        if keep is not None:
            _prune(root, keep)
    distributed.barrier()


def find(output_dir: Path, resume_from: str) -> Path | None:
    """Return the step folder to resume from, or None to start afresh.

    resume_from: `auto` (the newest of output_dir), `never`, or an output folder or step folder from which a
    new run begins; once it has checkpoints of its own, they go before.
    Raises UserError if a named place holds no checkpoint, or with `never` if output_dir does.
    """
    own = _newest(output_dir / "checkpoints")
    if resume_from == "never":
        if own:
            raise UserError(
                f"checkpoint.resume_from_checkpoint='never', but output_dir={str(output_dir)!r} holds "
                f"{own.name}; choose another output_dir"
            )
        return None
    if own or resume_from == "auto":
        return own
    named = Path(resume_from)
    for folder in (named, named / "checkpoints"):
        if (folder / "trainer.json").exists():
            return folder
        if newest := _newest(folder):
            return newest
    raise UserError(
        f"checkpoint.resume_from_checkpoint={resume_from!r}: holds no checkpoint; "
        "give an output folder or one of its checkpoints/step-N"
    )


def read_trainer(folder: Path) -> dict[str, Any]:
    """Return what `save` was given as `trainer`, with `step` and the layout.

    Raises UserError if the file is damaged.
    """
    try:
        return json.loads((folder / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/trainer.json: damaged ({error}); {_FALL_BACK}") from None


def load(engine: Any, folder: Path, place: distributed.World) -> dict[str, Any]:
    """Restore the engine and this rank's generators, and return the trainer's part.

    Learning rate, betas, epsilon and weight decay stay those that the engine was made with: the recipe
    decides, not the file. Raises UserError if the checkpoint is damaged or of another layout.
    """
    trainer = read_trainer(folder)
    for key, value in _layout(engine, place).items():
        if trainer[key] != value:
            raise UserError(
                f"{folder}: saved with {key} {trainer[key]}, this run has {value}; start it with the same"
            )
    scheduler = engine.lr_scheduler
    peaks = list(scheduler.base_lrs)
    groups = [{k: v for k, v in g.items() if k in _HYPERPARAMETERS} for g in scheduler.optimizer.param_groups]
    try:
        with _weights_only():
            path, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
            rng = torch.load(folder / f"rng-rank{place.rank}.pt", map_location="cpu")
    except Exception as error:  # a damaged file shows itself in many ways
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"{folder}: cannot be loaded: {type(error).__name__}: {reason}; {_FALL_BACK}"
        ) from None
    if path is None:
        raise UserError(f"{folder}: DeepSpeed finds no checkpoint in it; {_FALL_BACK}")
    distributed.set_rng_state(rng)
    scheduler.base_lrs = peaks
    for group, own, peak, at in zip(
        scheduler.optimizer.param_groups, groups, peaks, scheduler.lr_lambdas, strict=True
    ):
        group.update(own, lr=peak * at(scheduler.last_epoch))
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
    return trainer


def _layout(engine: Any, place: distributed.World) -> dict[str, Any]:
    """Return what the files of a checkpoint depend on."""
    precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    return {"ranks": place.size, "zero_stage": engine.zero_optimization_stage(), "precision": precision}


def claim(output_dir: Path, recipe: Mapping[str, Any]) -> None:
    """Raise UserError if `output_dir` holds a run of another recipe. `recipe`: all options by dotted key."""
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
    for key in sorted(saved.keys() | now.keys(), key=lambda key: (key.startswith("in_force."), key)):
        if saved.get(key) != now.get(key) and not key.startswith(_MAY_CHANGE):
            raise UserError(
                f"output_dir={str(output_dir)!r}: holds a different run: "
                f"{key} is {saved.get(key)!r} there and {now.get(key)!r} here; choose another output_dir"
            )


def lock(folder: Path, key: str = "output_dir") -> FileLock:
    """Take a folder, made if it is missing, for this process until it ends. key: what the user calls it.

    Raises UserError if another run has it, or if it cannot be written.
    """
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
    return [lock(Path(folder), "nvme_path") for folder in folders if place.local_rank == 0]


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
    _write(output_dir / "recipe.yaml", recipe)
    _write(output_dir / "ds_config.json", json.dumps(ds_json, indent=2) + "\n")
    _write(output_dir / "resolved" / "ds_config.json", json.dumps(resolved, indent=2) + "\n")
    _write(output_dir / "resolved" / "recipe.json", json.dumps(options, indent=2) + "\n")


def _newest(root: Path) -> Path | None:
    """Return the newest whole checkpoint. `latest` may be missing if the run died just before writing it."""
    steps = sorted(_steps(root))
    return root / f"step-{steps[-1]}" if steps else None


def _steps(root: Path) -> list[int]:
    folders = root.glob("step-*/trainer.json")
    names = [folder.parent.name.removeprefix("step-") for folder in folders]
    return [int(name) for name in names if name.isdigit()]


def _prune(root: Path, keep: int) -> None:
    for step in sorted(_steps(root))[:-keep]:
        shutil.rmtree(root / f"step-{step}", ignore_errors=True)


def _write(file: Path, text: str) -> None:
    """Write a file so that after a crash it has either its old or its new content."""
    temporary = file.with_name(f"{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


@contextmanager
def _weights_only() -> Iterator[None]:
    """Let `torch.load` build tensors and a few known classes, and run no code that a file brings along."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    name, before = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ[name] = "1"
    try:
        with torch.serialization.safe_globals(
            [fragment_address, ZeroStageEnum, LossScaler, DynamicLossScaler]
        ):
            yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})
