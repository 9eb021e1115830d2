"""This host's network: interfaces, the address and port where ranks meet, InfiniBand."""

import errno
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from dstrain.doctor.check import Check, failure, ok, warning

DEFAULT_PORT = 29500  # of the deepspeed launcher and of torchrun
_REACH_S = 3.0
_RESOLVE_S = 10.0
_PRIVATE_BRIDGES = ("docker", "br-", "virbr", "cni", "flannel", "cali", "podman")


@dataclass(frozen=True)
class Interface:
    """One network interface. mbps: its link rate, None where it has none, as virtual ones."""

    name: str
    addresses: tuple[str, ...]  # without the %scope of link-local ones
    is_up: bool
    mbps: int | None
    is_virtual: bool

    @property
    def is_loopback(self) -> bool:
        """Whether it leads nowhere but to this host."""
        return any(ipaddress.ip_address(address).is_loopback for address in self.addresses)

    @property
    def is_inner(self) -> bool:
        """Whether it is loopback, or a bridge to this host's containers, which other hosts cannot reach."""
        return self.is_loopback or self.name.startswith(_PRIVATE_BRIDGES)


def interfaces(sys_net: Path = Path("/sys/class/net")) -> list[Interface]:
    """Return the interfaces of this host."""
    stats, found = psutil.net_if_stats(), []
    for name, entries in psutil.net_if_addrs().items():
        inet = [e.address.partition("%")[0] for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        is_up = name in stats and stats[name].isup
        is_virtual = not (sys_net / name / "device").exists()
        found.append(Interface(name, tuple(inet), is_up, link_mbps(sys_net / name), is_virtual))
    return found


def link_mbps(folder: Path) -> int | None:
    """Return an interface's rate from its folder in /sys/class/net; where that says -1 or EINVAL, None.

    A veth pair claims 10,000 without being limited by it, so virtual interfaces have no rate here.
    """
    if not (folder / "device").exists():
        return None
    try:
        speed = int((folder / "speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


def facts(found: Sequence[Interface]) -> list[dict[str, Any]]:
    """Return interfaces as plain values."""
    return [asdict(one) | {"is_inner": one.is_inner} for one in found]


def describe(found: Sequence[Interface]) -> Check:
    """Say which interfaces are up, with address and rate; a failure if there is none but loopback."""
    outward = [one for one in found if one.is_up and one.addresses and not one.is_loopback]
    # Those that have only a link-local address lead nowhere by themselves.
    routed = [one for one in outward if not all(a.startswith("fe80:") for a in one.addresses)]
    down = [one.name for one in found if not one.is_up and not one.is_virtual]
    shown = []
    for one in routed or outward:
        rate = f" {one.mbps / 1000:g} Gb/s" if one.mbps else ""
        shown.append(f"{one.name} {one.addresses[0]}{rate}")
    seen = "; ".join(shown[:6]) + (f"; {len(shown) - 6} more" if len(shown) > 6 else "")
    if down:
        seen += f"; down: {', '.join(down)}"
    if not outward:
        return warning(
            "interfaces", "none up but loopback", "this host trains alone: bring one up for several"
        )
    return ok("interfaces", seen)


def resolve(host: str, limit_s: float = _RESOLVE_S) -> list[str]:
    """Return the addresses of a name. Raises OSError if it has none, or no server answers in time."""
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(socket.getaddrinfo(host, None, 0, socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)  # not waited for at the end, as a pool's would be
    thread.start()
    thread.join(limit_s)
    if not answer:
        raise OSError(f"no answer within {limit_s:.0f} s")
    if isinstance(answer[0], Exception):
        raise answer[0]
    return list(dict.fromkeys(str(entry[4][0]) for entry in answer[0]))


def _reach(address: str, port: int, limit_s: float = _REACH_S) -> str | None:
    """Return why no host answers at an address, or None if one does, be it by refusing the connection."""
    try:
        socket.create_connection((address, port), timeout=limit_s).close()
    except ConnectionRefusedError:
        return None  # a host is there, and no run yet
    except TimeoutError:
        return f"no answer within {limit_s:.0f} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def master_address(environment: Mapping[str, str], found: Sequence[Interface], hosts: int = 1) -> list[Check]:
    """Check MASTER_ADDR: an address, of this host or of one that answers, and not loopback for several."""
    name, given = "MASTER_ADDR", environment.get("MASTER_ADDR")
    if given is None:
        return [ok(name, "not set: the launcher chooses it")]
    unset = "unset MASTER_ADDR and let the launcher choose, or set it to an address of the first host"
    if given != given.strip() or not given:
        return [failure(name, f"{given!r} is no address", unset)]
    if given.startswith("[") or given.endswith("]"):
        remedy = f"export MASTER_ADDR={given.strip('[]')}"
        return [warning(name, f"{given!r}: train.py drops the brackets, other programs do not", remedy)]
    if re.fullmatch(r"[^:]+:\d+", given):
        host, _, port = given.partition(":")
        return [failure(name, f"{given!r} has a port", f"export MASTER_ADDR={host} MASTER_PORT={port}")]
    try:
        addresses = resolve(given)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return [failure(name, f"{given!r} cannot be resolved: {reason}", unset)]
    bare = [address.partition("%")[0] for address in addresses]
    if given.lower().startswith("fe80:") and "%" not in given:
        remedy = "add the interface, as in fe80::1%eth0, or better take a global address"
        return [failure(name, f"{given!r} is link-local without its interface", remedy)]
    where = given if bare[0] == given.partition("%")[0] else f"{given} = {', '.join(bare[:3])}"
    if all(ipaddress.ip_address(address).is_loopback for address in bare):
        if hosts > 1:
            return [failure(name, f"{where} is loopback: {hosts} hosts cannot meet there", unset)]
        return [ok(name, f"{where}, this host alone")]
    own = {address for one in found for address in one.addresses}
    if own & set(bare):
        return [ok(name, f"{where}, an address of this host")]
    port = environment.get("MASTER_PORT", "")
    number = int(port) if port.isdigit() and 0 < int(port) < 65536 else DEFAULT_PORT
    reasons = [_reach(address, number) for address in addresses[:3]]
    if all(reasons):
        return [failure(name, f"{where}: {reasons[0]}; no such host, or a firewall is between", unset)]
    return [ok(name, f"{where}, another host, which answers")]


def master_port(environment: Mapping[str, str], found: Sequence[Interface]) -> Check:
    """Check MASTER_PORT, or the launchers' default: a port, and free on this host if ranks meet here."""
    name, given = "MASTER_PORT", environment.get("MASTER_PORT")
    if given is not None and not (given.isdigit() and 0 < int(given) < 65536):
        return failure(name, f"{given!r} is no port", "export MASTER_PORT=29500, or another of 1024 to 65535")
    port = int(given or DEFAULT_PORT)
    if port < 1024 and os.geteuid() != 0:
        return failure(
            name, f"{port} is reserved for root", "export MASTER_PORT=29500, or another above 1023"
        )
    which = str(port) if given else f"not set: {port} by default"
    if not _meets_here(environment, found):
        return ok(name, f"{which}, on another host")
    holder = _holder(port)
    if holder is None:
        return ok(name, f"{which}, free")
    free = free_port()
    remedy = f"end that job, or take another: deepspeed --master_port {free}, torchrun --master-port {free}"
    return (failure if given else warning)(name, f"{which}, in use{holder}", remedy)


def _meets_here(environment: Mapping[str, str], found: Sequence[Interface]) -> bool:
    given = environment.get("MASTER_ADDR")
    if not given:
        return True
    own = {address for one in found for address in one.addresses}
    try:
        return bool(own & set(resolve(given)))
    except (OSError, UnicodeError):
        return False


def _holder(port: int) -> str | None:
    """Return who holds a port, as far as this user may see, or None if it is free."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
                probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return _who(port)
    return None


def _who(port: int) -> str:
    try:
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr[1] == port and one.pid:
                return f" by {psutil.Process(one.pid).name()} (process {one.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def launcher_variables(environment: Mapping[str, str]) -> list[Check]:
    """Warn of a launcher's variables that are left in this shell: `python train.py` would wait for others."""
    left = [f"{key}={environment[key]}" for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if key in environment]
    if not left:
        return []
    remedy = "unset RANK WORLD_SIZE LOCAL_RANK, unless a launcher has just set them for this process"
    return [
        warning("environment", f"{' '.join(left)} set: train.py takes it for one of several ranks", remedy)
    ]


def gloo_address(environment: Mapping[str, str], found: Sequence[Interface], hosts: int) -> list[Check]:
    """Check the address at which gloo (CPU ranks) tells the other hosts to reach this one.

    It is that of the host's own name, unless train.py finds a better one: many systems give it loopback.
    """
    if hosts < 2 or environment.get("GLOO_SOCKET_IFNAME"):
        return []
    own = socket.gethostname()
    outward = [one.name for one in found if one.is_up and one.addresses and not one.is_inner]
    try:
        addresses = resolve(own)
    except (OSError, UnicodeError):
        addresses = []
    if any(not ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return [ok("gloo address", f"{own} = {addresses[0]}")]
    what = "is loopback" if addresses else "cannot be resolved"
    if outward:
        return [
            ok("gloo address", f"{own} {what}: train.py takes the interface that leads to the first rank")
        ]
    remedy = "export GLOO_SOCKET_IFNAME=INTERFACE, one that other hosts reach, or mend /etc/hosts"
    return [warning("gloo address", f"{own} {what}: CPU ranks of other hosts cannot reach it", remedy)]


def infiniband_ports(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, Any]]:
    """Return the ports of InfiniBand and RoCE adapters: device, port, state, physical state, layer, Gb/s."""
    ports = []
    for folder in sorted(root.glob("*/ports/*")):

        def word(name: str, folder: Path = folder) -> str:
            file = folder / name
            return (
                file.read_text().strip().partition(": ")[2] or file.read_text().strip()
                if file.exists()
                else ""
            )

        rate = re.match(r"([\d.]+) Gb/sec", word("rate"))
        ports.append(
            {
                "device": folder.parts[-3],
                "port": int(folder.name),
                "state": word("state"),
                "physical": word("phys_state"),
                "layer": word("link_layer") or "InfiniBand",
                "gbps": float(rate[1]) if rate else None,
            }
        )
    return ports


def infiniband(ports: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Check the links of InfiniBand and RoCE adapters."""
    if not ports:
        return [ok("InfiniBand", "no adapter")]
    active = [port for port in ports if port["state"] == "ACTIVE"]
    others = [port for port in ports if port["state"] != "ACTIVE"]
    named = ", ".join(f"{p['device']}:{p['port']} {p['gbps'] or 0:g} Gb/s {p['layer']}" for p in active[:8])
    wrong = ", ".join(f"{p['device']}:{p['port']} {p['state'] or '?'} ({p['physical']})" for p in others[:8])
    if not others:
        return [ok("InfiniBand", f"active: {named}")]
    waits = any(port["state"] == "INIT" for port in others)
    remedy = (
        "INIT waits for a subnet manager (opensm)" if waits else "look at the cable and the switch's port"
    )
    remedy += "; ibstat shows more; unused ports are left out with NCCL_IB_HCA"
    if not active:
        return [warning("InfiniBand", f"no link: {wrong}; ranks of other hosts are reached by TCP", remedy)]
    return [warning("InfiniBand", f"active: {named}; not: {wrong}", remedy)]
