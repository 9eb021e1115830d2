"""One optimizer step over its micro batches, and one evaluation, whatever the engine.

The gradient of a step is that of (sum of the token losses of all micro batches and ranks) / (number of
valid tokens in them), so how a global batch is split into micro batches and ranks does not matter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dstrain import clock, distributed
from dstrain.errors import Told

Batch = dict[str, torch.Tensor]


class NonFinite(Told):
    """The loss or the gradient is NaN or infinite, on `ranks`. `applied`: it has reached the weights."""

    status = 3  # of the process

    def __init__(self, what: str, ranks: list[int], applied: bool) -> None:
        super().__init__(f"non-finite {what}")
        self.what, self.ranks, self.applied = what, ranks, applied

    def tell(self, step: int, places: Sequence[Sequence[str]]) -> None:
        """Say where it happened. places: of every rank, `file:line` of each document in the step."""
        shown = [place for rank in self.ranks for place in places[rank]]
        more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
        kept = (
            "the last checkpoint is from before it"
            if self.applied
            else f"step {step - 1} is saved as a checkpoint"
        )
        self.args = (
            f"non-finite {self.what} at step {step} on rank {', '.join(map(str, self.ranks))}; {kept}. "
            f"Documents in the batch: {', '.join(shown[:8])}{more}. "
            "Look at these documents, or try a lower train.learning_rate, more train.warmup_steps, or bf16 "
            "or fp32 instead of fp16, in a new output_dir with checkpoint.resume_from_checkpoint naming "
            "this one.",
        )


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, over all ranks."""

    loss: float  # mean over the step's valid tokens, nats
    aux_loss: float | None  # of experts, before its coefficient: mean over micro batches and ranks
    grad_norm: float  # before clipping
    lr: float  # the one applied
    tokens: int  # without padding
    valid_tokens: int  # in the loss
    skipped: bool  # fp16 overflow: the loss scale was lowered and no weight changed
    asked: tuple[bool, ...] = ()  # what any rank was asked for
    collective_s: float = field(default=0.0, compare=False)  # of this rank, see clock.py


def train_step(engine: Any, batches: Sequence[Batch], asked: Sequence[bool] = ()) -> StepResult:
    """Run the micro batches of one optimizer step.

    asked: requests to this rank; the result has those to any. Raises NonFinite, on all ranks together.
    """
    before_s = clock.collectives.read()
    if not engine.module.training:  # a loaded model is in evaluation mode: no dropout, no checkpointing
        engine.train()
    batches = [{name: tensor.to(engine.device) for name, tensor in batch.items()} for batch in batches]
    counts = torch.tensor([0, 0, *asked], dtype=torch.float64, device=engine.device)
    for batch in batches:
        counts[:2] += torch.stack([(batch["document_ids"] > 0).sum(), (batch["labels"] >= 0).sum()])
    tokens, valid, *asked = (int(count) for count in distributed.all_reduce_sum(counts))
    if valid == 0:
        raise ValueError("all labels of a step are masked")
    # The engine averages gradients over ranks and, told so, not over micro batches.
    scale = engine.dp_world_size / valid
    lr = engine.get_lr()[0]
    aux_coef = engine.module.aux_loss_coef
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for number, batch in enumerate(batches):
        loss_sum, _, aux_loss = engine(**batch)
        totals[0] += loss_sum.detach()
        objective = loss_sum * scale
        if aux_loss is not None:  # not linear in the batch, so it is a mean over micro batches
            totals[1] += aux_loss.detach()
            objective = objective + aux_coef / len(batches) * aux_loss
        engine.backward(objective, scale_wrt_gas=False)
        if number + 1 < len(batches):
            engine.step()  # counts the micro batch
    # The one synchronisation of a step: no bad loss may reach the weights.
    own = float(totals.sum())
    loss, aux_loss = distributed.all_reduce_sum(totals).tolist()
    loss, aux_loss = loss / valid, aux_loss / (len(batches) * engine.dp_world_size)
    if not _finite(loss + aux_loss):
        raise NonFinite("loss", distributed.ranks_where(not _finite(own)), applied=False)
    norm = _norm_before_step(engine)
    if norm is not None and not _finite(norm):
        raise NonFinite("gradient", distributed.ranks_where(True), applied=False)
    engine.step()
    if norm is None:
        norm = float(engine.get_global_grad_norm() or 0.0)
    skipped = not engine.was_step_applied()
    if skipped:
        engine.lr_scheduler.step()  # DeepSpeed would leave the schedule a step behind
    if not _finite(norm) and not engine.fp16_enabled():
        raise NonFinite("gradient", distributed.ranks_where(True), applied=not skipped)
    aux_loss = None if aux_coef is None else aux_loss
    spent_s = clock.collectives.read() - before_s
    return StepResult(loss, aux_loss, norm, lr, tokens, valid, skipped, tuple(map(bool, asked)), spent_s)


def _norm_before_step(engine: Any) -> float | None:
    """Return the norm of the whole gradient where the engine does not tell it: ZeRO 0 without a wrapper."""
    if engine.zero_optimization() or engine.bfloat16_enabled() or engine.fp16_enabled():
        return None
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    # Not norm(): its running fp32 sum is off by up to 1e-3 for large tensors on a CPU. sum() adds in pairs.
    return float(torch.stack([g.square().sum() for g in gradients]).double().sum().sqrt())


@torch.no_grad()
def eval_step(engine: Any, batches: Iterable[Batch]) -> float:
    """Return the mean loss over all valid tokens of all ranks' batches, weighted by token."""
    engine.eval()
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for batch in batches:
        loss_sum, valid, _ = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()})
        total += torch.stack([loss_sum.double(), valid.double()])
    engine.train()
    loss_sum, valid = distributed.all_reduce_sum(total).tolist()
    return loss_sum / valid


def undo_first_update(engine: Any) -> None:
    """Undo the AdamW step with zero gradients that bf16 and fp16 under ZeRO-0 take while they start.

    It decays the fp32 master weights and counts as a step in the optimizer's state (DeepSpeed 0.19,
    `initialize_optimizer_states` of its fp16 wrappers).
    """
    wrapper = engine.optimizer
    if hasattr(wrapper, "fp32_groups"):
        masters = [master for group in wrapper.fp32_groups for master in group]
        weights = [weight for group in wrapper.fp16_groups for weight in group]
    elif hasattr(wrapper, "fp32_groups_flat"):
        masters, weights = wrapper.fp32_groups_flat, wrapper.fp16_groups_flat
    else:
        return
    with torch.no_grad():
        for master, weight in zip(masters, weights, strict=True):
            master.copy_(weight)
    wrapper.optimizer.state.clear()
    for group in wrapper.optimizer.param_groups:
        group.pop("step", None)


def _finite(value: float) -> bool:
    return value - value == 0.0
