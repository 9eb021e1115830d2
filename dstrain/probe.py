"""Two forward passes before training that show what a model lets its tokens see."""

from typing import Any

import torch

from dstrain.errors import UserError

_LENGTH = 8  # tokens of a document


@torch.no_grad()
def check_isolation(engine: Any, packing: bool) -> None:
    """Raise UserError if a token sees what comes after it or, with `packing`, another document.

    Transformers' models are kept apart by position ids that restart, but not all of them heed that: some
    build their mask without them, and recurrent ones have no mask. All ranks call it.
    """
    config = engine.module.model.config
    text = config.get_text_config()
    engine.eval()
    tokens = torch.arange(2 * 2 * _LENGTH, device=engine.device).view(2, -1) % (text.vocab_size - 1)
    changed = tokens.clone()
    changed[:, :_LENGTH] = (changed[:, :_LENGTH] + 1) % (text.vocab_size - 1)
    future = tokens.clone()
    future[:, -1] = text.vocab_size - 1
    base = _loss(engine, tokens)
    # Other tokens may share a matrix product with ours where experts are chosen, which rounds otherwise.
    tolerance = 5e-3 if is_mixture(config) else 0.0
    kind = f"{config.model_type} with model.attn_implementation={config._attn_implementation}"
    if abs(_loss(engine, future) - base) > tolerance * base:
        raise UserError(f"{kind}: a token sees what comes after it; this is no causal language model")
    if packing and abs(_loss(engine, changed) - base) > tolerance * base:
        raise UserError(f"{kind}: packed documents see each other; set data.packing=false")
    engine.train()


def is_mixture(config: Any) -> bool:
    """Whether a model routes tokens to experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(config.get_text_config(), name, None) or 0) > 1 for name in names)


def _loss(engine: Any, tokens: torch.Tensor) -> float:
    """Return the loss of the second of two documents a row, without its last two tokens."""
    labels = tokens.roll(-1, 1)
    labels[:, :_LENGTH] = -100
    labels[:, -2:] = -100
    positions = torch.arange(_LENGTH, device=tokens.device).repeat(2).expand(2, -1).contiguous()
    documents = torch.ones_like(tokens)
    documents[:, _LENGTH:] = 2
    try:
        loss_sum, *_ = engine(input_ids=tokens, labels=labels, position_ids=positions, document_ids=documents)
    except (RuntimeError, ValueError, LookupError) as error:
        kind = engine.module.model.config.model_type
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"model {kind}: its forward pass fails, with this config: {reason}") from None
    return float(loss_sum)
