"""What a person sees: a header, a live bar on a terminal or a line per logged step without one."""

import sys
import time
from collections.abc import Mapping, Sequence

from tqdm import tqdm


class Console:
    """The first rank's voice; on others it is silent."""

    def __init__(self, speaks: bool, max_steps: int, first_step: int) -> None:
        self.speaks = speaks
        self.max_steps, self.first_step = max_steps, first_step
        self.started = time.perf_counter()
        self.bar: tqdm | None = None

    def header(self, lines: Sequence[tuple[str, str]]) -> None:
        """Print what is about to run, as name and value."""
        for name, value in lines:
            self.say(f"{name:<10} {value}")

    def start(self) -> None:
        """Begin the bar or the clock of the time left."""
        self.started = time.perf_counter()
        if self.speaks and sys.stdout.isatty():
            self.bar = tqdm(
                total=self.max_steps, initial=self.first_step, unit="step", file=sys.stdout, smoothing=0.1
            )

    def step(self, row: Mapping[str, float]) -> None:
        """Show one logged step."""
        if "loss" in row:
            shown = {
                "loss": f"{row['loss']:.4f}",
                "lr": f"{row['lr']:.2e}",
                "grad_norm": f"{row['grad_norm']:.3f}",
                "tok/s": f"{row['tokens_per_s']:,.0f}",
            }
            if "aux_loss" in row:
                shown["aux_loss"] = f"{row['aux_loss']:.4f}"
            if "mfu" in row:
                shown["mfu"] = f"{row['mfu']:.1%}"
            step = int(row["step"])
            if self.bar:
                self.bar.set_postfix(shown, refresh=False)
                self.bar.update(step - self.bar.n)
            else:
                text = "  ".join(f"{name} {value}" for name, value in shown.items())
                self.say(f"step {step}/{self.max_steps}  {text}  left {self._left(step)}")
        if "eval_loss" in row:
            self.say(f"eval at step {int(row['step'])}: loss {row['eval_loss']:.4f}")
            if "loss" not in row:  # before the first step, which is no part of the time that steps take
                self.started = time.perf_counter()

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.speaks:
            tqdm.write(line, file=sys.stdout) if self.bar else print(line, flush=True)

    def stop(self) -> None:
        """Leave the bar as it is."""
        if self.bar:
            self.bar.close()
            self.bar = None

    def _left(self, step: int) -> str:
        done = step - self.first_step
        seconds = (time.perf_counter() - self.started) / max(done, 1) * (self.max_steps - step)
        return tqdm.format_interval(seconds)
