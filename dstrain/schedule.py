"""What happens at which step: learning-rate multipliers, evaluation and saving, as pure functions."""

import math
from collections.abc import Callable


def multiplier(
    kind: str, max_steps: int, warmup_steps: int, min_ratio: float = 0.0, decay_ratio: float = 0.2
) -> Callable[[int], float]:
    """Return the function from the number of finished optimizer steps to lr / peak lr of the next one.

    kind: constant | linear | cosine | wsd (warm-up, stable, linear decay; Hu et al. 2024, MiniCPM).
    Warm-up is linear: its first step has 1 / warmup_steps and its last the peak, so no step has zero. Every
    kind but `constant` reaches `min_ratio` exactly at the last step.
    """
    warmup = min(warmup_steps, max_steps)
    peak = max(warmup - 1, 0)  # the first step at the full rate
    last = max_steps - 1
    if kind == "wsd":
        peak = max(peak, last - max(1, round(decay_ratio * max_steps)))

    def at(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        if kind == "constant" or done <= peak or last <= peak:
            return 1.0
        progress = min((done - peak) / (last - peak), 1.0)
        shape = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
        return min_ratio + (1 - min_ratio) * shape

    return at


def is_due(step: int, every: int | None, last: int) -> bool:
    """Whether something that happens each `every` steps (None: never), and at the last one, happens now."""
    return step == last or (every is not None and step % every == 0)
