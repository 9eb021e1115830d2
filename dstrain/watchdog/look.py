"""Where a process stands, and whether another is still there."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dstrain.fingerprint import REPOSITORY


def dead(process: int) -> bool:
    """Whether a process of this host has ended, even if its parent does not know yet."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return Path("/proc/self/stat").exists()  # without /proc nothing can be told
    except OSError:  # such as too many open files here
        return False
    return text.rpartition(")")[2].split()[0] in "ZX"


def memory_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory on this host since it started."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def last_collective() -> tuple[int, str, bool]:
    """Return number, name with sizes, and end of this process's last collective, as PyTorch recorded it.

    The number counts the collectives of all groups; (0, "", True) where nothing is recorded.
    """
    try:  # a private function of torch 2.13, and no reason to fail
        recorded = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, True))
        entry = recorded["entries"][-1]
        name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
        sizes = "+".join("x".join(map(str, size)) for size in entry["input_sizes"])
        return entry["record_id"] + 1, f"{name} of {sizes} elements" if sizes else name, entry["retired"]
    except (AttributeError, KeyError, IndexError, ValueError, RuntimeError):
        return 0, "", True


def where(thread: int) -> str:
    """Return the function that a thread is in, and the line of this repository that called it."""
    frame: FrameType | None = sys._current_frames().get(thread)
    if frame is None:
        return "no thread any more"
    inner = _name(frame)
    while frame and not _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    outer = _name(frame) if frame else ""
    return inner if outer in ("", inner) else f"{inner}, called by {outer}"


def _is_ours(file: str) -> bool:
    return file.startswith(str(REPOSITORY)) and "site-packages" not in file


def _name(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({path.parent.name}/{path.name}:{frame.f_lineno})"


def behind(places: Mapping[int, Mapping[str, Any]], size: int) -> list[int]:
    """Return the ranks that the others wait for: those that cannot say where they are, else the last ones.

    places: by rank its step and the number of its last collective.
    """
    silent = [rank for rank in range(size) if rank not in places]
    if silent:
        return silent
    reached = {rank: (place["step"], place["number"], place["ended"]) for rank, place in places.items()}
    last = min(reached.values())
    return [rank for rank in range(size) if reached[rank] == last]


def text_of(places: Mapping[int, Mapping[str, Any]], rank: int) -> str:
    """Return where a rank stands."""
    return places[rank]["text"] if rank in places else "not even its watchdog can run"


def blame(places: Mapping[int, Mapping[str, Any]], hosts: Sequence[str]) -> str:
    """Return in words which ranks the others wait for, and where those are."""
    last = behind(places, len(hosts))
    if len(hosts) == 1:
        return text_of(places, 0)
    if len(last) < len(hosts):
        names = ", ".join(f"{rank} on {hosts[rank]}" for rank in last[:4])
        more = f" and {len(last) - 4} more" if len(last) > 4 else ""
        ranks = f"rank {names} is" if len(last) == 1 else f"ranks {names}{more} are"
        return f"{ranks} behind, {text_of(places, last[0])}"
    names = list(dict.fromkeys(place["name"] for place in places.values() if place["name"]))
    if len(names) > 1:
        return f"the ranks are in different collectives: {' and '.join(names[:3])}"
    return f"all ranks stand alike, {text_of(places, 0)}"
