"""What every rank prints is kept in `OUTPUT_DIR/logs/rank-N.log`; the first rank's is on the screen too."""

import contextlib
import datetime
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any, TextIO


class Tee:
    """A stream to the screen and, line by line, to a log: of a line that was redrawn, the last form."""

    def __init__(self, screen: TextIO, log: TextIO) -> None:
        self.screen, self.log, self._line = screen, log, ""

    def write(self, text: str) -> int:
        """Write text to both."""
        *lines, self._line = (self._line + text).split("\n")
        with contextlib.suppress(OSError, ValueError):  # a full disk must not stop what is on the screen
            self.log.writelines(f"{line.rsplit(chr(13))[-1]}\n" for line in lines)
            if lines:
                self.log.flush()
        self._line = self._line.rsplit("\r", 1)[-1]
        return self.screen.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.screen, name)


def _screen_of(stream: TextIO, log: TextIO) -> TextIO:
    """Return the screen behind a `Tee` to a log; a stream that was put in its place meanwhile stays."""
    return stream.screen if isinstance(stream, Tee) and stream.log is log else stream


class RankLog:
    """The log of this rank, from now until `close`."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Open `rank-N.log` to append to. Ranks other than the first leave the screen altogether."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.log"
        self.file = self.path.open("a", encoding="utf-8", errors="replace", buffering=1)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.file.write(f"--- {now} rank {rank} on {socket.gethostname()}, process {os.getpid()}\n")
        self.file.write(f"--- in {os.getcwd()}: {shlex.join(sys.argv)}\n")
        self._screen: list[int] = []
        sys.stdout.flush()
        sys.stderr.flush()
        if rank == 0:
            sys.stdout, sys.stderr = Tee(sys.stdout, self.file), Tee(sys.stderr, self.file)  # type: ignore[assignment]
        else:  # what C++ libraries print as well
            self._screen = [os.dup(1), os.dup(2)]
            os.dup2(self.file.fileno(), 1)
            os.dup2(self.file.fileno(), 2)

    def note(self, text: str) -> None:
        """Write lines to the log alone. A full disk is no reason to fail."""
        with contextlib.suppress(OSError, ValueError):
            self.file.write(text + "\n")
            self.file.flush()

    def to_screen(self, text: str) -> None:
        """Print to standard error for people, from any rank."""
        data = (text + "\n").encode(errors="replace")
        with contextlib.suppress(OSError):
            os.write(self._screen[1] if self._screen else 2, data)
        self.note(text)

    def close(self) -> None:
        """Give the screen back."""
        with contextlib.suppress(OSError):  # nobody may be reading it any more
            sys.stdout.flush()
            sys.stderr.flush()
        sys.stdout, sys.stderr = (_screen_of(stream, self.file) for stream in (sys.stdout, sys.stderr))
        for number, screen in enumerate(self._screen, 1):
            os.dup2(screen, number)
            os.close(screen)
        with contextlib.suppress(OSError):  # a full disk
            self.file.close()
