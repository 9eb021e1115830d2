"""metrics.jsonl and logs/events.jsonl: one JSON object a line, appended as it happens."""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RowsFile:
    """One such file of a run; without a path, on ranks other than the first, nothing is written."""

    def __init__(self, file: Path | None, resumed_step: int | None) -> None:
        """Open the file; rows after `resumed_step` are cut off, so that no step stands in it twice."""
        self.file, self.waiting = file, list[str]()
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
            kept = [line for line in lines if resumed_step is not None and _step(line) <= resumed_step]
            if kept != lines or not self.file.exists():
                whole = self.file.with_name(f".{self.file.name}.new")  # a crash now must not lose the curve
                whole.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
                whole.replace(self.file)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. On a full disk it is kept until there is room again, and training goes on."""
        if not self.file:
            return
        self.waiting.append(json.dumps(dict(row)) + "\n")
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.writelines(self.waiting)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.file, size)  # no half of a line
            if len(self.waiting) == 1:
                print(
                    f"warning: {self.file}: cannot be written for now: {error.strerror}",
                    file=sys.stderr,
                    flush=True,
                )
        else:
            self.waiting.clear()


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):  # the process died while it wrote this line
        return float("inf")
