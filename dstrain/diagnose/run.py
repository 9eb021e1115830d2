"""What a run has left in its folder, read without torch, and what a finding about it is."""

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from dstrain import failure
from dstrain.errors import UserError
from dstrain.failure import Failure, read_lines

_TAIL = 20_000  # characters of a rank's log


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong. score: how likely it is what the user asks about, from 0 to 1."""

    kind: str  # one of `KINDS`
    score: float
    title: str
    evidence: tuple[str, ...]
    changes: tuple[str, ...]  # cheapest first


KINDS = (
    *("out_of_memory", "died", "hung", "error", "interrupted", "ended", "running", "spike", "diverged"),
    *("flat", "few_labels", "scale", "dead_layer", "exploding_layer", "data", "straggler", "communication"),
    *("checkpoint", "utilization", "precision", "different"),
)


@dataclass(frozen=True)
class Run:
    """A run. rows: those of metrics.jsonl with a loss. facts: what it recorded when it last started."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # by dotted key, with what is in force
    ds: dict[str, Any] = field(default_factory=dict)  # as the engine got it
    failure: dict[str, Any] | None = None  # of the last start
    earlier: list[Failure] = field(default_factory=list)  # of the starts before it
    logs: dict[int, str] = field(default_factory=dict)  # the end of each rank's, of the last start
    command: tuple[Path, list[str]] | None = None  # its working directory and arguments
    saved: int | None = None  # newest checkpoint's step
    live: bool = False

    @property
    def last_step(self) -> int:
        """The last step that has a row."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def host(self, rank: int | None) -> str:
        """Return `rank 3 (host)`, as far as it is known."""
        hosts = self.facts.get("hosts") or []
        if rank is None:
            return "a rank"
        return f"rank {rank} ({hosts[rank]})" if rank < len(hosts) else f"rank {rank}"

    def event(self, kind: str) -> dict[str, Any] | None:
        """Return the newest event of a kind since the last start."""
        for event in reversed(self.events):
            if event["event"] == kind:
                return event
            if event["event"] == "start":
                return None
        return None


def read(folder: Path) -> Run:
    """Read what is there; a run that failed early left less. Raises UserError if it is no run's folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the output_dir of a run")
    known = [name for name in ("metrics.jsonl", "logs", "resolved") if (folder / name).exists()]
    if not known:
        near = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
        hint = f"; did you mean {folder / near[0]}?" if near else "; name the output_dir of a run"
        raise UserError(f"{folder}: not a run's folder: no metrics.jsonl, logs/ or resolved/{hint}")
    rows, events = read_lines(folder / "metrics.jsonl"), read_lines(folder / "logs" / "events.jsonl")
    starts = [event for event in events if event.get("event") == "start"]
    options = _json(folder / "resolved" / "recipe.json") or _flat(_yaml(folder / "recipe.yaml"))
    names = (folder / "checkpoints").glob("step-*")
    steps = [int(path.name[5:]) for path in names if path.name[5:].isdigit()]
    logs = {}
    for file in sorted((folder / "logs").glob("rank-*.log")):
        if file.stem[5:].isdigit():
            logs[int(file.stem[5:])] = _last_start(file)
    command = re.search(r"(?m)^--- in (.*?): (.*train\.py .*)$", logs.get(0, ""))
    return Run(
        folder,
        rows=[row for row in rows if "loss" in row and "step" in row],
        evals=[(int(row["step"]), row["eval_loss"]) for row in rows if "eval_loss" in row],
        dtypes=next((row["dtypes"] for row in rows if "dtypes" in row), {}),
        events=[event for event in events if "event" in event],
        facts=starts[-1] if starts else {},
        options=options,
        ds=_json(folder / "resolved" / "ds_config.json") or _json(folder / "ds_config.json"),
        failure=_failure(folder, starts),
        earlier=failure.earlier(folder),
        logs={rank: text[-_TAIL:] for rank, text in logs.items()},
        command=(Path(command.group(1)), shlex.split(command.group(2))[1:]) if command else None,
        saved=max(steps, default=None),
        live=_is_locked(folder / ".lock"),
    )


def _last_start(file: Path) -> str:
    """Return a rank's log since the run was last started."""
    text = file.read_text(encoding="utf-8", errors="replace")
    starts = [found.start() for found in re.finditer(r"(?m)^--- \S+ rank \d+ on ", text)]
    return text[starts[-1] :] if starts else text


def _failure(folder: Path, starts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the failure that was written, unless the run was started again after it."""
    told = failure.read(folder)
    if told is None:
        return None
    found = asdict(told)
    try:
        when, began = (datetime.fromisoformat(x["time"]).astimezone() for x in (found, starts[-1]))
    except (IndexError, KeyError, TypeError, ValueError):
        return found
    return found if when >= began else None


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _yaml(file: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in sections.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found


def _is_locked(file: Path) -> bool:
    """Whether a process of this machine holds the folder. Taking the lock to see would disturb its owner."""
    try:
        inode = os.stat(file).st_ino
        lines = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(line.split()[5].endswith(f":{inode}") for line in lines if len(line.split()) > 5)
