"""Whether configurations train to the same loss: real launches against a plain PyTorch loop.

A case is a number of ranks and the arguments of train.py. Its losses and gradient norms, step by step, are
compared with those of tests/reference.py, which gets the same initial weights and batches and nothing else.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.errors import UserError
from dstrain.parity.spec import reference_spec

__all__ = ["TOLERANCES", "Case", "Outcome", "compare", "table"]

REPOSITORY = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
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
    for ranks in sorted({outcome.case.ranks for outcome in outcomes}):
        numbers = [n for n, o in enumerate(outcomes) if o.case.ranks == ranks and o.error is None]
        _launch(outcomes, numbers, folder, ranks, worker, seconds_a_case)
    trained = [(number, outcome) for number, outcome in enumerate(outcomes) if outcome.error is None]
    needed = sorted({outcome.reference for _, outcome in trained})
    references = dict(zip(needed, _references([specs[n] for n in needed], folder), strict=True))
    for number, outcome in trained:
        _judge(outcome, folder / str(number) / "run", references[outcome.reference])
    return outcomes


def _launch(
    outcomes: Sequence[Outcome], numbers: list[int], folder: Path, ranks: int, worker: Path, seconds: float
) -> None:
    """Run cases in one launch, and those behind one that fails in another."""
    while numbers:
        jobs = [
            {
                "folder": str(folder / str(n)),
                "arguments": [
                    *outcomes[n].case.arguments,
                    *outcomes[n].extra,
                    *_overrides(folder / str(n)),
                ],
            }
            for n in numbers
        ]
        file = folder / f"jobs-{ranks}-{numbers[0]}.json"
        file.write_text(json.dumps(jobs), encoding="utf-8")
        said = _start(file, ranks, worker, 120 + seconds * len(numbers))
        for place, number in enumerate(numbers):
            shutil.rmtree(folder / str(number) / "run" / "checkpoints", ignore_errors=True)
            result = folder / str(number) / "result.json"
            error = (
                json.loads(result.read_text(encoding="utf-8"))["error"]
                if result.exists()
                else _last_words(folder / str(number), said)
            )
            if error:
                outcomes[number].error = error
                numbers = numbers[place + 1 :]
                break
        else:
            return


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


def _start(file: Path, ranks: int, worker: Path, timeout: float) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    scripts = Path(sys.executable).parent
    command = [
        str(scripts / "deepspeed"),
        *("--num_gpus", str(ranks), "--master_port", str(port), "--log_level", "error"),
        *(str(worker), str(file)),
    ]
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in foreign}
    environment["PATH"] = f"{scripts}{os.pathsep}{environment['PATH']}"
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"no end after {timeout:.0f} s"
    return said


def _last_words(home: Path, said: str) -> str:
    """Return the last line of a job that left no result."""
    logs = [log.read_text(encoding="utf-8") for log in sorted(home.glob("log-rank*"))]
    lines = [line for text in (*logs, said) for line in text.splitlines() if line.strip()]
    return f"ended without a result; last: {lines[-1].strip()[:300]}" if lines else "never started"


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
