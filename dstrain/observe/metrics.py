"""metrics.jsonl and logs/events.jsonl: one JSON object a line, appended as it happens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RowsFile:
    """One such file of a run; without a path, on ranks other than the first, nothing is written."""

    def __init__(self, file: Path | None, resumed_step: int | None) -> None:
        """Open the file; rows after `resumed_step` are cut off, so that no step stands in it twice."""
        self.file = file
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
            kept = [line for line in lines if resumed_step is not None and _step(line) <= resumed_step]
            self.file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        if self.file:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(dict(row)) + "\n")


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):  # the process died while it wrote this line
        return float("inf")
