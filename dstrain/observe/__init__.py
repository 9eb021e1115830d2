"""What a run shows: the console, metrics.jsonl, logs/events.jsonl, trackers and the loss curve."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dstrain import distributed, fragments
from dstrain.observe import health
from dstrain.observe.console import Console
from dstrain.observe.meter import Meter, over_ranks, peak_tflops
from dstrain.observe.metrics import RowsFile
from dstrain.observe.preview import preview
from dstrain.observe.report import plot_loss
from dstrain.observe.trackers import Trackers
from dstrain.observe.trackers import check as check_trackers

__all__ = ["Observer", "check_trackers", "preview"]


_PLACES = 32  # documents of a rank that are kept for a step that stands out


class Observer:
    """Takes what the loop measures and shows it everywhere. Ranks other than the first only measure."""

    def __init__(
        self,
        output_dir: Path,
        world: Any,
        max_steps: int,
        first_step: int,
        logging_steps: int,
        flops_per_token: float | None,
    ) -> None:
        """world: this process's `distributed.World`."""
        self.output_dir, self.is_main = output_dir, world.is_main
        self.max_steps, self.first_step, self.logging_steps = max_steps, first_step, logging_steps
        self.console = Console(world.is_main, max_steps, first_step)
        self.peak_tflops, self.flops_per_token = peak_tflops(distributed.device_name()), flops_per_token
        self.meter = Meter(world.size, flops_per_token, self.peak_tflops)
        self.trackers: Trackers | None = None
        self.dtypes: dict[str, str] = {}  # into the first row, then empty
        self.extra: dict[str, float] = {}  # into the next row
        self.watch, self.reports, self.stood_out = health.Watch(), 0, False

    def header(self, notes: Sequence[str], held: Mapping[str, str], **lines: str) -> None:
        """Print what is about to run. held: dtypes by what is held in them."""
        self.dtypes = dict(held)
        shown = ", ".join(f"{name.replace('_', ' ')} {dtype}" for name, dtype in held.items())
        self.console.header([*lines.items(), ("dtypes", shown)])
        if self.peak_tflops and self.flops_per_token:
            formula = f"tok/s x {self.flops_per_token:.3g} FLOP a token (6N + 12LHQT) / peak"
            self.console.header([("mfu", f"{formula} {self.peak_tflops:g} TFLOP/s a device (dense bf16)")])
        for note in notes:
            self.console.header([("note", note)])

    def start(
        self,
        engine: Any,
        loader: Any,
        report_to: Sequence[str],
        project: str,
        run_name: str | None,
        options: Mapping[str, Any],
        wandb_id: str | None,
    ) -> None:
        """Open metrics.jsonl, logs/events.jsonl and the trackers. All ranks call it.

        engine, loader: what is trained on what, to be looked at in logged steps and in those that stand out.
        options: the recipe, flat. wandb_id: a W&B run to continue.
        """
        self.engine, self.loader = engine, loader
        distributed.clock_collectives()
        first, folder = self.first_step or None, self.output_dir
        self.metrics = RowsFile(folder / "metrics.jsonl" if self.is_main else None, first)
        self.events = RowsFile(folder / "logs" / "events.jsonl" if self.is_main else None, first)
        facts = health.facts(engine, loader) | {"dtypes": self.dtypes}
        self._event("start", self.first_step, max_steps=self.max_steps, **facts)
        names = report_to if self.is_main else ()
        config = dict(options) | {f"dtypes.{name}": dtype for name, dtype in self.dtypes.items()}
        self.trackers = Trackers(
            names, project, run_name or self.output_dir.name, self.output_dir, config, wandb_id
        )
        self.console.start()

    @property
    def wandb_id(self) -> str | None:
        """The id of the W&B run."""
        return self.trackers.wandb_id if self.trackers else None

    def evaluated(self, eval_loss: float) -> None:
        """Report the evaluation before the first step."""
        self._row({"step": 0, "tokens_seen": 0, "eval_loss": eval_loss})

    def step(
        self, step: int, result: Any, epoch: float, tokens_seen: int, step_s: float, wait_s: float
    ) -> None:
        """Count one optimizer step. result: a `step.StepResult`. step_s: all of the step, wait_s for data."""
        counts = (result.loss, result.valid_tokens, result.tokens)
        self.meter.add(*counts, step_s, wait_s, result.collective_s, result.skipped)
        self.last = {
            "step": step,
            "epoch": round(epoch, 6),
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens_seen": tokens_seen,
        }
        if result.aux_loss is not None:
            self.last["aux_loss"] = result.aux_loss
        if result.skipped:
            self.console.say(f"step {step}: fp16 overflow; the loss scale was lowered and no weight changed")
        elif usual := self.watch.add(result.loss, result.grad_norm):
            self._stands_out(step, result, usual)

    def _stands_out(self, step: int, result: Any, usual: Mapping[str, float]) -> None:
        """Keep where the documents of a step came from whose loss or gradient is far from the usual."""
        self.stood_out = True
        places = distributed.gather(self.loader.places()[:_PLACES])
        values = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}
        self._event("spike", step, **values, **usual, documents=places)

    def _event(self, kind: str, step: int, **more: Any) -> None:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self.events.write({"event": kind, "step": step, "time": now} | more)

    def report(self, eval_loss: float | None) -> None:
        """Write the row of the last step if it is a logging step, the last one, or has an evaluation."""
        step = int(self.last["step"])
        if step % self.logging_steps and eval_loss is None and step != self.max_steps:
            return
        over = over_ranks(distributed.gather_numbers(self.meter.times, self.engine.device))
        row = self.last | self.meter.read() | over | self.extra
        self.reports += 1
        if health.is_sampled(self.reports) or self.stood_out or step == self.max_steps:
            row |= health.layer_norms(self.engine)
        if scale := fragments.loss_scale(self.engine).get("cur_scale"):
            row["loss_scale"] = float(scale)
        self.extra, self.stood_out = {}, False
        self._row(row if eval_loss is None else row | {"eval_loss": eval_loss})

    def _row(self, row: Mapping[str, float]) -> None:
        self.metrics.write(row | {"dtypes": self.dtypes} if self.dtypes else row)
        self.dtypes = {}
        self.console.step(row)
        if self.trackers:
            self.trackers.log({key: value for key, value in row.items() if not isinstance(value, str)})

    def measured(self, values: Mapping[str, float]) -> None:
        """Take what a save cost; it goes into the next row, where stalls of several saves add up."""
        stalls = self.extra.get("checkpoint_stall_s", 0.0) + values.get("checkpoint_stall_s", 0.0)
        self.extra = dict(values) | ({"checkpoint_stall_s": stalls} if stalls else {})

    def interrupted(self, step: int, preempted: bool, wall_s: float, saved: Mapping[str, float]) -> None:
        """Say that the run stops early, and close everything; W&B learns if it is to go on elsewhere.

        saved: what the last save cost, as for `measured`.
        """
        if self.trackers and preempted:
            self.trackers.mark_preempting()
        why = "a signal" if preempted else "the file STOP"
        self._event("interrupted", step, by=why, **saved)
        self._close(wall_s, saved)
        self.say(f"stopped after step {step} by {why}; saved, and the same command goes on")

    def say(self, text: str) -> None:
        """Print for people."""
        self.console.say(text)

    def finish(self, wall_s: float, saved: Mapping[str, float]) -> None:
        """Close everything and draw the loss curve.

        wall_s: of the whole run, its earlier starts too. saved: what the last save cost.
        """
        self._event("finished", self.max_steps, **saved)
        self._close(wall_s, saved)

    def _close(self, wall_s: float, saved: Mapping[str, float]) -> None:
        self.console.stop()
        if "checkpoint_gib_per_s" in saved:
            cost = f"{_size(saved['checkpoint_gib'])} at {_size(saved['checkpoint_gib_per_s'])}/s"
            self.say(f"{'last save':<10} {cost}, held up training for {saved['checkpoint_stall_s']:.2f} s")
        self.say(f"{'trained for':<10} {tqdm.format_interval(wall_s)}, evaluation and saves among it")
        if self.trackers:
            self.trackers.finish()
        if self.is_main:
            plot_loss(self.output_dir)


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"
