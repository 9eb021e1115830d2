"""Real ranks for a minute: do all come, how fast do they talk, do their clocks agree."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dstrain.doctor import links
from dstrain.doctor.check import Check, failure, ok, warning

MARK = "@doctor "  # begins each line of a worker that is read; all else is chatter
PHASES = ("start", "torch imported", "store", "barrier", "process group", "small all-reduce")
PHASES = (*PHASES, "large all-reduce", "clock", "done")

START_S = 120.0  # to import torch and to find the first rank
LIMIT_S = 30.0  # for every wait after that
_STAGGER_S = 0.05
_GRACE_S = 5.0  # between the first rank's time-out and the others'
_CLOCK_LIMIT_S = 1.0
_SMALL_BYTES = 4 << 10
_LARGE_BYTES = {"gloo": 64 << 20, "nccl": 1 << 30}


@dataclass
class Rank:
    """One rank of the run, and how far it came."""

    number: int
    host: str
    process: subprocess.Popen[str]
    at: str = "nothing yet"  # the last phase that it finished
    result: dict[str, Any] | None = None
    error: str | None = None
    error_at: float = 0.0  # when it was heard; the first is the cause, the others follow from it
    missing: list[int] = field(default_factory=list)  # ranks that it waited for in vain
    last_words: str = ""
    status: int | None = None  # with which it ended by itself

    @property
    def step(self) -> int:
        """How many phases it finished."""
        return PHASES.index(self.at) + 1 if self.at in PHASES else 0

    @property
    def name(self) -> str:
        """The rank, and its host if it is not this one."""
        return f"rank {self.number}" + (f" on {self.host}" if self.host else "")


@dataclass(frozen=True)
class Place:
    """Where ranks are started. prefix: the command that brings one there, such as ssh; here it is empty."""

    host: str
    slots: int
    prefix: tuple[str, ...] = ()


def run(
    places: Sequence[Place],
    address: str,
    port: int,
    *,
    on_gpu: bool,
    worker: Sequence[str] = (sys.executable, "-m", "dstrain.doctor.worker"),
    forwarded: Mapping[str, str] | None = None,
    start_s: float = START_S,
    limit_s: float = LIMIT_S,
) -> list[Rank]:
    """Start a rank on each slot, follow them to their end or past a limit, and end what is left.

    address, port: where they meet, on the first host. worker: the command of one rank. forwarded: variables
    that ranks of other hosts get. Every wait has a limit: `start_s` for imports and meeting, then `limit_s`.
    """
    size = sum(place.slots for place in places)
    options = {
        "start_s": start_s,
        "limit_s": limit_s,
        "small_bytes": _SMALL_BYTES,
        "large_bytes": _LARGE_BYTES["nccl" if on_gpu else "gloo"],
        "on_gpu": on_gpu,
        "several_hosts": len(places) > 1,
    }
    command = [*worker, json.dumps(options)]
    slots = [(place, local) for place in places for local in range(place.slots)]  # by rank
    ranks: dict[int, Rank] = {}
    for number, (place, local) in sorted(enumerate(slots), key=lambda one: one[1][1]):
        own = {"RANK": number, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": place.slots}
        own |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        values = {name: str(value) for name, value in own.items()}
        ranks[number] = Rank(number, place.host, _start(place, command, values, forwarded or {}))
        if place.prefix and local:
            time.sleep(_STAGGER_S)  # an sshd refuses more than ten at once that have not logged in yet
    started = [ranks[number] for number in range(size)]
    readers = [thread for rank in started for thread in _follow(rank)]
    try:
        _wait(started, start_s, limit_s)
    finally:
        for rank in started:
            rank.status = rank.process.poll()
        for rank in started:
            _end(rank.process)
        for thread in readers:
            thread.join(2)
    return started


def _start(
    place: Place, command: Sequence[str], values: Mapping[str, str], forwarded: Mapping[str, str]
) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    if place.prefix:
        there = " ".join(f"{name}={shlex.quote(value)}" for name, value in {**forwarded, **values}.items())
        line = f"cd {shlex.quote(os.getcwd())} && env {there} {shlex.join(command)}"
        command = [*place.prefix, line]
    else:
        environment |= values
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,  # never written to: a rank ends when it closes
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _follow(rank: Rank) -> list[threading.Thread]:
    """Read what a rank says, in threads of their own."""

    def hear() -> None:
        for line in rank.process.stdout or ():
            if not line.startswith(MARK):
                continue
            said = json.loads(line.removeprefix(MARK))
            rank.at = said.get("at", rank.at)
            rank.result = said.get("result", rank.result)
            if "error" in said:
                rank.error, rank.error_at = said["error"], time.monotonic()
            rank.missing = said.get("missing", rank.missing)

    def overhear() -> None:
        for line in rank.process.stderr or ():
            rank.last_words = line.strip() or rank.last_words

    threads = [threading.Thread(target=work, daemon=True) for work in (hear, overhear)]
    for thread in threads:
        thread.start()
    return threads


def _wait(ranks: Sequence[Rank], start_s: float, limit_s: float) -> None:
    """Wait until all have ended, one has failed and the others had time to say so, or nothing moves."""
    moved, steps = time.monotonic(), [0] * len(ranks)
    failed_at: float | None = None
    while any(rank.process.poll() is None for rank in ranks):
        now = time.monotonic()
        if (new := [rank.step for rank in ranks]) != steps:
            moved, steps = now, new
        meeting = min(steps) <= PHASES.index("store")
        # A rank's own limit comes first: it says more than that nothing moves.
        if now - moved > (start_s if meeting else 2 * limit_s) + 2 * _GRACE_S:
            return
        if failed_at is None and any(_has_failed(rank) for rank in ranks):
            failed_at = now
        # Those that wait for a dead one say so within their own limit.
        if failed_at is not None and now - failed_at > _GRACE_S:
            return
        time.sleep(0.05)


def _has_failed(rank: Rank) -> bool:
    return bool(rank.error or rank.missing or rank.process.poll())


def _end(process: subprocess.Popen[str]) -> None:
    """End a rank: by the end of its standard input, also on another host, and here by signal."""
    if process.stdin:
        process.stdin.close()
    if process.poll() is None:
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def judge(
    ranks: Sequence[Rank], hosts: Sequence[Mapping[str, Any]], *, on_gpu: bool, tcp_only: bool
) -> list[Check]:
    """Turn what ranks said into checks. hosts: facts of each host, in the order of ranks."""
    results = [rank.result for rank in ranks]
    if not all(results):
        return [_what_is_missing(ranks)]
    size, waited = len(ranks), max(result["barrier_s"] for result in results if result)
    where = "on one host" if len(hosts) == 1 else f"on {len(hosts)} hosts"
    checks = [ok("barrier", f"{size} ranks {where} met and passed it in {waited * 1e3:.1f} ms")]
    first_of_host = {rank.host: rank.result["interface"] for rank in reversed(ranks) if rank.result}
    order = list(dict.fromkeys(rank.host for rank in ranks))
    link = links.between(hosts, [first_of_host[host] for host in order], on_gpu=on_gpu, tcp_only=tcp_only)
    backend = "nccl" if on_gpu else "gloo"
    slow = {name: max(result[f"{name}_s"] for result in results if result) for name in ("small", "large")}
    checks.append(_latency(slow["small"], link, size, backend))
    checks.append(_bandwidth(slow["large"], link, size, backend))
    return [*checks, _clocks(ranks, len(hosts))]


def _what_is_missing(ranks: Sequence[Rank]) -> Check:
    """Name the rank that is to blame: one that died, did not come, or says nothing."""
    look = "look at that host and its network; run the doctor there alone"
    for rank in ranks:
        if rank.status and rank.result is None and not rank.error and not rank.missing:
            reason = f": {rank.last_words[:200]}" if rank.last_words else ""
            how = f"by signal {-rank.status}" if rank.status < 0 else f"with status {rank.status}"
            return failure("barrier", f"{rank.name} died {how} after {rank.at!r}{reason}", look)
    absent = sorted({number for rank in ranks for number in rank.missing})
    if absent:
        named = "; ".join(
            f"{ranks[n].name}, last seen at {ranks[n].at!r}"
            + (f": {ranks[n].error}" if ranks[n].error else "")
            for n in absent[:5]
        )
        return failure("barrier", f"did not come: {named}", look)
    silent = [rank for rank in ranks if not rank.error and rank.result is None]
    errors = [rank for rank in ranks if rank.error]
    # A rank that hangs says nothing, while those that wait for it run into their limit and do.
    if silent and errors:
        behind = min(rank.step for rank in silent)
        named = "; ".join(f"{r.name}, stuck after {r.at!r}" for r in silent if r.step == behind)
        return failure("barrier", f"{named} ({errors[0].name}: {(errors[0].error or '')[:160]})", look)
    if errors:
        first = min(errors, key=lambda rank: rank.error_at)
        return failure(
            "barrier", f"{first.name} failed after {first.at!r}: {(first.error or '')[:250]}", look
        )
    behind = min(rank.step for rank in silent)
    named = "; ".join(f"{rank.name}, stuck after {rank.at!r}" for rank in silent if rank.step == behind)
    return failure("barrier", f"nothing moved any more: {named}", look)


def _latency(seconds: float, link: links.Link, size: int, backend: str) -> Check:
    seen = f"{seconds * 1e6:,.0f} us for {_SMALL_BYTES >> 10} KiB, {size} ranks ({backend}; {link.words})"
    limit = links.least_latency_limit_s(link, size)
    if limit is None:
        return ok("all-reduce latency", f"{seen}; no limit applies")
    if seconds > limit:
        remedy = "look for another route or load on the network (ping), and at the *_SOCKET_IFNAME variables"
        return warning("all-reduce latency", f"{seen}; expected below {limit * 1e6:,.0f} us", remedy)
    return ok("all-reduce latency", seen)


def _bandwidth(seconds: float, link: links.Link, size: int, backend: str) -> Check:
    size_bytes = _LARGE_BYTES[backend]
    algorithm, bus = links.bus_bandwidth(size_bytes, seconds, size)
    seen = f"{bus / 1e9:.2f} GB/s bus, {algorithm / 1e9:.2f} algorithm, {size_bytes >> 20} MiB ({link.words})"
    if link.bytes_s is None:
        return ok("all-reduce bandwidth", f"{seen}; nothing to compare it with")
    least = link.share * link.bytes_s
    if bus < least:
        remedy = (
            "look at NCCL_* variables, topology and other jobs; NCCL_DEBUG=INFO says what NCCL chose"
            if backend == "nccl"
            else "look for other jobs on the network, and at GLOO_SOCKET_IFNAME"
        )
        return warning("all-reduce bandwidth", f"{seen}; expected above {least / 1e9:.2f} GB/s", remedy)
    return ok("all-reduce bandwidth", seen)


def _clocks(ranks: Sequence[Rank], hosts: int) -> Check:
    """Compare clocks with rank 0's, beyond what the round trip leaves open."""
    measured = [
        (rank, rank.result["offset_s"], rank.result["uncertainty_s"]) for rank in ranks if rank.result
    ]
    rank, offset, uncertainty = max(measured, key=lambda one: abs(one[1]))
    seen = f"{rank.name} is {abs(offset) * 1e3:,.1f} ms {'ahead of' if offset > 0 else 'behind'} rank 0"
    seen += f", known within {uncertainty * 1e3:.1f} ms"
    if abs(offset) - uncertainty > _CLOCK_LIMIT_S:
        return warning(
            "clocks", seen, "set the clocks by NTP (chronyc tracking, timedatectl): logs do not line up"
        )
    return ok("clocks", seen + ("; one host, one clock" if hosts == 1 else ""))
