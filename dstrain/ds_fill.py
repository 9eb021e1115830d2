"""The blocks of a DeepSpeed JSON other than optimizer and scheduler: fill them, and refuse what cannot work.

The functions named fill_* and fit_* change the copy that `normalise` made, never a user's dict.
"""

import copy
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.ds_keys import AUTOCAST_BF16, WITHOUT_EFFECT, lookup
from dstrain.errors import UserError


@dataclass(frozen=True)
class Settings:
    """The recipe's side of the rule that decides who owns a value."""

    values: Mapping[str, Any]
    explicit: Collection[str]  # the keys that the user wrote; the others are defaults
    ds_file: str
    recipe_file: str

    def given(self, key: str) -> bool:
        return key in self.explicit

    def pick(
        self, ds: dict, ds_key: str, key: str, recipe_value: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """Return the JSON's literal, or the recipe's value where the JSON says "auto" or nothing.

        Raises:
            UserError: both were written by the user and differ.
        """
        literal, value = lookup(ds, ds_key), recipe_value(self.values[key])
        if literal is None or literal == "auto":
            return value
        if self.given(key) and value is not None and value != literal:  # a written null is "unset"
            raise self.conflict(ds_key, literal, key)
        return literal

    def conflict(self, ds_key: str, literal: Any, key: str) -> UserError:
        return UserError(
            f"{self.ds_file}: {ds_key}={show(literal)} but {self.recipe_file}: {key}={show(self.values[key])}"
            '; make them equal, remove one, or write "auto" in the JSON'
        )


def show(value: Any) -> str:
    """Return a value as JSON writes it, a string without its quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def _without_nulls(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_nulls(value) for key, value in node.items() if value is not None}
    return copy.deepcopy(node)


def normalise(ds: dict, file: str) -> dict[str, Any]:
    """Copy without nulls and idle blocks, old names replaced by those that DeepSpeed translates them to."""
    config = {
        key: value for key, value in _without_nulls(ds).items() if key not in WITHOUT_EFFECT and value != ""
    }
    if "bfloat16" in config:
        if "bf16" in config:
            raise UserError(f"{file}: bf16 and bfloat16 are the same block; remove bfloat16")
        config["bf16"] = config.pop("bfloat16")
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        zero = config["zero_optimization"] = {"stage": int(zero)}
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero and zero.pop(old, False):
            if new in zero:
                raise UserError(f"{file}: zero_optimization.{old} is the old name of {new}; remove {old}")
            zero[new] = {"device": "cpu"}
    gather = "stage3_gather_fp16_weights_on_model_save"
    if zero and gather in zero:
        zero["stage3_gather_16bit_weights_on_model_save"] = zero.pop(gather)
    for name in ("offload_optimizer", "offload_param"):
        if zero and lookup(zero, f"{name}.device") in (None, "none"):
            zero.pop(name, None)
    return config


def fit_to_stage(zero: dict, stage: int, file: str) -> list[str]:
    """Refuse offload that this stage lacks; drop stage-3 keys below stage 3, which HF's JSONs often carry."""
    for name, stages in (("offload_param", (3,)), ("offload_optimizer", (1, 2, 3))):
        device = lookup(zero, f"{name}.device")
        if device is None or device == "auto":
            continue
        path = f"zero_optimization.{name}.device={device}"
        if device == "nvme":
            stages = (3,)
            if "nvme_path" not in zero[name]:
                raise UserError(
                    f"{file}: {path} needs zero_optimization.{name}.nvme_path, a folder on a local disk"
                )
        if stage not in stages:
            wanted = " or ".join(map(str, stages))
            raise UserError(f"{file}: {path} needs zero_optimization.stage={wanted}, not {stage}")
    ratio = lookup(zero, "offload_optimizer.ratio")
    if stage != 3 and ratio not in (None, "auto", 1):
        raise UserError(
            f"{file}: zero_optimization.offload_optimizer.ratio={ratio} needs zero_optimization.stage=3"
        )
    if stage == 3:
        return []
    names = [key for key in zero if key.startswith("stage3_")]
    literal = [key for key in names if zero.pop(key) != "auto"]
    return [f"{file}: no effect at ZeRO stage {stage}: {', '.join(literal)}"] if literal else []


def fill_precision(config: dict, settings: Settings, on_cpu: bool) -> tuple[str, list[str]]:
    """Fill the `enabled` of bf16 and fp16 and return the precision in force."""
    file, wanted = settings.ds_file, settings.values["train.precision"]
    literal = {name: lookup(config, f"{name}.enabled") for name in ("bf16", "fp16")}
    on = [name for name in ("bf16", "fp16") if literal[name] is True]
    autocast = lookup(config, "torch_autocast.enabled") is True
    if len(on) + autocast > 1:
        both = " and ".join([f"{name}.enabled" for name in on] + ["torch_autocast.enabled"] * autocast)
        raise UserError(f"{file}: {both} are all true; keep one")
    if not on and not autocast and literal.get(wanted) == "auto":
        on = [wanted]
    for name, value in literal.items():
        if value == "auto":
            config[name]["enabled"] = name in on
    base = on[0] if on else "fp32"
    if autocast:
        dtype = lookup(config, "torch_autocast.dtype")
        if dtype is None:
            raise UserError(
                f'{file}: torch_autocast needs torch_autocast.dtype; write "bfloat16" or "float16"'
            )
        base = "bf16" if dtype in AUTOCAST_BF16 else "fp16"
    if settings.given("train.precision") and wanted != base:
        if autocast:
            raise settings.conflict(
                "torch_autocast.dtype", config["torch_autocast"]["dtype"], "train.precision"
            )
        key = f"{on[0] if on else wanted}.enabled"
        if literal[key.split(".")[0]] is not None:
            raise settings.conflict(key, bool(on), "train.precision")
        raise UserError(
            f"{file}: no {key}, so it trains in {base}, but {settings.recipe_file}: train.precision={wanted}"
            f'; add "{wanted}": {{"enabled": "auto"}} to the JSON'
        )
    if on == ["fp16"] and on_cpu:
        raise UserError(f"{file}: fp16 needs a GPU, DeepSpeed refuses it on a CPU; use bf16 or fp32")
    silent = base == "fp32" and False not in literal.values() and not settings.given("train.precision")
    notes = [f"{file}: neither bf16 nor fp16 is on, so it trains in fp32"] if silent else []
    return (f"{base} autocast" if autocast else base), notes


def check_combinations(config: dict, stage: int, precision: str, file: str) -> None:
    """Refuse pairs that DeepSpeed answers with an assertion on every rank."""
    for path in ("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads"):
        if lookup(config, path) and stage == 0:
            raise UserError(f"{file}: {path}=true needs zero_optimization.stage=1, 2 or 3")
    if lookup(config, "bf16.bf16_optimizer_states") and not lookup(
        config, "bf16.bf16_master_weights_and_grads"
    ):
        raise UserError(
            f"{file}: bf16.bf16_optimizer_states=true needs bf16.bf16_master_weights_and_grads=true"
        )
    model_dtype = "fp32" if "autocast" in precision else precision
    for key in ("param_dtype", *(("grad_accum_dtype",) if stage == 0 else ())):
        dtype = lookup(config, f"data_types.{key}")
        if dtype not in (None, "auto", model_dtype):
            at = " at ZeRO stage 0" if key == "grad_accum_dtype" else ""
            raise UserError(
                f"{file}: data_types.{key}={dtype} but the model is in {model_dtype}{at}; remove it"
            )


def fill_buckets(zero: dict, hidden_size: int | None, file: str) -> None:
    """Fill the bucket sizes by Transformers' formulas (its integrations/deepspeed.py)."""
    formulas = {
        "reduce_bucket_size": lambda h: h * h,
        "stage3_prefetch_bucket_size": lambda h: int(0.9 * h * h),
        "stage3_param_persistence_threshold": lambda h: 10 * h,
    }
    for key, formula in formulas.items():
        if zero.get(key) == "auto":
            if hidden_size is None:
                raise UserError(
                    f'{file}: zero_optimization.{key}="auto" needs a model with a hidden_size; write a number'
                )
            zero[key] = max(1, formula(hidden_size))


def fill_batch(config: dict, settings: Settings, dp_size: int) -> dict[str, int]:
    """Return DeepSpeed's three batch keys, with micro batch x gas x data-parallel ranks = global batch."""
    v, recipe = settings.values, settings.recipe_file
    micro_key, gas_key = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    micro = int(settings.pick(config, micro_key, f"train.{micro_key}"))
    gas = settings.pick(config, gas_key, f"train.{gas_key}")
    total = settings.pick(config, "train_batch_size", "train.global_batch_size")
    literals = {key: config.get(key, "auto") for key in (micro_key, gas_key, "train_batch_size")}
    for key, literal in literals.items():
        if literal != "auto" and literal < 1:
            raise UserError(f"{settings.ds_file}: {key}={show(literal)} must be at least 1")
    tokens, length = v["train.global_batch_tokens"], v["data.max_seq_length"]
    if tokens is not None:
        unit = length * micro * dp_size
        if tokens % length:
            raise UserError(
                f"{recipe}: train.global_batch_tokens={tokens} is not a multiple of data.max_seq_length="
                f"{length}; nearest: {_multiples(tokens, unit)}"
            )
        if total is not None and total != tokens // length:
            raise UserError(
                f"{recipe}: train.global_batch_tokens={tokens} is {tokens // length} sequences of {length}"
                f", but the global batch is given as {show(total)} sequences (train.global_batch_size, or "
                f"train_batch_size of {settings.ds_file}); remove one"
            )
        total = tokens // length
    gas, total = (None if gas is None else int(gas)), (None if total is None else int(total))
    free = literals[micro_key] == "auto" and not settings.given(f"train.{micro_key}")
    if free and gas is not None and total is not None and total % (gas * dp_size) == 0:
        micro = total // (gas * dp_size)
    per_pass = micro * dp_size
    ranks = f"micro batch {micro} x {dp_size} data-parallel rank{'s' if dp_size > 1 else ''}"
    if total is None:
        total = per_pass * (gas or 1)
    elif total % per_pass:
        given = (
            f"train.global_batch_tokens={tokens} ({total} sequences)"
            if tokens
            else f"a global batch of {total}"
        )
        options = _multiples(tokens, per_pass * length) if tokens else _multiples(total, per_pass)
        raise UserError(
            f"{recipe}, {settings.ds_file}: {given} is not a multiple of {ranks}; nearest: {options}"
        )
    if gas is not None and total != per_pass * gas:
        raise UserError(
            f"{recipe}, {settings.ds_file}: a global batch of {total} is not {ranks} x gas {gas} = "
            f"{per_pass * gas}; remove gradient_accumulation_steps (it would be {total // per_pass}) or the "
            "global batch"
        )
    return {micro_key: micro, gas_key: total // per_pass, "train_batch_size": total}


def _multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def checkpointing(block: dict, settings: Settings) -> tuple[bool, bool, list[str]]:
    """Return (gradient checkpointing, its activations offloaded to the CPU, notes).

    DeepSpeed does nothing with this block for a Transformers model, so it becomes Transformers' own.
    """
    file, key = settings.ds_file, "model.gradient_checkpointing"
    causes = [
        name
        for name in ("partition_activations", "cpu_checkpointing", "number_checkpoints")
        if block.get(name)
    ]
    wanted = settings.values[key]
    if causes and wanted is False:
        raise settings.conflict(f"activation_checkpointing.{causes[0]}", block[causes[0]], key)
    on = bool(causes) or wanted is True
    notes = (
        [f"{file}: activation_checkpointing.{causes[0]} turns gradient checkpointing on"] if causes else []
    )
    return on, bool(block.get("cpu_checkpointing")), notes


def nvme_paths(zero: dict) -> tuple[str, ...]:
    """Return the folders that tensors are offloaded to, each once."""
    blocks = [zero.get(name) or {} for name in ("offload_param", "offload_optimizer")]
    return tuple(dict.fromkeys(block["nvme_path"] for block in blocks if block.get("device") == "nvme"))


def more_ops(config: dict, on_cpu: bool, file: str) -> list[str]:
    """Return the op builders of NVMe offload and of quantized communication."""
    zero, ops = config["zero_optimization"], []
    if nvme_paths(zero):
        ops += ["pin_memory", "async_io"]
        if lookup(config, "aio.use_gds"):
            ops.append("gds")
    if zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients"):
        ops.append("quantizer")
    for op, key in (("gds", "aio.use_gds"), ("quantizer", "zero_optimization.zero_quantized_*")):
        if on_cpu and op in ops:
            raise UserError(f"{file}: {key}=true needs a GPU; remove it")
    return ops
