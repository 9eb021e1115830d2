"""Whether configurations train to the same loss: real launches against a plain PyTorch loop.

A case is a number of ranks and the arguments of train.py. Its losses and gradient norms, step by step, are
compared with those of tests/reference.py, which gets the same initial weights and batches and nothing else.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.errors import UserError
from dstrain.parity.jobs import WORKER, Job, run_jobs
from dstrain.parity.spec import reference_spec

__all__ = ["TOLERANCES", "Case", "Outcome", "compare", "table"]

REPOSITORY = Path(__file__).resolve().parents[2]
REFERENCE = REPOSITORY / "tests" / "reference.py"

# Largest relative difference of (losses, gradient norms) in any step, by the precision of the products.
TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (2e-3, 1e-2), "fp16": (2e-3, 1e-2)}


@dataclass(frozen=True)
class Case:
    """One configuration to check. arguments: those of train.py, `--config` first."""

    name: str
    ranks: int
    arguments: tuple[str, ...]


@dataclass
class Outcome:
    """What became of a case."""

    case: Case
    precision: str = ""
    extra: list[str] = field(default_factory=list)  # arguments that make it comparable
    reference: int = -1  # its number
    losses: list[float] = field(default_factory=list)
    loss_difference: float = float("inf")  # largest relative one of all steps
    norm_difference: float = float("inf")
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it trained, its losses moved, and both differences are within tolerance."""
        if self.error or not self.precision:
            return False
        loss_tolerance, norm_tolerance = TOLERANCES[self.precision.split()[0]]
        return self.loss_difference <= loss_tolerance and self.norm_difference <= norm_tolerance


def compare(
    cases: Sequence[Case], folder: Path, *, worker: Path = WORKER, seconds_a_case: float = 60.0
) -> list[Outcome]:
    """Run all cases and the reference, and return an outcome for each case, in order.

    folder: an empty one for everything that is written. worker: the script that is launched. Cases that take
    longer than `seconds_a_case` each, and two minutes to start, count as hanging.
    """
    outcomes, specs, places = [Outcome(case) for case in cases], [], {}
    for number, outcome in enumerate(outcomes):
        home = folder / str(number)
        home.mkdir(parents=True)
        try:
            spec, outcome.extra = reference_spec(outcome.case.arguments, outcome.case.ranks, home)
        except UserError as error:
            outcome.error = str(error)
            continue
        outcome.precision = spec["precision"] + (" autocast" if spec["autocast"] else "")
        digest = hashlib.sha256(Path(spec["batches"]).read_bytes()).hexdigest()
        key = json.dumps(spec | {"batches": digest}, sort_keys=True)
        if key not in places:  # many configurations share one reference
            places[key] = len(specs)
            specs.append(spec)
        outcome.reference = places[key]
    asked = [number for number, outcome in enumerate(outcomes) if outcome.error is None]
    jobs = [
        Job(
            folder / str(n),
            outcomes[n].case.ranks,
            (*outcomes[n].case.arguments, *outcomes[n].extra, *_overrides(folder / str(n))),
        )
        for n in asked
    ]
    errors = run_jobs(jobs, folder / "launches", worker=worker, seconds_each=seconds_a_case)
    for number, error in zip(asked, errors, strict=True):
        outcomes[number].error = error
    trained = [(number, outcome) for number, outcome in enumerate(outcomes) if outcome.error is None]
    needed = sorted({outcome.reference for _, outcome in trained})
    references = dict(zip(needed, _references([specs[n] for n in needed], folder), strict=True))
    for number, outcome in trained:
        _judge(outcome, folder / str(number) / "run", references[outcome.reference])
    return outcomes


def _overrides(home: Path) -> list[str]:
    return [
        f"output_dir={home / 'run'}",
        "logging.logging_steps=1",
        "logging.report_to=none",
        "checkpoint.export=false",
        "data.eval=null",
        "checkpoint.resume_from_checkpoint=never",
        "checkpoint.save_optimizer=false",
    ]


def _references(specs: Sequence[dict[str, Any]], folder: Path) -> list[list[dict[str, float]]]:
    ask, answer = folder / "references.json", folder / "reference-results.json"
    ask.write_text(json.dumps(specs), encoding="utf-8")
    process = subprocess.run(
        [sys.executable, str(REFERENCE), str(ask), str(answer)], capture_output=True, text=True
    )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["it said nothing"]
        raise UserError(f"the reference failed: {lines[-1]}")
    return json.loads(answer.read_text(encoding="utf-8"))


def _judge(outcome: Outcome, run: Path, reference: Sequence[dict[str, float]]) -> None:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    outcome.losses = [row["loss"] for row in rows]
    if len(rows) != len(reference):
        outcome.error = f"{len(rows)} steps, but the reference has {len(reference)}"
        return
    differences = {
        key: max(
            abs(row[key] - other[key]) / abs(other[key]) for row, other in zip(rows, reference, strict=True)
        )
        for key in ("loss", "grad_norm")
    }
    outcome.loss_difference, outcome.norm_difference = differences["loss"], differences["grad_norm"]
    for row, other in zip(rows, reference, strict=True):
        if abs(row["lr"] - other["lr"]) > 1e-12:
            outcome.error = f"step {row['step']}: learning rate {row['lr']}, the reference has {other['lr']}"
        if abs(row.get("aux_loss", 0.0) - other["aux_loss"]) > 0.02 * other["aux_loss"]:
            outcome.error = (
                f"step {row['step']}: auxiliary loss {row.get('aux_loss')}, not {other['aux_loss']}"
            )
    if abs(reference[0]["loss_at_the_end"] / reference[0]["loss"] - 1) < 1e-4:
        outcome.error = "the weights hardly move: give it a higher learning rate"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table: what was compared, and how far off it is."""
    lines = [
        "| configuration | ranks | precision | loss, first and last | loss off by | norm off by | |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        case = outcome.case
        name = f"| {case.name} | {case.ranks} | {outcome.precision} |"
        if outcome.error:
            lines.append(f"{name} | | | failed: {outcome.error} |")
            continue
        verdict = "ok" if outcome.passed else "OUT OF TOLERANCE"
        lines.append(
            f"{name} {outcome.losses[0]:.4f} {outcome.losses[-1]:.4f} | {outcome.loss_difference:.1e} | "
            f"{outcome.norm_difference:.1e} | {verdict} |"
        )
    return "\n".join(lines)
