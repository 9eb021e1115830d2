"""A host's side of a run on several hosts: its orders, its ranks, their end. `remote.py` is the other side.

`python -m dstrain.on_host receive|signal|end TICKET ...`, by ssh. The ticket is a random word, one a start.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from dstrain.control import parent_of
from dstrain.fingerprint import REPOSITORY


def _orders() -> Path:
    return Path.home() / ".cache" / "dstrain" / "launch"


def _receive(ticket: str, ranks: Sequence[str]) -> None:
    """Write standard input to a file for each rank of this host, readable by this user alone."""
    text = sys.stdin.read()
    _orders().mkdir(parents=True, exist_ok=True, mode=0o700)
    for rank in ranks:
        with open(_orders() / f"{ticket}-{rank}.json", "x", opener=_private, encoding="utf-8") as file:
            file.write(text)


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def become_rank(ticket: str) -> NoReturn:
    """Take this rank's order, remove it, and become train.py with its arguments and environment."""
    file = _orders() / f"{ticket}-{os.environ['RANK']}.json"
    order = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    program = [sys.executable, "-u", str(REPOSITORY / "train.py"), *order["arguments"]]
    # PyTorch warns of each connection from an address that has no name; its errors stay.
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | dict(os.environ) | order["environment"]
    if shutil.which("nvidia-smi"):
        environment |= _for_gpus(environment)
    os.execve(sys.executable, program, environment)


def _for_gpus(environment: Mapping[str, str]) -> dict[str, str]:
    """Bind this rank to its share of the cores, as `--bind_cores_to_rank` does, which pdsh does not pass on.

    Returns the variables that go with it; what the user has set stays.
    """
    import psutil

    added = {}
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        added["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # less memory lost to fragments
    cores, rank, ranks = (
        sorted(os.sched_getaffinity(0)),
        int(environment["LOCAL_RANK"]),
        int(environment["LOCAL_SIZE"]),
    )
    share = (
        psutil.cpu_count(logical=False) or 0
    ) // ranks  # the second threads of the cores come after them all
    if share and len(cores) == psutil.cpu_count() and "OMP_NUM_THREADS" not in environment:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])
        added["OMP_NUM_THREADS"] = str(share)
    if environment["RANK"] == "0":
        print("GPU defaults:", " ".join(f"{name}={value}" for name, value in added.items()), flush=True)
    return added


def _processes(ticket: str) -> dict[int, str]:
    """Return the processes of a run on this host, with their command lines."""
    found, wanted = {}, f"DSTRAIN_RUN={ticket}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                found[int(folder.name)] = b" ".join(words).decode(errors="replace")
    return found


def _signal(ticket: str) -> None:
    """Ask the ranks of this host to save and end; not their launcher, nor the processes that they started."""
    ranks = {pid for pid, line in _processes(ticket).items() if str(REPOSITORY / "train.py") in line}
    for pid in ranks:
        if parent_of(pid) not in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                print(pid)


def _end(ticket: str, seconds: float) -> None:
    """End what is left of a run on this host, its ranks given that long to save, and remove its orders."""
    asked, ended = time.monotonic(), set()
    while left := _processes(ticket):
        late = time.monotonic() - asked > seconds
        for pid in left.keys() if late else left.keys() - ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        ended |= left.keys()
        time.sleep(0.1)
    for file in _orders().glob(f"{ticket}-*.json"):
        file.unlink(missing_ok=True)
    if ended:
        print(f"{len(ended)} processes that were left of the run were ended")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive", ticket, *ranks]:
            _receive(ticket, ranks)
        case ["signal", ticket]:
            _signal(ticket)
        case ["end", ticket, seconds]:
            _end(ticket, float(seconds))
