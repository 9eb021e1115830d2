"""What ended a run: its first failure, with rank and host, in `OUTPUT_DIR/logs/failure.json`."""

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HUNG, DIED = 4, 5  # exit statuses: ranks waited for one another for too long; a rank went without a word
FILE = "failure.json"
EARLIER = "failures.jsonl"
UNKNOWN = "a signal or a crash ended it"
PREEMPTED = 75  # after a signal: saved, to be started again (EX_TEMPFAIL of sysexits.h)
_FATAL = ("KILL", "SEGV", "BUS", "ABRT", "ILL", "FPE", "TERM", "PIPE")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Failure:
    """Why a run ended. kind: `error` raised by a rank, `died` without a word, or `hung`."""

    kind: str
    rank: int
    error: str  # one line
    status: int  # of every process of the run
    host: str = field(default_factory=socket.gethostname)
    step: int | None = None  # None before training
    phase: str = ""
    traceback: str = ""
    time: str = field(default_factory=_now)

    def text(self) -> str:
        """Return the last lines that a user sees."""
        where = f"rank {self.rank} on {self.host}"
        when = f"step {self.step}" if self.step is not None and self.phase == "step" else self.phase
        if self.kind == "hung":
            return f"error: {self.error}"
        return f"error: {where}{f', {when}' if when else ''}: {self.error}"


def to_json(failure: Failure) -> str:
    """Return a failure as one line of JSON."""
    return json.dumps(asdict(failure))


def from_json(text: str | bytes) -> Failure:
    """Return the failure that `to_json` wrote."""
    return Failure(**json.loads(text))


def record(folder: Path, failure: Failure) -> bool:
    """Write the failure into the folder of logs if it is the first there. Returns whether it was."""
    temporary = folder / f".{FILE}.{socket.gethostname()}.{os.getpid()}"
    text = json.dumps(asdict(failure), indent=2) + "\n"
    try:
        try:
            temporary.write_text(text, encoding="utf-8")
            os.link(temporary, folder / FILE)  # only one of all hosts succeeds
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            with (folder / FILE).open("x", encoding="utf-8") as stream:
                stream.write(text)
    except FileExistsError:
        return False
    except OSError as error:  # a full disk must not hide what happened
        with contextlib.suppress(OSError, ValueError):
            print(
                f"warning: {folder / FILE}: cannot be written: {error.strerror}", file=sys.stderr, flush=True
            )
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def for_torchrun(failure: Failure) -> None:
    """Give torchrun the error, which it repeats as the root cause at the end of its own report."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    message = {"message": failure.text(), "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def read(output_dir: Path) -> Failure | None:
    """Return how the newest run in a folder failed; None if it did not."""
    try:
        return from_json((output_dir / "logs" / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None


def clear(output_dir: Path) -> None:
    """Put how an earlier start ended to those before it, in `logs/failures.jsonl`."""
    folder = output_dir / "logs"
    if not (folder / FILE).exists():
        return
    if told := read(output_dir):
        with (folder / EARLIER).open("a", encoding="utf-8") as stream:
            stream.write(to_json(replace(told, traceback="")) + "\n")
    (folder / FILE).unlink()


def earlier(output_dir: Path) -> list[Failure]:
    """Return how earlier starts of a run failed, oldest first."""
    return [Failure(**row) for row in read_lines(output_dir / "logs" / EARLIER)]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file that has one a line; none if it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:  # the process died, or the disk was full, while it wrote this line
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def mark(output_dir: Path) -> str:
    """Return what tells apart what a run leaves from what earlier ones have left, for `last_words`."""
    told = read(output_dir)
    return json.dumps([told.time if told else None, (_events(output_dir) or [None])[-1]])


def last_words(output_dir: Path, status: int, before: str) -> tuple[int, str]:
    """Return train.py's status that a launcher's status stands for, and what to say last of the run.

    Launchers have statuses of their own: 0 from deepspeed if its launch.py was killed, 256 less a signal's
    number for a rank that it ended, elsewhere 128 more. before: what `mark` gave as the run was started.
    """
    told_before, event_before = json.loads(before)
    failed, events, seen = read(output_dir), _events(output_dir), _signal(status)
    event = events[-1] if events and events[-1] != event_before else {}  # of this start
    if failed and failed.time != told_before:
        if failed.kind == "died" and seen and failed.host == socket.gethostname():
            failed = replace(failed, error=failed.error.replace(UNKNOWN, f"its launcher saw {seen}"))
            with contextlib.suppress(OSError):  # for diagnose
                _write(output_dir / "logs", FILE, json.dumps(asdict(failed), indent=2) + "\n")
        return failed.status, failed.text()
    if event.get("event") == "interrupted":
        return (PREEMPTED if event.get("by") == "a signal" else 0), ""
    if status == 0 and event and event.get("event") != "finished" and _started_here(events):
        return DIED, "error: the run ended before its last step, and no rank could say why"
    if status == 0:
        return 0, ""
    if seen:
        return DIED, f"error: the run was ended by {seen} before a rank could say why"
    return status, f"error: the run ended with status {status}, and no rank has recorded why; see above"


def _write(folder: Path, name: str, text: str) -> None:
    whole = folder / f".{name}.{socket.gethostname()}.{os.getpid()}"
    whole.write_text(text, encoding="utf-8")
    whole.replace(folder / name)


def _events(output_dir: Path) -> list[dict[str, Any]]:
    return read_lines(output_dir / "logs" / "events.jsonl")


def _started_here(events: list[dict[str, Any]]) -> bool:
    """Whether all ranks of the newest start were on this host; another's file may be seen late."""
    starts = [event for event in events if event.get("event") == "start"]
    return bool(starts) and set(starts[-1].get("hosts", ())) == {socket.gethostname()}


def _signal(status: int) -> str:
    """Return the name of the signal that a launcher's status tells of, or nothing."""
    for number in (256 - status, status - 128):
        with contextlib.suppress(ValueError):
            name = signal.Signals(number).name
            if name.removeprefix("SIG") in _FATAL:
                return name
    return ""


if __name__ == "__main__":  # what launch/lib.sh asks; standard library only, for it is asked at each start
    match sys.argv[1:]:
        case ["mark", folder]:
            print(mark(Path(folder)))
        case ["words", folder, number, known]:
            print(*last_words(Path(folder), int(number), known), sep="\n")
