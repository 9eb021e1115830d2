"""Step times and valid tokens of a Hugging Face Trainer."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback


class Stopwatch(TrainerCallback):
    """Times steps from end to end, fetching of data included, and counts the tokens in the loss."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.valid_tokens: list[int] = []
        self.counting = 0
        self.last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.step_s.append(now - self.last)
        self.valid_tokens.append(self.counting)
        self.counting, self.last = 0, now

    def write(self, file: Path) -> None:
        """Write both lists as JSON."""
        body = {"step_s": self.step_s, "valid_tokens": self.valid_tokens}
        file.write_text(json.dumps(body), encoding="utf-8")


def timed(trainer_class: type[Trainer], stopwatch: Stopwatch) -> type[Trainer]:
    """Return a Trainer class that counts valid tokens; all else is as it was."""

    class Timed(trainer_class):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            stopwatch.counting += int((inputs["labels"][:, 1:] != -100).sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Timed
