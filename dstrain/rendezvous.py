"""Where ranks meet before their process group: all are there, within a limit, and run the same code.

Without it a missing rank, a wrong MASTER_ADDR or a host with other packages shows as a time-out of a library
half an hour later, or as losses that nobody can explain.
"""

import json
import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from dstrain.errors import UserError
from dstrain.fingerprint import differences, fingerprint

_REQUEST = timedelta(seconds=30)  # for one answer of the store
_SAY_AFTER_S = 30.0


def address() -> tuple[str, int]:
    """Return MASTER_ADDR, without the brackets of an IPv6 address, and MASTER_PORT.

    Raises UserError if one is missing or is none.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host:
        raise UserError("environment: MASTER_ADDR is missing; it is the address of the first rank's host")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"environment: MASTER_PORT={port!r} is no port; take one from 1024 to 65535")
    host = host.removeprefix("[").removesuffix("]")
    os.environ["MASTER_ADDR"] = host  # as libraries want it
    return host, int(port)


def connect(serves: bool, limit_s: float) -> TCPStore:
    """Open the store of all ranks. serves: this process holds it. limit_s: how long to wait for it.

    Raises UserError if the port is taken, or if nobody answers in time.
    """
    host, port = address()
    if serves:
        try:
            return TCPStore(host, port, None, True, timeout=_REQUEST, wait_for_workers=False)
        except torch.distributed.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise UserError(
                f"MASTER_PORT={port} is in use, perhaps by another job; "
                "give this one another: deepspeed --master_port N (torchrun: --master-port N)"
            ) from None
    _wait_for_answer(host, port, limit_s)
    return TCPStore(host, port, None, False, timeout=_REQUEST, wait_for_workers=False)


def _wait_for_answer(host: str, port: int, limit_s: float) -> None:
    started, said, reason = time.monotonic(), False, ""
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:  # a name that is unknown may become known, as in Kubernetes
            reason = error.strerror or str(error)
        waited = time.monotonic() - started
        if waited > limit_s:
            raise UserError(
                f"MASTER_ADDR={host} MASTER_PORT={port}: the first rank did not answer "
                f"{socket.gethostname()} in {limit_s:g} s ({reason}); does this host reach that address, and "
                "did its ranks start?"
            )
        if waited > _SAY_AFTER_S and not said:
            print(f"{socket.gethostname()} waits for the first rank at {host}:{port} ({reason})", flush=True)
            said = True
        time.sleep(0.2)


class Meeting(NamedTuple):
    """Ranks that came together: a name of theirs alone, their store, and who they are, rank by rank."""

    name: str
    store: Store | None
    ranks: list[dict[str, Any]]  # host, pid, place (whose processes can see each other), runs (fingerprint)


def own_facts() -> dict[str, Any]:
    """Return who this process is."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "place": _place(), "runs": fingerprint()}


def meet(store: Store, rank: int, size: int, limit_s: float) -> Meeting:
    """Wait until all ranks are there.

    A launcher that starts ranks again may keep its store, with what earlier ranks wrote: so every process
    signs with a token of its own, and only one that answers is there. Raises UserError, on all ranks, if one
    does not come in time, or runs other code or packages than the first.
    """
    token = uuid.uuid4().hex
    store.set(f"here/{rank}", json.dumps(own_facts() | {"token": token}))
    if rank == 0:
        return _gather(store, size, limit_s)
    answer = json.loads(_read(store, f"met/{token}", limit_s + 10, "the first rank does not answer"))
    meeting = PrefixStore(answer["meeting"], store)
    meeting.set(f"there/{rank}", token)
    verdict = json.loads(_read(meeting, "verdict", limit_s + 10, "the first rank does not answer"))
    if "error" in verdict:
        raise UserError(verdict["error"])
    return Meeting(answer["meeting"], meeting, verdict["ranks"])


def _gather(store: Store, size: int, limit_s: float) -> Meeting:
    name = f"meeting-{uuid.uuid4().hex[:8]}"
    meeting = PrefixStore(name, store)
    started, said, here = time.monotonic(), False, dict[int, dict[str, Any]]()
    while len(here) < size:
        for rank in set(range(size)) - here.keys():
            if not store.check([f"here/{rank}"]):
                continue
            facts = json.loads(store.get(f"here/{rank}"))
            store.set(f"met/{facts['token']}", json.dumps({"meeting": name}))
            answered = rank == 0 or (
                meeting.check([f"there/{rank}"]) and meeting.get(f"there/{rank}").decode() == facts["token"]
            )
            if answered:
                here[rank] = facts
        missing = sorted(set(range(size)) - here.keys())
        waited = time.monotonic() - started
        if missing and waited > limit_s:
            error = f"{_ranks(missing)} of {size} did not come within {limit_s:g} s; there are {_hosts(here)}"
            meeting.set("verdict", json.dumps({"error": error}))
            raise UserError(error)
        if missing and waited > _SAY_AFTER_S and not said:
            print(f"waiting for {_ranks(missing)} of {size}; there are {_hosts(here)}", flush=True)
            said = True
        time.sleep(0.02 if waited < 2 else 0.2)
    ranks = [here[rank] for rank in range(size)]
    for rank, facts in enumerate(ranks):
        if other := differences(ranks[0]["runs"], facts["runs"]):
            hosts = f"host {facts['host']} (rank {rank}) differs from {ranks[0]['host']}"
            error = f"{hosts} (here): {other}"
            meeting.set("verdict", json.dumps({"error": error}))
            time.sleep(2)  # this process holds the store
            raise UserError(error)
    meeting.set("verdict", json.dumps({"ranks": ranks}))
    return Meeting(name, meeting, ranks)


def _read(store: Store, key: str, limit_s: float, what: str) -> bytes:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            if store.check([key]):
                return store.get(key)
        except torch.distributed.DistError:
            raise UserError(f"{what}: it ended while ranks met; its own error says why") from None
        if time.monotonic() > deadline:
            raise UserError(f"{what} within {limit_s:g} s")
        time.sleep(0.02)


def _place() -> str:
    """Return what processes that can see each other have in common: the machine's boot and the container."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def _hosts(here: dict[int, dict[str, Any]]) -> str:
    by_host: dict[str, list[int]] = {}
    for rank, facts in sorted(here.items()):
        by_host.setdefault(facts["host"], []).append(rank)
    return "; ".join(f"{_ranks(ranks)} on {host}" for host, ranks in by_host.items())
