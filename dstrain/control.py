"""Stop and save on request: signals, files in the output folder, and a launcher that has died.

A request to one rank becomes one of all ranks in the next step's own synchronisation, so no rank waits for
another that has already left.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from dstrain.failure import PREEMPTED

STOP_FILE, SAVE_FILE = "STOP", "SAVE"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SAME_S = 2.0  # launchers pass a signal on that the ranks have got already
_LAUNCHERS = (
    *("deepspeed", "torchrun", "torchrun.py", "torch.distributed", "accelerate"),
    *("mpirun", "orterun", "orted"),
)
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh"}


class Unbroken:
    """A text stream that takes no notice when nobody reads it any more, so that a rank lives on to save."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written; the rest is lost."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Control:
    """What was asked of this rank. Made when training starts: before that a signal ends a process as ever."""

    def __init__(self, output_dir: Path, is_main: bool) -> None:
        self.folder, self.is_main = output_dir, is_main
        self._signalled = 0.0
        self._chain = _launchers(os.getpid())
        if "DSTRAIN_RUN" in os.environ:  # the screen is at the other end of a connection that may be lost
            sys.stdout, sys.stderr = Unbroken(sys.stdout), Unbroken(sys.stderr)
        if is_main:
            self._remove(STOP_FILE, SAVE_FILE)  # of an earlier run
        for name in SIGNALS:
            signal.signal(name, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled and now - self._signalled > _SAME_S:
            os._exit(PREEMPTED)
        self._signalled = self._signalled or now

    def poll(self) -> tuple[bool, bool, bool]:
        """Return what is asked for: (stop by a signal or as the launcher is gone, stop by file, save)."""
        signalled = self._signalled > 0 or not _alive(self._chain)
        if not self.is_main:
            return signalled, False, False
        return signalled, (self.folder / STOP_FILE).exists(), (self.folder / SAVE_FILE).exists()

    def done(self, *names: str) -> None:
        """Remove the files of requests that were met."""
        if self.is_main:
            self._remove(*names)

    def _remove(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)


def _launchers(pid: int) -> list[tuple[int, int]]:
    """Return the launchers above `pid`, as (process, its parent), nearest first; none without /proc."""
    # A run of multi_node.sh ends here with its connection; one begun by hand over ssh outlives it.
    names = {*_LAUNCHERS, "sshd"} if "DSTRAIN_RUN" in os.environ else set(_LAUNCHERS)
    chain: list[tuple[int, int]] = []
    shells: list[tuple[int, int]] = []  # count only below a launcher: others may end before the run does
    parent = parent_of(pid)
    while parent and parent > 1:
        above, programs = parent_of(parent), _programs(parent)
        if programs & names:
            chain += [*shells, (parent, above or 0)]
            shells = []
        elif programs & _SHELLS:
            shells.append((parent, above or 0))
        else:
            break
        parent = above
    return chain


def _alive(chain: list[tuple[int, int]]) -> bool:
    """Whether every launcher still is where it was: one whose parent has died gets another parent."""
    if not chain:
        return True
    if os.getppid() != chain[0][0]:
        return False
    return all(parent_of(pid) == above for pid, above in chain[:-1])


def parent_of(pid: int) -> int | None:
    """Return the process that a process belongs to; None if it has gone, or without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])


def _programs(pid: int) -> set[str]:
    """Return the names of what a process runs: its program, its script, and the module after `-m`."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return set()
    found = {Path(word).name.partition(":")[0] for word in [w for w in words if not w.startswith("-")][:2]}
    if "-m" in words[:4]:
        module = words[words.index("-m") + 1 :][:1]
        found |= {name for name in _LAUNCHERS if module and module[0].startswith(name)}
    return found
