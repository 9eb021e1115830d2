"""What a recipe asks of a host: JSON, tokenizer, model, data, output folder. No weights are loaded."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.doctor import hub
from dstrain.doctor.check import Check, failure, guarded, ok, warning
from dstrain.errors import UserError

_GIB = 2**30


@dataclass(frozen=True)
class Needs:
    """What follows from a recipe for the checks of the machine. Sizes in bytes; None if not known."""

    precision: str | None = None
    ops: tuple[str, ...] = ()
    nvme_paths: tuple[str, ...] = ()
    output_dir: Path | None = None
    cache_dir: Path | None = None
    report_to: tuple[str, ...] = ()
    uses_hub: bool = False
    parameters: int | None = None
    device_bytes: float | None = None  # model states, a GPU
    host_bytes: float | None = None  # model states, all ranks of a host
    checkpoint_bytes: float | None = None  # all that are kept at a time
    options: Mapping[str, Any] | None = None


def examine(file: Path, overrides: Sequence[str], ranks: int, local_ranks: int) -> tuple[list[Check], Needs]:
    """Check a recipe on this host, for `ranks` ranks, of which `local_ranks` on each host.

    Raises UserError if the recipe itself or an override cannot be read: there is nothing to check then.
    """
    from dstrain import config

    recipe, _ = config.load_recipe(file, overrides)
    own = recipe.model.model_dump()
    checks = guarded("tokenizer", lambda: tokenizer(own), 90)
    checks += guarded("model", lambda: model(own), 90)
    sources = {"data.train": recipe.data.train, "data.eval": recipe.data.eval or ()}
    for key, several in sources.items():
        for source in several:
            one = source.model_dump()
            checks += guarded("data", lambda one=one, key=key: data(one, key), 60)
    named = [own["model_name_or_path"], own["tokenizer_name_or_path"], *(s.path for s in recipe.data.train)]
    base = {
        "output_dir": Path(recipe.output_dir).expanduser().absolute(),
        "cache_dir": Path(recipe.data.cache_dir).expanduser() if recipe.data.cache_dir else None,
        "report_to": recipe.logging.report_to,
        "uses_hub": any(name and hub.is_hub_name(name) for name in named),
    }
    found: list[Needs] = []
    broken = any(check.state == "failure" and check.name in ("tokenizer", "model") for check in checks)

    def whole() -> Check:
        if broken:
            check, needs = _unresolved(file, overrides, base)
        else:
            check, needs = _resolved(file, overrides, ranks, local_ranks, base)
        found.append(needs)
        return check

    checks = [*guarded("DeepSpeed JSON", whole, 120), *checks]
    needs = found[0] if found else Needs(**base)
    if needs.options is not None:
        checks += guarded("output folder", lambda: output(base["output_dir"], needs.options or {}), 60)
    return checks, needs


def _resolved(
    file: Path, overrides: Sequence[str], ranks: int, local_ranks: int, base: Mapping[str, Any]
) -> tuple[Check, Needs]:
    from dstrain import distributed, request

    on_cpu = distributed.on_cpu()
    run = request.load(file, overrides, dp_size=ranks, on_cpu=on_cpu)
    ds, parameters = run.ds, count_parameters(run.model_config)
    device_bytes, host_bytes = states_bytes(
        parameters, ds.zero_stage, ds.precision, run.dp_size, ds.config["zero_optimization"], on_cpu=on_cpu
    )
    kept = run.recipe.checkpoint.save_total_limit or 1
    needs = Needs(
        **base,
        precision=ds.precision,
        ops=ds.ops,
        nvme_paths=ds.nvme_paths,
        parameters=parameters,
        device_bytes=None if on_cpu else device_bytes,
        host_bytes=host_bytes * local_ranks,
        checkpoint_bytes=12.0 * parameters * (kept + 1),  # one more while it is written
        options=run.options,
    )
    batch = f"{ds.micro} micro x {ds.gas} gas x {run.dp_size} dp = {ds.global_batch} sequences a step"
    seen = f"{run.ds_file.name}: ZeRO {ds.zero_stage}, {ds.precision}; {batch}; {parameters:,} parameters"
    return ok("DeepSpeed JSON", seen), needs


def _unresolved(file: Path, overrides: Sequence[str], base: Mapping[str, Any]) -> tuple[Check, Needs]:
    """Find and read the JSON alone, where tokenizer or model config lack to fill it."""
    from dstrain import config, ds_config, request

    recipe, ds_overrides = config.load_recipe(file, overrides)
    folder = config.recipe_file(file).resolve().parent
    where = {"recipe_dir": folder, "library_dir": request.LIBRARY}
    ds_file, ds_json = ds_config.choose(recipe.deepspeed, None, None, None, ds_overrides, **where)
    ds_config.check_keys(ds_json, str(ds_file))
    blocks = [
        (ds_json.get("zero_optimization") or {}).get(f"offload_{what}") for what in ("param", "optimizer")
    ]
    paths = [block["nvme_path"] for block in blocks if block and block.get("device") == "nvme"]
    needs = Needs(**base, nvme_paths=tuple(dict.fromkeys(paths)))
    seen = f"{ds_file.name}: read, but not filled, which takes tokenizer and model"
    return warning("DeepSpeed JSON", seen, "mend tokenizer and model first"), needs


def count_parameters(model_config: Any) -> int:
    """Return the number of parameters of a model, tied ones once, from its config alone."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(model_config)
    return sum(parameter.numel() for parameter in lm.parameters())


def states_bytes(
    parameters: int, stage: int, precision: str, ranks: int, zero: Mapping[str, Any], *, on_cpu: bool
) -> tuple[float, float]:
    """Return bytes of weights, gradients and optimizer states on a rank's device and in its host memory.

    A lower bound: without activations, buffers and the libraries. Two moments and, beside weights in 16 bits,
    fp32 masters; stage 1 splits optimizer states over ranks, 2 gradients too, 3 weights too (Rajbhandari et
    al. 2020, ZeRO, section 3). On a CPU all of it is in host memory; in NVMe files it is in neither.
    """
    narrow = precision in ("bf16", "fp16")
    weights = parameters * (2 if narrow else 4) / (ranks if stage == 3 else 1)
    gradients = parameters * (2 if narrow else 4) / (ranks if stage >= 2 else 1)
    optimizer = parameters * (12 if narrow else 8) / (ranks if stage >= 1 else 1)
    where = {"device": 0.0, "host": 0.0, "nvme": 0.0}
    names = {"cpu": "host", "nvme": "nvme"}
    blocks = {"weights": zero.get("offload_param") or {}, "optimizer": zero.get("offload_optimizer") or {}}
    where[names.get(blocks["weights"].get("device"), "device")] += weights
    where[names.get(blocks["optimizer"].get("device"), "device")] += optimizer
    where["device"] += gradients
    return (0.0, where["device"] + where["host"]) if on_cpu else (where["device"], where["host"])


def tokenizer(own: Mapping[str, Any]) -> Check:
    """Check that the tokenizer loads, or can be had from the Hub. own: the recipe's section `model`."""
    name = own["tokenizer_name_or_path"] or own["model_name_or_path"]
    if name and hub.is_hub_name(name):
        revision = own["revision"] if name == own["model_name_or_path"] else None
        state = hub.model(name, revision, ("tokenizer.json",))
        if state.problem or not state.cached:
            return _of_hub("tokenizer", state, "model.tokenizer_name_or_path")
    if name and Path(name).is_absolute() and not Path(name).exists():
        return failure("tokenizer", f"{name}: no such folder", "correct model.tokenizer_name_or_path")
    from dstrain import model as models

    origin = models.Origin(own["model_name_or_path"], own["revision"], own["trust_remote_code"])
    try:
        loaded = models.load_tokenizer(
            origin, own["tokenizer_name_or_path"], own["chat_template"], own["add_tokens"]
        )
    except UserError as error:
        return failure("tokenizer", str(error), "name a folder or Hub name in model.tokenizer_name_or_path")
    return ok("tokenizer", f"{_short(name)}: {len(loaded):,} tokens")


def model(own: Mapping[str, Any]) -> list[Check]:
    """Check that config and weight files are there and whole. own: the recipe's section `model`."""
    checks, name, attention = [], own["model_name_or_path"], own["attn_implementation"]
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(attention)
    if package and importlib.util.find_spec(package) is None:
        remedy = f"pip install {package.replace('_', '-')}, or model.attn_implementation=sdpa"
        checks.append(failure("model", f"attn_implementation {attention}: no package {package}", remedy))
    if name is None:
        return [*checks, ok("model", f"new, {own['config'].get('model_type')}: no weights to read")]
    if hub.is_hub_name(name):
        state = hub.model(name, own["revision"], ("config.json", "weights"))
        return [*checks, _of_hub("model", state, "model.model_name_or_path")]
    return [*checks, weight_files(Path(name))]


def weight_files(folder: Path) -> Check:
    """Check a model's folder: config.json, and safetensors files that are whole, by their headers."""
    import json

    from safetensors import safe_open

    key = "model.model_name_or_path"
    if not (folder / "config.json").is_file():
        what = "no such folder" if not folder.is_dir() else "holds no config.json"
        return failure("model", f"{folder}: {what}", f"name a Hugging Face folder in {key}")
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    if not index.is_file() and not (folder / names[0]).is_file():
        others = sorted(file.name for file in folder.glob("*.bin")) or sorted(
            f.name for f in folder.glob("*.gguf")
        )
        if others:
            return ok(
                "model", f"{_short(str(folder))}: {others[0]}, not safetensors: read whole by each rank"
            )
    size = 0
    for name in names:
        try:
            with safe_open(folder / name, framework="numpy"):
                pass  # its header says how long the file is
            size += (folder / name).stat().st_size
        except Exception as error:  # no file, a file that was cut, no right to read it
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            return failure("model", f"{folder / name}: {reason}", "copy or download the folder again")
    files = f"{len(names)} file{'s' if len(names) > 1 else ''}"
    return ok("model", f"{_short(str(folder))}: {files}, {size / _GIB:.2f} GiB, headers read")


def data(source: Mapping[str, Any], key: str) -> Check:
    """Check that a source's files can be read and the first row has its columns, or that the Hub has it."""
    from dstrain.data import COLUMNS
    from dstrain.data.sources import find_files, read_rows

    try:
        files = find_files(source["path"])
        first = next(iter(read_rows(files[0])), None) if files else None
    except UserError as error:
        return failure("data", str(error), f"correct {key}, or the file")
    if files is None:
        return _of_hub("data", hub.dataset(source["path"]), f"{key}.path")
    unreadable = [file for file in files if not os.access(file, os.R_OK)]
    if unreadable:
        return failure("data", f"{unreadable[0]}: no right to read it", f"chmod a+r {unreadable[0]}")
    size = sum(file.stat().st_size for file in files)
    shown = _short(source["path"])
    if first is None:
        return failure("data", f"{files[0]}: empty", f"name another file in {key}")
    wanted = [source[column] for column in COLUMNS[source["format"]]]
    absent = [column for column in wanted if column not in first[1]]
    if absent:
        there = ", ".join(first[1])
        seen = f"{files[0]}: no column {absent[0]!r}; the columns are: {there}"
        column = COLUMNS[source["format"]][wanted.index(absent[0])]
        return failure("data", seen, f"set {column} of the source in {key}, or its format")
    count = f"{len(files)} files, " if len(files) > 1 else ""
    return ok("data", f"{shown}: {count}{size / 2**20:,.1f} MiB, first row has {', '.join(wanted)}")


def output(folder: Path, options: Mapping[str, Any]) -> Check:
    """Check that the output folder is free, or holds a run that this recipe may go on with."""
    from dstrain import checkpoint, run_folder

    run_folder.claim(folder, options)  # UserError with all that differs
    step = checkpoint.newest_step(folder / "checkpoints") if (folder / "checkpoints").is_dir() else None
    return ok(
        "output folder",
        f"{_short(str(folder))}: " + (f"goes on after step {step:,}" if step else "a new run"),
    )


def _of_hub(name: str, state: hub.State, key: str) -> Check:
    if state.problem:
        return failure(name, state.problem, state.remedy or f"name another one in {key}, or a local folder")
    return ok(name, state.words)


def _short(path: str) -> str:
    """Return a path relative to the working directory where it lies inside."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
