"""The dtypes in which a live engine holds what it trains, read from its tensors and not from the JSON."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def held(engine: Any) -> dict[str, str]:
    """Return dtypes by what is held in them; several are joined by ` and `.

    parameters: what the forward pass reads. compute: only under autocast. gradients: what micro batches are
    added up in. reduction: what ranks are averaged in. master_weights: what the optimizer updates.
    optimizer_states: its moments.
    """
    wrapper = engine.optimizer
    parameters = list(engine.module.parameters())
    zero, autocast = engine.zero_optimization(), engine.torch_autocast_enabled()
    own = {p.dtype for p in parameters}
    if zero:
        gradients = {wrapper.gradient_accumulation_dtype}
        reduction = {wrapper.communication_data_type}
        if autocast:  # DeepSpeed marks what may travel in the lower precision
            reduction = {getattr(p, "comm_dtype", p.dtype) for p in parameters}
    else:
        high = getattr(wrapper, "fp32_groups_gradients", None)  # of BF16_Optimizer
        gradients = {g.dtype for group in high for g in group} if high else own
        reduction = {engine.communication_data_type} if autocast else gradients
    masters = _masters(wrapper) or [p for p in parameters if p.requires_grad]
    table = {"parameters": _say(own)}
    if autocast:
        table["compute"] = _say({engine.torch_autocast_dtype()})
    return table | {
        "gradients": _say(gradients),
        "reduction": _say(reduction),
        "master_weights": _say({m.dtype for m in masters}),
        "optimizer_states": _say(_states(wrapper, masters[0].dtype)),
    }


# Half of the distance to the next number, over the number: 8 bits of significand in bf16, 11 in fp16.
_LEAST = {"bf16": "1/512", "fp16": "1/4096"}
_MANY = 16  # micro batches


def notes(dtypes: dict[str, str], gas: int) -> list[str]:
    """Return what a user should know of these dtypes, with `gas` micro batches a step."""
    found, kept = [], dtypes["master_weights"]
    if kept in _LEAST:
        found.append(f"no fp32 master weights: {kept} rounds an update below {_LEAST[kept]} of a weight away")
    if gas >= _MANY and dtypes["gradients"] in _LEAST:
        found.append(
            f"gradients of {gas} micro batches are added up in {dtypes['gradients']}, which loses small "
            "ones; deepspeed.data_types.grad_accum_dtype=fp32 keeps them (ZeRO 1 to 3)"
        )
    return found


def _masters(wrapper: Any) -> Sequence[torch.Tensor]:
    """Return what the optimizer inside a DeepSpeed wrapper updates; nothing without a wrapper."""
    for name in (
        "fp32_partitioned_groups_flat",  # ZeRO 3
        "single_partition_of_fp32_groups",  # ZeRO 1 and 2
        "fp32_groups_flat_partition",  # BF16_Optimizer
        "fp32_groups_flat",  # fp16 and bf16 at ZeRO 0
        "fp32_groups",
    ):
        if found := getattr(wrapper, name, None):
            return list(_tensors(found))
    return []


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _states(wrapper: Any, master: torch.dtype) -> set[torch.dtype]:
    """Return the dtypes of the moments; of states that the first step will make, by making some aside."""
    optimizer = getattr(wrapper, "optimizer", wrapper)
    found = _moments(optimizer)
    if not found and isinstance(optimizer, torch.optim.Optimizer):
        weight = torch.nn.Parameter(torch.zeros(2, dtype=master))
        weight.grad = torch.zeros_like(weight)
        accepted = inspect.signature(type(optimizer)).parameters
        trial = type(optimizer)([weight], **{k: v for k, v in optimizer.defaults.items() if k in accepted})
        trial.step()
        found = _moments(trial)
    return found


def _moments(optimizer: Any) -> set[torch.dtype]:
    values = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    return {v.dtype for v in values if isinstance(v, torch.Tensor)}


def _say(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(_NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes))
