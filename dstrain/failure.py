"""What ended a run: its first failure, with rank and host, in `OUTPUT_DIR/logs/failure.json`."""

import contextlib
import datetime
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

HUNG, DIED = 4, 5  # exit statuses: ranks waited for one another for too long; a rank went without a word
FILE = "failure.json"


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
    """Forget how an earlier run ended."""
    (output_dir / "logs" / FILE).unlink(missing_ok=True)
