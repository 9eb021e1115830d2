"""DeepSpeed JSON files: find one, read it strictly, and resolve it against the recipe.

One rule decides between the two. "auto" in the JSON, or no such key, means that the recipe decides; a
literal decides by itself; both written by the user and different is an error. Nothing that DeepSpeed would
ignore passes.

Needs no torch, DeepSpeed, process group, weights or device.
"""

import copy
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.ds_fill import (
    Settings,
    check_combinations,
    checkpointing,
    fill_batch,
    fill_buckets,
    fill_precision,
    fit_to_stage,
    more_ops,
    normalise,
    nvme_paths,
    show,
)
from dstrain.ds_keys import DEEPSPEED_AUTO, check_keys, lookup, walk
from dstrain.ds_optim import resolve_optimizer, resolve_schedule
from dstrain.errors import UserError, nearest

__all__ = ["Resolved", "apply_overrides", "check_keys", "find_json", "load_json", "resolve", "shorthand"]

PRECISIONS = ("bf16", "fp16", "fp32")
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Resolved:
    """A filled DeepSpeed config, and the values that are in force whichever file they came from."""

    config: dict[str, Any]  # what deepspeed.initialize gets: no "auto" is left
    micro: int  # sequences per rank and forward pass
    gas: int  # micro batches per optimizer step
    global_batch: int  # sequences per optimizer step over all ranks
    learning_rate: float
    betas: tuple[float, float] | None  # None: this optimizer has none, or keeps its own default
    eps: float | None
    weight_decay: float
    gradient_clipping: float  # 0.0 is off
    lr_scheduler_type: str
    warmup_steps: int  # these first, then warmup_ratio of all steps: one of the two is 0
    warmup_ratio: float
    min_lr_ratio: float
    precision: str  # bf16, fp16, fp32, "bf16 autocast" or "fp16 autocast"
    zero_stage: int
    gradient_checkpointing: bool
    offload_activations: bool
    ops: tuple[str, ...]  # DeepSpeed's op builders, beside shm_comm on a CPU, that must be built
    nvme_paths: tuple[str, ...]  # folders that offloaded tensors are written to
    notes: tuple[str, ...]  # a printed line each

    @property
    def in_force(self) -> dict[str, Any]:
        """What decides the losses of a run, by name: a run may be resumed only with the same."""
        names = (
            "global_batch learning_rate betas eps weight_decay gradient_clipping lr_scheduler_type "
            "warmup_steps warmup_ratio min_lr_ratio"
        )
        values = {f"in_force.{name}": getattr(self, name) for name in names.split()}
        # As JSON gives them back.
        values["in_force.betas"] = list(self.betas) if self.betas else None
        return values | {"in_force.optimizer": self.config["optimizer"]["type"]}


def find_json(name: str, *, recipe_dir: Path, library_dir: Path) -> Path:
    """Return the path of a JSON: a path from the recipe's folder, or a bare name there or in `library_dir`.

    Raises:
        UserError: no such file. The message names the places and the nearest file name.
    """
    folders = [recipe_dir / Path(name).parent] if "/" in name else [recipe_dir, library_dir]
    for folder in folders:
        if (path := folder / Path(name).name).is_file():
            return path
    names = [path.name for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.json"))]
    places = " or in ".join(str(folder) for folder in folders)
    raise UserError(f"deepspeed={name}: no such file in {places}{nearest(Path(name).name, names)}")


def shorthand(stage: int | None, precision: str | None, current: dict) -> str:
    """Return the file of ds_configs/ that `--zero_stage` and `--precision` name.

    The one that is not given is read from `current`, the JSON that the recipe names.

    Raises:
        UserError: not a stage or not a precision.
    """
    if stage is None:
        stage = lookup(current, "zero_optimization.stage") or 0
    if stage not in STAGES:
        raise UserError(f"--zero_stage={show(stage)} is not one of 0, 1, 2, 3")
    if precision is None:
        enabled = {name: lookup(current, f"{name}.enabled") in (True, "auto") for name in ("bf16", "fp16")}
        precision = "bf16" if enabled["bf16"] else "fp16" if enabled["fp16"] else "fp32"
    if precision not in PRECISIONS:
        raise UserError(
            f"--precision={precision} is not one of {', '.join(PRECISIONS)}{nearest(precision, PRECISIONS)}"
        )
    return f"zero{stage}.json" if precision == "bf16" else f"zero{stage}_{precision}.json"


def load_json(path: Path) -> dict[str, Any]:
    """Read strict JSON whose top level is an object.

    Raises:
        UserError: comments, trailing commas, NaN, duplicate keys or no object, with the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        ds = json.loads(text)
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        hint = "; comments and trailing commas are not JSON" if re.search(r"//|#|/\*|,\s*[}\]]", text) else ""
        raise UserError(f"{path}:{error.lineno}: {error.msg}{hint}") from None
    if not isinstance(ds, dict):
        raise UserError(f"{path}:1: the top level must be an object {{...}}")
    _check_tokens(text, path)
    return ds


def _check_tokens(text: str, path: Path) -> None:
    """Refuse what json.loads lets through: duplicate keys, which it merges, and numbers that JSON lacks."""
    line, keys, last = 1, [], ""
    for token in re.findall(r'"(?:[^"\\]|\\.)*"|NaN|-?Infinity|[{}\[\]:\n]', text):
        if token == "\n":
            line += 1
            continue
        if token in ("NaN", "Infinity", "-Infinity"):
            raise UserError(f"{path}:{line}: {token} is not JSON")
        if token in "{[":
            keys.append(set())
        elif token in "}]":
            keys.pop()
        elif token == ":":
            if last in keys[-1]:
                raise UserError(f"{path}:{line}: duplicate key {last}")
            keys[-1].add(last)
        last = token


def apply_overrides(ds: dict, overrides: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of `ds` with dotted keys such as "zero_optimization.stage" set.

    Raises:
        UserError: a part of a key names a value that is not a block.
    """
    merged = copy.deepcopy(ds)
    for path, value in overrides.items():
        *parents, leaf = path.split(".")
        node = merged
        for i, part in enumerate(parents):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
            if not isinstance(node, dict):
                raise UserError(f"deepspeed.{path}: {'.'.join(parents[: i + 1])}={show(node)} is not a block")
        node[leaf] = copy.deepcopy(value)
    return merged


def resolve(
    ds: dict,
    *,
    ds_file: str,
    recipe_file: str,
    values: Mapping[str, Any],
    explicit: Collection[str],
    dp_size: int,
    hidden_size: int | None,
    on_cpu: bool,
) -> Resolved:
    """Fill a JSON from the recipe and check one against the other, without changing `ds`.

    Args:
        ds: the JSON as it was given.
        ds_file, recipe_file: their names, for messages.
        values: the recipe's values by dotted key, defaults included.
        explicit: the dotted keys that the user wrote.
        dp_size: data-parallel ranks.
        hidden_size: the model's, for the bucket sizes that are "auto".
        on_cpu: whether there is no accelerator.

    Raises:
        UserError: see `check_keys`; also values that are given twice differently, batch sizes that do not
            divide, blocks that do not fit together, and an "auto" that nothing fills.
    """
    check_keys(ds, ds_file)
    if (written := ds.get("data_parallel_size")) not in (None, dp_size):
        raise UserError(f"{ds_file}: data_parallel_size={show(written)}, but there are {dp_size}; remove it")
    config = normalise(ds, ds_file)
    settings = Settings(values, explicit, ds_file, recipe_file)
    zero = config.setdefault("zero_optimization", {})
    stage = zero.setdefault("stage", 0)
    if stage == "auto":
        raise UserError(f'{ds_file}: zero_optimization.stage="auto": write 0, 1, 2 or 3')
    notes = fit_to_stage(zero, stage, ds_file)
    precision, more = fill_precision(config, settings, on_cpu)
    notes += more
    check_combinations(config, stage, precision, ds_file)
    offload = lookup(zero, "offload_optimizer.device") in ("cpu", "nvme")
    optimizer = resolve_optimizer(config, settings, offload=offload, on_cpu=on_cpu)
    schedule = resolve_schedule(config, settings, optimizer.learning_rate)
    if optimizer.block["type"].lower() == "adagrad" and stage > 0 and not offload:
        raise UserError(f"{ds_file}: optimizer.type=Adagrad fails in DeepSpeed under ZeRO {stage}; use AdamW")
    if any((config.pop("compile", None) or {}).values()):
        raise UserError(
            f"{ds_file}: compile is read only by DeepCompile, which is not used here; remove the block"
        )
    config["optimizer"] = optimizer.block
    config.pop("scheduler", None)  # the recipe's schedule is passed to deepspeed.initialize instead
    fill_buckets(zero, hidden_size, ds_file)
    config |= fill_batch(config, settings, dp_size)
    clip = settings.pick(config, "gradient_clipping", "train.gradient_clipping", lambda value: value or 0.0)
    config["gradient_clipping"] = float(clip)  # always: DeepSpeed's default has changed from 0 to 1
    config.setdefault("zero_allow_untested_optimizer", True)
    for path, value in walk(config):
        if value == "auto" and path not in DEEPSPEED_AUTO:
            raise UserError(f'{ds_file}: {path}="auto" is filled by nothing here; write a value or remove it')
    gradient_checkpointing, offload_activations, more = checkpointing(
        config.pop("activation_checkpointing", {}), settings
    )
    return Resolved(
        config=config,
        micro=config["train_micro_batch_size_per_gpu"],
        gas=config["gradient_accumulation_steps"],
        global_batch=config["train_batch_size"],
        learning_rate=optimizer.learning_rate,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        gradient_clipping=config["gradient_clipping"],
        lr_scheduler_type=schedule.lr_scheduler_type,
        warmup_steps=schedule.warmup_steps,
        warmup_ratio=schedule.warmup_ratio,
        min_lr_ratio=schedule.min_lr_ratio,
        precision=precision,
        zero_stage=stage,
        gradient_checkpointing=gradient_checkpointing,
        offload_activations=offload_activations,
        ops=(*optimizer.ops, *more_ops(config, on_cpu, ds_file)),
        nvme_paths=nvme_paths(zero),
        notes=(*notes, *optimizer.notes, *schedule.notes, *more),
    )


def choose(
    name: str,
    typed: str | None,
    stage: int | None,
    precision: str | None,
    overrides: Mapping[str, Any],
    *,
    recipe_dir: Path,
    library_dir: Path,
) -> tuple[Path, dict[str, Any]]:
    """Return the file and the content of the JSON that is asked for.

    Args:
        name: the recipe's.
        typed: the one of the command line, which goes before it; a path from the working directory.
        stage, precision: the two shorthands, which pick a file of `library_dir`.
        overrides: see `apply_overrides`.

    Raises:
        UserError: see `find_json`, `shorthand`, `load_json` and `apply_overrides`.
    """
    if typed is not None and (stage is not None or precision is not None):
        raise UserError(
            "command line: --deepspeed_config names a file, and --zero_stage and --precision another"
        )
    if typed is not None and Path(typed).is_file():
        file = Path(typed)
    else:
        file = find_json(typed or name, recipe_dir=recipe_dir, library_dir=library_dir)
    ds = load_json(file)
    if stage is not None or precision is not None:
        file = find_json(shorthand(stage, precision, ds), recipe_dir=library_dir, library_dir=library_dir)
        ds = load_json(file)
    return file, apply_overrides(ds, overrides)
