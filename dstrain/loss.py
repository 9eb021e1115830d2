"""Summed token cross-entropy, nothing else."""

import torch
import torch.nn.functional as F


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropies in nats, in fp32. logits: (tokens, vocab). labels: (tokens,)."""
    return F.cross_entropy(logits.float(), labels, reduction="sum")
