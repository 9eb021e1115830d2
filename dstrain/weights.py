"""Weights into a model: drawn from a seed or read from files, whole or partitioned, the same numbers."""

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from dstrain.errors import UserError

# What the engine keeps its weights in; autocast keeps them in fp32.
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Read = Callable[[str], torch.Tensor]

_OWN_HEAD = (
    "its output head has weights of its own, but the embedding's are asked for; set "
    "model.config.tie_word_embeddings=false"
)


@dataclass(frozen=True)
class Origin:
    """Where weights come from; no name means new ones."""

    name: str | None
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def title(self) -> str:
        """The name as a person would type it here."""
        name = self.name or "new"
        return os.path.relpath(name) if Path(name).is_relative_to(Path.cwd()) else name

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that every `from_pretrained` takes."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


@dataclass(frozen=True)
class _Plan:
    """What the model is to be."""

    origin: Origin
    config: PreTrainedConfig
    attn_implementation: str
    dtype: torch.dtype
    seed: int
    rows: int  # of the embedding; beyond the vocabulary of saved weights, rows are added


def build(
    origin: Origin,
    config: PreTrainedConfig,
    attn_implementation: str,
    precision: str,
    seed: int,
    rows: int,
    zero3_config: dict[str, Any] | None,
) -> PreTrainedModel:
    """Load weights, or draw new ones from `seed`: the same on every rank and under every ZeRO stage.

    With a `zero3_config`, the DeepSpeed config of an engine that partitions parameters, the model is made
    partitioned and filled parameter by parameter from the first rank. That one reads safetensors a tensor at
    a time; new weights, and files that Transformers converts while it loads them, it holds whole meanwhile.

    precision: the engine's, such as `bf16` or `bf16 autocast`. rows: of the embedding; those that saved
    weights lack are the mean of theirs. Raises UserError if weights are missing or cannot be loaded.
    """
    dtype = _DTYPES.get(precision, torch.float32)
    plan = _Plan(origin, config, attn_implementation, dtype, seed, rows)
    try:
        return _whole(plan) if zero3_config is None else _partitioned(plan, zero3_config)
    except UserError:
        raise
    except Exception as error:  # a config can be wrong, and a file damaged, in more ways than have a name
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"model {origin.title} ({config.model_type}) cannot be built: {reason}") from None


@contextmanager
def _errors_only() -> Iterator[None]:
    """Keep Transformers' table of missing weights off the screen; one line of ours says it."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


def _whole(plan: _Plan) -> PreTrainedModel:
    origin, config = plan.origin, plan.config
    if origin.name is None:
        torch.manual_seed(plan.seed)
        return _from_config(plan, torch.float32)
    with _errors_only():
        model, report = AutoModelForCausalLM.from_pretrained(
            origin.name,
            config=config,
            attn_implementation=plan.attn_implementation,
            dtype=plan.dtype,
            output_loading_info=True,
            **origin.options,
        )
        if missing := sorted(report["missing_keys"]):
            raise UserError(
                f"{origin.name}: {len(missing)} weights are not in the checkpoint, first {missing[0]!r}"
            )
        head = model.get_output_embeddings()
        tied = head is None or head.weight is model.get_input_embeddings().weight
        if config.get_text_config().tie_word_embeddings and not tied:
            raise UserError(f"{origin.name}: {_OWN_HEAD}")
        stored = config.get_text_config().vocab_size
        if plan.rows > stored:
            model.resize_token_embeddings(plan.rows, mean_resizing=False)
            for name in _vocabulary_parameters(model):
                parameter = model.get_parameter(name).data
                parameter.copy_(_grown(parameter[:stored], plan.rows))
    return model


def _partitioned(plan: _Plan, zero3_config: dict[str, Any]) -> PreTrainedModel:
    import deepspeed
    import torch._dynamo  # zero.Init patches torch functions and breaks a first import inside it
    from transformers.initialization import no_init_weights

    # Without its dtype override: parameters get Transformers' dtype, and rotary frequencies keep theirs.
    overrides = [deepspeed.runtime.zero.DeepSpeedTensorOverride.device]
    partitions = deepspeed.zero.Init(config_dict_or_path=zero3_config, tensor_overrides=overrides)
    if type(plan.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        # Its module is imported now: zero.Init would undo what decorators do to the classes made inside it.
        MODEL_FOR_CAUSAL_LM_MAPPING[type(plan.config)]
    with no_init_weights(), _errors_only(), partitions:
        model = _from_config(plan, plan.dtype)
    model.tie_weights()
    _take_generation_config(model, plan.origin)
    reads = torch.distributed.get_rank() == 0
    read = _read(plan, model) if reads else None
    saved = model.state_dict().keys()  # buffers that are made anew on loading are not in it
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if read:
                    parameter.copy_(read(name))
        for name, buffer in model.named_buffers():
            if name in saved:
                if read:
                    buffer.copy_(read(name))
                torch.distributed.broadcast(buffer, 0)
    return model


def _read(plan: _Plan, model: PreTrainedModel) -> Read:
    """Return what gives the weights of a partitioned `model` by name."""
    shapes = {
        name: tuple(getattr(tensor, "ds_shape", tensor.shape))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    saved = model.state_dict().keys()
    wanted = {name: shape for name, shape in shapes.items() if name in saved}
    files = _safetensors(plan.origin) if plan.origin.name else {}
    stored, grown = plan.config.get_text_config().vocab_size, _vocabulary_parameters(model)
    expected = {
        name: (stored, *shape[1:]) if name in grown and plan.rows > stored else shape
        for name, shape in wanted.items()
    }
    if all(name in files and _shape(files[name], name) == shape for name, shape in expected.items()):
        for target, source in (model.all_tied_weights_keys or {}).items():
            if target in files and not torch.equal(_tensor(files, target), _tensor(files, source)):
                raise UserError(f"{plan.origin.name}: {_OWN_HEAD}")

        def read(name: str) -> torch.Tensor:
            return _grown(_tensor(files, name), plan.rows) if name in grown else _tensor(files, name)

        return read
    whole: Mapping[str, torch.Tensor] = _whole(plan).state_dict()
    return whole.__getitem__


def _safetensors(origin: Origin) -> dict[str, str]:
    """Return the file of each tensor that lies in safetensors; empty if there are none."""
    quiet = {
        "revision": origin.revision,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    if index := cached_file(origin.name, SAFE_WEIGHTS_INDEX_NAME, **quiet):
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        paths = {shard: cached_file(origin.name, shard, **quiet) for shard in set(shards.values())}
        return {name: paths[shard] for name, shard in shards.items() if paths[shard]}
    if single := cached_file(origin.name, SAFE_WEIGHTS_NAME, **quiet):
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    return {}


def _tensor(files: Mapping[str, str], name: str) -> torch.Tensor:
    with safe_open(files[name], "pt") as file:
        return file.get_tensor(name)


def _shape(file: str, name: str) -> tuple[int, ...] | None:
    with safe_open(file, "pt") as tensors:
        return tuple(tensors.get_slice(name).get_shape()) if name in tensors.keys() else None  # noqa: SIM118


def skeleton(origin: Origin, config: PreTrainedConfig, rows: int, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model without weights, on the meta device: its names, shapes and configs."""
    with torch.device("meta"):
        model = _from_config(_Plan(origin, config, "sdpa", dtype, 0, rows), dtype)
    _take_generation_config(model, origin)
    model.config.architectures = [type(model).__name__]
    return model


def _from_config(plan: _Plan, dtype: torch.dtype) -> PreTrainedModel:
    config = copy.deepcopy(plan.config)
    config.get_text_config().vocab_size = plan.rows
    return AutoModelForCausalLM.from_config(
        config,
        attn_implementation=plan.attn_implementation,
        dtype=dtype,
        trust_remote_code=plan.origin.trust_remote_code,
    )


def _take_generation_config(model: PreTrainedModel, origin: Origin) -> None:
    if origin.name is not None and model.can_generate():
        with suppress(OSError):  # it has none: that of the config stays
            model.generation_config = GenerationConfig.from_pretrained(origin.name, revision=origin.revision)


def _vocabulary_parameters(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters that have a row for each token."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    owned = {id(p) for m in modules if isinstance(m, nn.Module) for p in m.parameters(recurse=False)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in owned}


def _grown(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `tensor` with rows of its mean added up to `rows`."""
    if tensor.shape[0] >= rows:
        return tensor
    mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(rows - tensor.shape[0], *tensor.shape[1:])])
