"""No rank waits for another for ever, and the first failure of a run is the one that is told.

A thread in every rank tells a store each second that its rank is there, and looks at the others. When a rank
raises, dies or stands still, one of them says so, writes `logs/failure.json`, and all end within seconds with
the same status. Ranks on one host see at once that a process has gone; a host that vanishes is noticed after
a minute. docs/troubleshooting.md lists the limits.
"""

import contextlib
import os
import socket
import sys
import time
import traceback
from pathlib import Path

from dstrain import distributed
from dstrain.errors import Told, UserError
from dstrain.watchdog.guard import Guard, status_of

__all__ = ["enter", "fail", "finish", "start", "stop"]

_SHARED_S = 30.0

_guard: Guard | None = None


def start(place: distributed.World, output_dir: Path | None, init_s: float, step_s: float | None) -> None:
    """Begin to watch, once the process group has started.

    output_dir: where `logs/` are kept, None for none. init_s: limit in seconds of start-up, the first steps,
    an evaluation, a save, the export. step_s: limit of a step; None learns it from the steps before.
    """
    global _guard
    stop()
    _guard = Guard(place, init_s, step_s)
    if output_dir:
        _share(output_dir, place)
        _guard.keep_log(output_dir / "logs")


def _share(output_dir: Path, place: distributed.World) -> None:
    """Let the first rank prepare the folder of logs, and see that all ranks find it there."""
    mark = output_dir / "logs" / f".seen-by-all-{distributed.gather(os.getpid())[0]}"
    if place.is_main:
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise UserError(f"output_dir={str(output_dir)!r}: cannot be written: {error.strerror}") from None
    distributed.barrier()
    deadline = time.monotonic() + _SHARED_S  # a file on NFS takes a while to be seen
    while not (found := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.5)
        with contextlib.suppress(OSError):
            os.listdir(mark.parent)
    hosts = sorted({host for host in distributed.gather("" if found else socket.gethostname()) if host})
    if place.is_main:
        mark.unlink(missing_ok=True)
    if hosts:
        raise UserError(
            f"output_dir={str(output_dir)!r}: {', '.join(hosts)} and the first rank's host have folders of "
            "their own there; all hosts must share it, for checkpoints are written and read by all"
        )


def enter(phase: str, step: int = 0) -> None:
    """Say what this rank does from now on: `step`, `evaluation`, `saving`, `export` ..."""
    if _guard:
        _guard.enter(phase, step)


def fail(error: BaseException) -> int:
    """Tell an error for all ranks, once. Returns the status to leave with."""
    if _guard:
        return _guard.fail(error)
    if isinstance(error, Told):
        distributed.say_error(str(error))
    else:
        distributed.be_patient()
        traceback.print_exception(error, file=sys.stderr)
    return status_of(error)


def finish() -> None:
    """End a run together: no rank leaves while another still writes, and what goes wrong then is told."""
    if _guard:
        _guard.enter("end", _guard.at.step)
        distributed.barrier()
    stop()


def stop() -> None:
    """Watch no longer; what happens from now on is no fault of the run."""
    global _guard
    if _guard:
        _guard.stop()
    _guard = None
