"""Folders that a run writes to: free space, and how fast files for offload really are."""

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from dstrain.doctor.check import Check, failure, ok, warning

_GIB = 2**30
_LEAST_BYTES = 1 * _GIB  # below it nothing useful fits
_LOW_BYTES = 10 * _GIB
_BLOCK = 4 << 20
_PROBE_BYTES = 256 << 20
_PROBE_S = 5.0  # a direction
_SLOW_WRITE, _SLOW_READ = 0.5e9, 1.0e9  # bytes/s; a local NVMe disk gives several times as much
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "glusterfs"}
_IN_MEMORY = {"tmpfs", "ramfs"}


@dataclass(frozen=True)
class Speed:
    """What a disk gives, in bytes/s. direct: past the page cache (O_DIRECT), else flushed by fsync."""

    write: float
    read: float
    direct: bool


def existing(path: Path) -> Path:
    """Return the path, or the first of its parents that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def file_system(path: Path) -> str:
    """Return the type of file system that holds an existing path, such as `ext4`."""
    best, kind = "", ""
    for part in psutil.disk_partitions(all=True):
        if path.is_relative_to(part.mountpoint) and len(part.mountpoint) >= len(best):
            best, kind = part.mountpoint, part.fstype
    return kind


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def space(name: str, path: Path, key: str, needed_bytes: float | None = None, why: str = "") -> Check:
    """Check that a folder, or the first parent that exists, can be written and has room.

    key: what moves it elsewhere, such as `output_dir`. needed_bytes: what is known that will be written.
    """
    place = existing(path.absolute())
    if not place.is_dir() or not os.access(place, os.W_OK):
        return failure(name, f"{path}: {place} is no folder that can be written to", f"choose another {key}")
    usage = psutil.disk_usage(str(place))
    kind = file_system(place)
    seen = f"{_short(path)}: {usage.free / _GIB:.0f} of {usage.total / _GIB:.0f} GiB free ({kind})"
    remedy = f"make room, or choose another {key}"
    if needed_bytes is not None:
        seen += f"; {why} take {needed_bytes / _GIB:.2f} GiB"
    if usage.free < max(_LEAST_BYTES, needed_bytes or 0):
        return failure(name, seen, remedy)
    if usage.free < _LOW_BYTES:
        return warning(name, seen, remedy)
    if kind in _IN_MEMORY:
        return warning(name, f"{seen}: this is memory, gone with the machine", f"choose another {key}")
    return ok(name, seen)


def measure(folder: Path, size: int = _PROBE_BYTES, limit_s: float = _PROBE_S) -> Speed:
    """Write and read a file in a folder, past the page cache, and remove it. Raises OSError.

    Each direction ends after `limit_s` seconds, with the part that was done.
    """
    file = folder / f".doctor-{os.getpid()}"
    buffer = mmap.mmap(-1, _BLOCK)  # page-aligned, as O_DIRECT asks
    buffer.write(os.urandom(_BLOCK))  # a file system that compresses gets nothing to compress
    try:
        direct, descriptor = _open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            began, written = time.perf_counter(), 0
            while written < size and time.perf_counter() - began < limit_s:
                written += os.write(descriptor, buffer)
            os.fsync(descriptor)
            write = written / (time.perf_counter() - began)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        _, descriptor = _open(file, os.O_RDONLY)
        try:
            began, done = time.perf_counter(), 0
            while done < written and time.perf_counter() - began < limit_s:
                done += os.readv(descriptor, [buffer])
            read = done / (time.perf_counter() - began)
        finally:
            os.close(descriptor)
    finally:
        file.unlink(missing_ok=True)
        buffer.close()
    return Speed(write, read, direct)


def _open(file: Path, flags: int) -> tuple[bool, int]:
    try:
        return True, os.open(file, flags | os.O_DIRECT, 0o600)
    except OSError:  # tmpfs and some network file systems have no O_DIRECT
        file.unlink(missing_ok=True) if flags & os.O_CREAT else None
        return False, os.open(file, flags, 0o600)


def nvme(folder: Path) -> list[Check]:
    """Check a folder that tensors are offloaded to: there, writable, roomy, local, and as fast as NVMe."""
    name, key = "NVMe disk", "nvme_path (deepspeed.zero_optimization.offload_*.nvme_path)"
    if not folder.is_dir():
        return [
            failure(
                name, f"{folder}: no such folder", f"make it on a local NVMe disk, or choose another {key}"
            )
        ]
    room = space(name, folder, key)
    if room.state == "failure":
        return [room]
    speed = measure(folder)
    how = "" if speed.direct else ", through the page cache"
    seen = f"{room.seen}; writes {speed.write / 1e9:.2f} GB/s, reads {speed.read / 1e9:.2f} GB/s{how}"
    kind = file_system(folder)
    if kind in _REMOTE:
        return [
            warning(name, f"{seen}: a network file system", f"choose another {key}, on a local NVMe disk")
        ]
    if room.state == "warning":
        return [warning(name, seen, room.remedy)]
    if speed.write < _SLOW_WRITE or speed.read < _SLOW_READ:
        least = f"{_SLOW_WRITE / 1e9:g} and {_SLOW_READ / 1e9:g} GB/s"
        remedy = f"offload will wait for it: choose a local NVMe disk, which gives more than {least}"
        return [warning(name, seen, remedy)]
    return [ok(name, seen)]
