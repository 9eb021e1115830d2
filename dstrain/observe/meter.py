"""How fast a run is: tokens per second, step time, time spent waiting for data, MFU, peak memory."""

import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Dense bf16 peaks in TFLOP/s from the makers' data sheets, by a part of the device's name. Where the
# device is not listed, no MFU is given.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "A100": 311.8,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def peak_tflops(device: str) -> float | None:
    """Return the device's dense bf16 peak in TFLOP/s, or None where it is not known."""
    found = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{re.escape(name)}\b", device))
    return next(found, None)


@dataclass
class Meter:
    """Sums over the steps since the last reading. Evaluation and saving are outside of it."""

    world_size: int
    flops_per_token: float | None
    peak_tflops: float | None
    steps: int = 0
    loss_sum: float = 0.0
    valid_tokens: int = 0
    tokens: int = 0
    step_s: float = 0.0
    wait_s: float = 0.0
    collective_s: float = 0.0
    skipped: int = 0

    def add(
        self,
        loss: float,
        valid_tokens: int,
        tokens: int,
        step_s: float,
        wait_s: float,
        collective_s: float = 0.0,
        skipped: bool = False,
    ) -> None:
        """Count one optimizer step.

        loss: mean over `valid_tokens`. step_s: all of it, `wait_s` for data, `collective_s` in collectives.
        """
        self.steps += 1
        self.loss_sum += loss * valid_tokens
        self.valid_tokens += valid_tokens
        self.tokens += tokens
        self.step_s += step_s
        self.wait_s += wait_s
        self.collective_s += collective_s
        self.skipped += skipped

    @property
    def times(self) -> tuple[float, float, float]:
        """This rank's seconds a step since the last reading: all, waiting for data, in collectives."""
        return self.step_s / self.steps, self.wait_s / self.steps, self.collective_s / self.steps

    def read(self) -> dict[str, float]:
        """Return the means since the last reading, and start anew."""
        tokens_per_s = self.tokens / self.step_s
        reading = {
            "loss": self.loss_sum / self.valid_tokens,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": tokens_per_s / self.world_size,
            "step_time_s": self.step_s / self.steps,
            "data_wait_s": self.wait_s / self.steps,
            "valid_tokens": self.valid_tokens,
            "peak_memory_gib": peak_memory_gib(),
        }
        if self.skipped:
            reading["skipped_steps"] = self.skipped
        if self.peak_tflops and self.flops_per_token:
            reading["mfu"] = tokens_per_s * self.flops_per_token / (self.world_size * self.peak_tflops * 1e12)
        self.steps, self.loss_sum, self.valid_tokens, self.tokens = 0, 0.0, 0, 0
        self.step_s = self.wait_s = self.collective_s = 0.0
        self.skipped = 0
        return reading


def over_ranks(times: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return what the ranks' times say, from (step, waiting for data, in collectives) of each, in seconds.

    Ranks take the same time for a step, as they wait for one another in collectives; one that is slow shows
    by being busy longer. The one that waits least in collectives tells what the transfers alone take.
    """
    waits, collective = [wait for _, wait, _ in times], [spent for *_, spent in times]
    busy = [max(step - wait - spent, 0.0) for step, wait, spent in times]
    found = {"busy_s": sum(busy) / len(times), "collective_s": sum(collective) / len(times)}
    if len(times) == 1:
        return found
    slowest, latest = busy.index(max(busy)), waits.index(max(waits))
    return found | {
        "collective_min_s": min(collective),
        "busy_max_s": busy[slowest],
        "busy_max_rank": slowest,
        "busy_others_s": (sum(busy) - busy[slowest]) / (len(busy) - 1),
        "data_wait_max_s": waits[latest],
        "data_wait_max_rank": latest,
    }


def peak_memory_gib() -> float:
    """Return the most memory this process has held: allocated on its GPU, else resident on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
