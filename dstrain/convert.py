"""A checkpoint of any ZeRO stage and number of ranks as a Hugging Face folder. Needs no GPU and no ranks."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from dstrain import request
from dstrain.checkpoint import Reader, problem, steps
from dstrain.errors import UserError, nearest
from dstrain.export import finish_folder
from dstrain.weights import skeleton

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def convert(run: Path, step: int | None, dtype: str, max_shard_size: str, output: Path | None) -> Path:
    """Write the weights of a run's checkpoint, by default the newest that is whole. Returns the folder.

    It reads and writes a layer at a time and holds one shard in memory, whose size is such as `5GB`. What was
    written is read back: names, shapes and dtypes must be those of the model. Raises UserError if the
    checkpoint is damaged or missing, or the output exists.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype={dtype}: not one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
    limit = _bytes(max_shard_size)
    folder = _choose(run / "checkpoints", step)
    reader = Reader(folder)
    asked = request.load(run, dp_size=1, on_cpu=True)
    model = skeleton(asked.origin, asked.model_config, asked.rows, DTYPES[dtype])
    output = output or run / f"export-{folder.name}"
    if output.exists():
        raise UserError(f"--output={output}: exists already")
    temporary = output.with_name(f"{output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    written = _write(model, reader, DTYPES[dtype], limit, temporary)
    model.config.save_pretrained(temporary)
    if model.can_generate():
        model.generation_config.save_pretrained(temporary)
    finish_folder(temporary, asked.tokenizer)
    _verify(temporary, written)
    temporary.rename(output)
    return output


def _choose(root: Path, step: int | None) -> Path:
    found = steps(root)
    if not found:
        raise UserError(f"{root}: holds no checkpoint")
    if step is not None and step not in found:
        raise UserError(f"{root}: no step {step}; there are {', '.join(map(str, found))}")
    wrong = None
    for candidate in [step] if step is not None else reversed(found):
        wrong = problem(root / f"step-{candidate}")
        if wrong is None:
            return root / f"step-{candidate}"
    raise UserError(wrong)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(KB|MB|GB)", text.strip(), re.IGNORECASE)
    if match is None:
        raise UserError(f"--max-shard-size={text}: not a size such as 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2].upper()]


def _layers(model: PreTrainedModel, reader: Reader, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the model's tensors a layer at a time, under the names that its architecture has on disk."""
    tied = set(model.all_tied_weights_keys or {})
    buffers = reader.tensors("rank-00000.safetensors", "buffer:")
    names = [name for name, _ in model.named_parameters() if name not in tied]
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = re.match(r".*?\.\d+\.", name)
        groups.setdefault(layer[0] if layer else name, []).append(name)
    for group in groups.values():
        tensors = {name: reader.whole("master", name).to(dtype) for name in group}
        yield revert_weight_conversion(model, tensors)
    yield {
        name: buffer.to(dtype) if buffer.is_floating_point() else buffer for name, buffer in buffers.items()
    }


def _write(
    model: PreTrainedModel, reader: Reader, dtype: torch.dtype, limit: int, folder: Path
) -> dict[str, tuple[list[int], torch.dtype]]:
    """Write shards and their index. Returns shape and dtype of each tensor by its name."""
    shards: list[list[str]] = []
    seen: dict[str, tuple[list[int], torch.dtype]] = {}
    pending: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        if pending:
            save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
            shards.append(list(pending))
            pending.clear()

    bar = tqdm(_layers(model, reader, dtype), desc="exporting", unit="layer", delay=2)
    for layer in bar:
        for name, tensor in layer.items():
            if sum(t.nbytes for t in pending.values()) + tensor.nbytes > limit:
                flush()
            pending[name] = tensor.contiguous()
            seen[name] = list(tensor.shape), tensor.dtype
            total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return seen
    files = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    for number, file in enumerate(files):
        (folder / f"shard-{number}").rename(folder / file)
    index = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    body = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    return seen


def _verify(folder: Path, written: dict[str, Any]) -> None:
    """Read back what a user will load. Raises UserError where it is not what was written."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_slice(name)
                found[name] = list(tensor.get_shape()), tensors.get_tensor(name).dtype
    if found != written:
        wrong = sorted(found.keys() ^ written.keys()) or [n for n in found if found[n] != written[n]]
        raise UserError(f"{folder}: {wrong[0]} is not there as it was written; try again")
