"""What a run records so that one can say later what went wrong: layers, steps that stand out, the machine."""

import os
import re
import socket
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from dstrain import distributed, fragments

_WINDOW = 50  # steps that a running median is taken over
_LEAST = 8  # steps before the first verdict: the first ones differ too much from one another
_NORM_TIMES = 5.0  # over its median: clipped norms of ordinary batches stay below three times
_LOSS_NATS = 0.5  # over its median, at least: batches of a few documents differ by some tenths
_LOSS_SPREADS = 6.0  # median absolute deviations: about four standard deviations
_MOST = 20  # steps recorded in a run: gathering names of documents takes time

_MOMENTS = ("exp_avg", "momentum_buffer")  # of Adam and Lion; of SGD and Muon
_ROUNDING = 1e-7  # of the whole norm: what is left of a gradient that is zero but for rounding in fp32
_NAMED = 8


class Watch:
    """Running medians of loss and gradient norm. It needs no other rank: all ranks see the same values."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=_WINDOW)
        self.norms: deque[float] = deque(maxlen=_WINDOW)
        self.found = 0

    def add(self, loss: float, grad_norm: float) -> dict[str, float] | None:
        """Take a step, and return what was usual before it if it stands out."""
        usual = None
        if len(self.losses) >= _LEAST and self.found < _MOST:
            loss_median, norm_median = median(self.losses), median(self.norms)
            spread = median(abs(value - loss_median) for value in self.losses)
            high = loss - loss_median > max(_LOSS_NATS, _LOSS_SPREADS * spread)
            if high or grad_norm > _NORM_TIMES * norm_median > 0:
                self.found += 1
                usual = {
                    "loss_median": loss_median,
                    "loss_spread": spread,
                    "grad_norm_median": norm_median,
                    "over": len(self.losses),
                }
        self.losses.append(loss)
        self.norms.append(grad_norm)
        return usual


def is_sampled(count: int) -> bool:
    """Whether the layers are looked at in the row number `count`, from 1: the first ten, and each tenth."""
    return count <= 10 or count % 10 == 0


@torch.no_grad()
def layer_norms(engine: Any) -> dict[str, float | str | int]:
    """Return `layer_norm.LAYER`: the norm of the optimizer's running mean of its gradient, and what is dead.

    The running mean (Adam's first moment) exists whole under every ZeRO stage and offload, is read and not
    changed, and needs one small sum over ranks. It holds gradients after clipping. `dead_parameters` names
    matrices whose mean is zero but for rounding. Empty for optimizers without it, and for states in NVMe
    files. All ranks call it.
    """
    if getattr(engine.optimizer, "swap_optimizer", False):
        return {}
    names = [name for name, p in engine.module.model.named_parameters() if p.requires_grad]
    place = {name: number for number, name in enumerate(names)}
    squares = torch.zeros(len(names) + 1, dtype=torch.float64, device=engine.device)  # and a count of pieces
    counts = torch.distributed.get_rank() == 0
    for pieces in fragments.subgroups(engine, write=False):
        for piece in pieces:
            kind = next((name for name in _MOMENTS if name in piece.moments), None)
            if kind and (counts or not piece.replicated):
                squares[place[piece.name]] += piece.view(kind).float().square().sum().to(engine.device)
                squares[-1] += 1
    *squares, found = distributed.all_reduce_sum(squares).tolist()
    return summary(dict(zip(names, squares, strict=True))) if found else {}


def summary(squares: Mapping[str, float]) -> dict[str, float | str | int]:
    """Return norms by layer, and what is dead, from the sum of squares of every parameter."""
    layers: dict[str, float] = {}
    for name, square in squares.items():
        layers[layer_of(name)] = layers.get(layer_of(name), 0.0) + square
    found: dict[str, float | str | int] = {f"layer_norm.{name}": value**0.5 for name, value in layers.items()}
    least = (_ROUNDING**2) * sum(squares.values())
    # The bias of a key has no gradient by its nature, and norms may be switched off by a zero weight.
    dead = [name for name, square in squares.items() if square <= least and not name.endswith("bias")]
    if dead:
        found["dead_parameters"] = len(dead)
        found["dead_parameter_names"] = ", ".join(dead[:_NAMED])
    return found


def layer_of(name: str) -> str:
    """Return the layer that a parameter belongs to: up to the first number, else its module."""
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered.group(1) if numbered else name.rpartition(".")[0]


def facts(engine: Any, loader: Any) -> dict[str, Any]:
    """Return what estimates and verdicts need: hosts by rank, device and host memory, model and layout."""
    config = engine.module.model.config.get_text_config()
    zero = engine.config.get("zero_optimization", {}) if isinstance(engine.config, dict) else {}
    heads, hidden = (getattr(config, name, None) or 1 for name in ("num_attention_heads", "hidden_size"))
    offload = {name: zero.get(f"offload_{name}", {}).get("device", "none") for name in ("optimizer", "param")}
    parameters = list(engine.module.parameters())
    return {
        "hosts": distributed.gather(socket.gethostname()),
        "device": distributed.device_name(),
        "device_gib": None if distributed.on_cpu() else torch.cuda.mem_get_info()[1] / 2**30,
        "host_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        "trainable": sum(getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad),
        "layers": getattr(config, "num_hidden_layers", None) or 1,
        "hidden": hidden,
        "intermediate": getattr(config, "intermediate_size", None) or 4 * hidden,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "vocab": getattr(config, "vocab_size", None) or 1,
        "initializer_range": getattr(config, "initializer_range", None),
        "seq_length": loader.width,
        "micro": loader.micro,
        "gas": loader.gas,
        "dp": engine.dp_world_size,
        "zero_stage": engine.zero_optimization_stage(),
        "checkpointing": bool(getattr(engine.module.model, "is_gradient_checkpointing", False)),
        "offload_optimizer": offload["optimizer"],
        "offload_param": offload["param"],
        "reduce_bucket": zero.get("reduce_bucket_size", 5e8),
    }
