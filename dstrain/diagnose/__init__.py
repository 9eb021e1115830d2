"""What happened to a run, most likely first, and what to change: `python -m dstrain diagnose RUN`."""

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from dstrain.diagnose import against, crash, learning, speed
from dstrain.diagnose.memory import Layout, requested
from dstrain.diagnose.run import KINDS, Run, read

__all__ = ["KINDS", "diagnose", "requested_layout", "screen"]

_WIDTH = 110


def diagnose(folder: Path, reference: Path | None = None, layout: Layout | None = None) -> dict[str, Any]:
    """Return `findings`, most likely first, and the numbers `looked_at`.

    reference: another run to compare with. layout: for estimates, if the run ended before it wrote its own.
    Raises UserError if a folder is no run's.
    """
    run = read(folder)
    findings = [*crash.look(run, layout), *learning.look(run), *speed.look(run)]
    if reference is not None:
        findings += against.look(run, read(reference))
    findings.sort(key=lambda finding: -finding.score)
    return {"run": str(folder), "findings": [asdict(f) for f in findings], "looked_at": _looked_at(run)}


def requested_layout(
    folder: Path, config: Path | None = None, overrides: Sequence[str] = ()
) -> Layout | None:
    """Return the layout that a command asks for, on as many ranks as have left a log in the run's folder.

    Without a config, the command of the run's log, for a run that failed before it wrote what it is; None if
    that is not needed or not known. Raises UserError as train.py does.
    """
    run = read(folder)
    kinds: dict[str, Any] = {}
    if config is None:
        if run.facts or not run.failure or not run.command:
            return None
        where, words = run.command
        parser = argparse.ArgumentParser(add_help=False)
        for name in ("config", "deepspeed_config", "zero_stage", "precision"):
            parser.add_argument(f"--{name}", type=int if name == "zero_stage" else str)
        known, rest = parser.parse_known_args(words)
        config, overrides = where / known.config, [word for word in rest if not word.startswith("-")]
        kinds = {name: value for name, value in vars(known).items() if name != "config"}
    import torch
    from transformers import AutoModelForCausalLM

    from dstrain import request

    on_cpu, ranks = not torch.cuda.is_available(), max(len(run.logs), 1)
    asked = request.load(config, overrides, **kinds, dp_size=ranks, on_cpu=on_cpu)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(asked.model_config)
    return requested(asked, sum(parameter.numel() for parameter in model.parameters()))


def screen(result: dict[str, Any]) -> str:
    """Return the result for people, within one screen where it can be."""
    lines = []
    for number, finding in enumerate(result["findings"], start=1):
        lines.append(f"{number}. {finding['title']}")
        for line in finding["evidence"]:
            lines += _wrapped(line, "   - ", "     ")
        for line in finding["changes"]:
            lines += _wrapped(line, "   change: ", "           ")
    if not result["findings"]:
        lines.append("nothing wrong found")
    lines += _wrapped("; ".join(f"{k} {v}" for k, v in result["looked_at"].items()), "looked at: ", "  ")
    return "\n".join(lines)


def _wrapped(line: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        line,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _looked_at(run: Run) -> dict[str, str]:
    """Return the numbers that verdicts are made of, as text."""
    found = {"steps": f"{run.last_step} of {run.facts.get('max_steps', '?')}"}
    if run.rows:
        first, last = run.rows[0], run.rows[-1]
        norms = [row["grad_norm"] for row in run.rows]
        found["loss"] = f"{first['loss']:.3f} to {last['loss']:.3f}"
        found["lr up to"] = f"{max(row['lr'] for row in run.rows):.1e}"
        found["gradient norm"] = f"median {median(norms):.3g}, highest {max(norms):.3g}"
    if run.evals:
        found["held-out loss"] = f"{run.evals[0][1]:.3f} to {run.evals[-1][1]:.3f}"
    if (share := learning.label_share(run)) is not None:
        found["tokens in the loss"] = f"{share:.0%}"
    if spent := speed.times(run):
        found["step"] = f"{spent.step / spent.steps:.3f} s"
        found["computing"] = f"{spent.computing:.0%}"
        found["data"] = f"{spent.data / spent.wall:.0%}"
        found["transfers"] = f"{spent.transfer / spent.wall:.0%}"
        found["waiting for ranks"] = f"{spent.waiting / spent.wall:.0%}"
        found["saves"] = f"{spent.stall / spent.wall:.0%}"
    if run.rows and "mfu" in run.rows[-1]:
        found["MFU"] = f"{run.rows[-1]['mfu']:.0%}"
    if run.earlier:
        last = run.earlier[-1].text().removeprefix("error: ")
        found["failures of earlier starts"] = f"{len(run.earlier)}, the last: {last}"
    found["events"] = f"{sum(event['event'] == 'spike' for event in run.events)} steps that stand out"
    return found
