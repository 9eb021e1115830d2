"""`NCCL_*` and `*_SOCKET_IFNAME` variables: what they do on this machine, and which contradict it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dstrain.doctor.check import Check, failure, ok, warning
from dstrain.doctor.network import Interface
from dstrain.errors import nearest

# What each does, in a few words; those of NCCL 2.27's manual that people set.
_MEANING = {
    "NCCL_ALGO": "algorithms that may be used",
    "NCCL_PROTO": "protocols that may be used",
    "NCCL_SOCKET_IFNAME": "interfaces for TCP",
    "NCCL_SOCKET_FAMILY": "IPv4 or IPv6",
    "NCCL_SOCKET_NTHREADS": "threads a TCP connection",
    "NCCL_NSOCKS_PERTHREAD": "sockets a thread",
    "NCCL_NET": "network plugin",
    "NCCL_NET_PLUGIN": "network plugin's library",
    "NCCL_NET_GDR_LEVEL": "how near a network card must be for GPUDirect RDMA",
    "NCCL_NET_GDR_READ": "whether GPUs' memory is read directly for sending",
    "NCCL_IB_DISABLE": "1: TCP instead of InfiniBand and RoCE",
    "NCCL_IB_HCA": "InfiniBand adapters that may be used",
    "NCCL_IB_TIMEOUT": "time-out of an InfiniBand packet",
    "NCCL_IB_RETRY_CNT": "how often it is sent again",
    "NCCL_IB_GID_INDEX": "RoCE's address index",
    "NCCL_IB_SL": "InfiniBand service level",
    "NCCL_IB_TC": "InfiniBand traffic class",
    "NCCL_IB_QPS_PER_CONNECTION": "queue pairs a connection",
    "NCCL_IB_PCI_RELAXED_ORDERING": "PCIe ordering",
    "NCCL_IB_ADAPTIVE_ROUTING": "adaptive routing",
    "NCCL_IB_CUDA_SUPPORT": "GPUDirect RDMA (old name)",
    "NCCL_CROSS_NIC": "whether a ring may change cards between hosts",
    "NCCL_P2P_DISABLE": "1: GPUs of a host talk through host memory, not NVLink or PCIe",
    "NCCL_P2P_LEVEL": "how near GPUs must be to talk directly",
    "NCCL_SHM_DISABLE": "1: no shared memory between GPUs without direct access",
    "NCCL_NVLS_ENABLE": "whether NVLink switches may sum",
    "NCCL_COLLNET_ENABLE": "whether network switches may sum (SHARP)",
    "NCCL_BUFFSIZE": "bytes of a buffer between two GPUs",
    "NCCL_NTHREADS": "threads a block",
    "NCCL_MAX_NCHANNELS": "most channels, and so most GPU blocks",
    "NCCL_MIN_NCHANNELS": "fewest channels",
    "NCCL_MAX_CTAS": "most GPU blocks",
    "NCCL_MIN_CTAS": "fewest GPU blocks",
    "NCCL_TOPO_FILE": "topology that is read instead of found",
    "NCCL_TOPO_DUMP_FILE": "file that the topology is written to",
    "NCCL_GRAPH_FILE": "search graph that is read",
    "NCCL_DEBUG": "what NCCL prints",
    "NCCL_DEBUG_FILE": "file that it prints to",
    "NCCL_DEBUG_SUBSYS": "parts of it that print",
    "NCCL_LAUNCH_MODE": "how kernels of several GPUs of a process start",
    "NCCL_CHECKS_DISABLE": "whether arguments are checked",
    "NCCL_CHECK_POINTERS": "whether pointers are checked",
    "NCCL_IGNORE_CPU_AFFINITY": "whether GPUs' own cores are taken whatever the job's are",
    "NCCL_COMM_ID": "address where ranks meet, in place of MASTER_ADDR",
    "NCCL_CONF_FILE": "file with more variables",
    "NCCL_CUMEM_ENABLE": "whether memory comes from cuMem",
    "NCCL_CUMEM_HOST_ENABLE": "the same for host memory",
    "NCCL_DMABUF_ENABLE": "whether GPUDirect RDMA goes through DMA-BUF",
    "NCCL_PXN_DISABLE": "whether another GPU's network card may be used over NVLink",
    "NCCL_MNNVL_ENABLE": "whether NVLink spans hosts",
    "NCCL_TUNER_PLUGIN": "library that picks algorithms",
    "NCCL_WORK_FIFO_DEPTH": "depth of the work queue",
    "NCCL_HOSTID": "what tells hosts apart",
    "NCCL_RAS_ENABLE": "NCCL's own health service",
    "NCCL_VERSION": "not read by NCCL: container images say so which one they hold",
}
_ALGORITHMS = {
    "ring": "rings: best for large sums, slower the more ranks there are",
    "tree": "trees: all-reduce alone, best for small sums over many hosts",
    "collnetchain": "sums in the network's switches, which needs a SHARP plugin",
    "collnetdirect": "sums in the network's switches, which needs a SHARP plugin",
    "nvls": "sums in NVLink switches, which needs Hopper or newer",
    "nvlstree": "NVLink switches in a host and trees between, which needs Hopper or newer",
    "pat": "all-gather and reduce-scatter with one rank a host",
}
_PROTOCOLS = {
    "ll": "8-byte flags: least latency, a quarter to half of the bandwidth",
    "ll128": "128-byte flags: low latency and most of the bandwidth; needs NVLink or certain hosts",
    "simple": "most bandwidth, most latency",
}
_RENAMED = {  # torch's own, which do nothing any more
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}


def variables(environment: Mapping[str, str], machine: Mapping[str, Any], hosts: int = 1) -> list[Check]:
    """Check the NCCL_* variables that are set, and say what each does here.

    machine: `gpus`, `joined` (see `gpu.facts`), and `infiniband` (see `network.infiniband_ports`).
    """
    given = {key: value for key, value in sorted(environment.items()) if key.startswith("NCCL_")}
    if environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if not given:
        return [ok("NCCL", "no NCCL_* variable is set: NCCL chooses by itself")]
    if not machine["gpus"]:
        return [ok("NCCL", f"{', '.join(given)}: no effect, ranks on a CPU use gloo")]
    fine, wrong = [], []
    for key, value in given.items():
        problem = _problem(key, value, machine, hosts)
        if problem:
            wrong.append(problem)
        elif key != "NCCL_SOCKET_IFNAME":  # has a line of its own
            fine.append(f"{key}={value}: {_effect(key, value)}")
    return [*(ok("NCCL", line) for line in fine), *wrong]


def _effect(key: str, value: str) -> str:
    known = {"NCCL_ALGO": _ALGORITHMS, "NCCL_PROTO": _PROTOCOLS}.get(key)
    names = _names(value)
    if known and len(names) == 1 and names[0] in known:
        return f"{'no ' if value.startswith('^') else 'only '}{known[names[0]]}"
    return _MEANING.get(key, "not known here")


def _names(value: str) -> list[str]:
    """Return the names in a list such as `^Tree`, `Ring,Tree` or `allreduce:tree;broadcast:ring`."""
    parts = re.split(r"[,;]", value.lower())
    return [part.rpartition(":")[2].strip().lstrip("^") for part in parts if part.strip()]


def _problem(key: str, value: str, machine: Mapping[str, Any], hosts: int) -> Check | None:
    shown, unset = f"{key}={value}", f"unset {key}"
    if key in _RENAMED:
        return warning("NCCL", f"{shown} does nothing any more", f"{unset}; the name is now {_RENAMED[key]}")
    if key == "TORCH_NCCL_ASYNC_ERROR_HANDLING":
        return warning("NCCL", f"{shown}: ranks wait for ever for one that failed", unset)
    if key not in _MEANING:
        return warning("NCCL", f"{shown}: no such variable is known here{nearest(key, _MEANING)}", unset)
    known = {"NCCL_ALGO": _ALGORITHMS, "NCCL_PROTO": _PROTOCOLS}.get(key)
    if known:
        return _choice(key, value, known, machine, hosts)
    joined, on = machine["joined"].values(), value.strip() not in ("", "0")
    has_nvlink = any(link.startswith("NV") for link in joined)
    active = [port for port in machine["infiniband"] if port["state"] == "ACTIVE"]
    if key == "NCCL_P2P_DISABLE" and on and joined:
        link = "NVLink" if has_nvlink else "PCIe"
        return warning("NCCL", f"{shown}: {link} between GPUs lies idle, all goes through host memory", unset)
    if key == "NCCL_P2P_LEVEL" and value.upper() in ("LOC", "0") and joined:
        return warning("NCCL", f"{shown}: GPUs never talk directly", unset)
    if key == "NCCL_SHM_DISABLE" and on and not has_nvlink:
        return warning("NCCL", f"{shown}: GPUs without direct access talk through the network", unset)
    if key == "NCCL_IB_DISABLE" and on and active:
        rate = sum(port["gbps"] or 0 for port in active)
        return warning("NCCL", f"{shown}: {len(active)} active ports, {rate:g} Gb/s, lie idle", unset)
    if key == "NCCL_NET" and value.upper() == "IB" and not active:
        return failure("NCCL", f"{shown}, but no port is active", f"{unset}, or export NCCL_NET=Socket")
    if key == "NCCL_NET" and value.lower() == "socket" and active:
        return warning("NCCL", f"{shown}: {len(active)} active InfiniBand ports lie idle", unset)
    if key == "NCCL_IB_HCA":
        return _adapters(value, machine["infiniband"])
    if key == "NCCL_NVLS_ENABLE" and on and min(gpu["capability"] for gpu in machine["gpus"]) < 9.0:
        return warning("NCCL", f"{shown}: these GPUs cannot, it needs Hopper or newer", unset)
    if key == "NCCL_DEBUG" and value.upper() in ("INFO", "TRACE"):
        return warning("NCCL", f"{shown}: hundreds of lines a rank", "export NCCL_DEBUG=WARN")
    if key == "NCCL_COMM_ID":
        return warning("NCCL", f"{shown}: ranks meet there and not at MASTER_ADDR", unset)
    return None


def _choice(
    key: str, value: str, known: Mapping[str, str], machine: Mapping[str, Any], hosts: int
) -> Check | None:
    shown, names, excludes = f"{key}={value}", _names(value), value.strip().startswith("^")
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        remedy = f"unset {key}, or some of: {', '.join(known)}"
        what = f"no such one{nearest(unknown[0], known)}" if unknown else "names none"
        return failure("NCCL", f"{shown}: {what}", remedy)
    if excludes:
        return None
    newest = min(gpu["capability"] for gpu in machine["gpus"])
    nvls = [name for name in names if name.startswith("nvls")]
    if nvls and newest < 9.0:
        return failure("NCCL", f"{shown}: NVLink switches that sum need Hopper or newer", f"unset {key}")
    only = set(names)
    if only <= {"nvls", "nvlstree", "collnetchain", "collnetdirect", "tree"} and ":" not in value:
        what = "leaves broadcast without an algorithm" if key == "NCCL_ALGO" else ""
        return warning("NCCL", f"{shown} {what}: NCCL may fail", f"unset {key}, or export {key}={value},Ring")
    if (
        key == "NCCL_PROTO"
        and only == {"ll128"}
        and not any(link.startswith("NV") for link in machine["joined"].values())
    ):
        return warning("NCCL", f"{shown}: without NVLink it may give wrong sums", f"unset {key}")
    if key == "NCCL_PROTO" and only == {"ll"}:
        return warning("NCCL", f"{shown}: {known['ll']}, for sums of any size", f"unset {key}")
    if key == "NCCL_ALGO" and only == {"pat"}:
        return warning("NCCL", f"{shown}: it has no all-reduce", f"unset {key}")
    return None


def _adapters(value: str, ports: Sequence[Mapping[str, Any]]) -> Check | None:
    """Check NCCL_IB_HCA: prefixes of adapters, `=` exact, `^` left out, `:PORT` one port."""
    excludes, text = value.startswith("^"), value.lstrip("^")
    exact, text = text.startswith("="), text.lstrip("=")
    wanted = [part.partition(":")[0] for part in text.split(",") if part]
    devices = sorted({port["device"] for port in ports})

    def matches(name: str, device: str) -> bool:
        return device == name if exact else device.startswith(name)

    missing = [name for name in wanted if not any(matches(name, device) for device in devices)]
    if not missing:
        return None
    there = ", ".join(devices) or "none"
    state = warning if excludes or len(missing) < len(wanted) else failure
    return state(
        "NCCL", f"NCCL_IB_HCA={value}: no adapter {missing[0]}; there are: {there}", "unset NCCL_IB_HCA"
    )


def socket_interfaces(
    environment: Mapping[str, str], found: Sequence[Interface], hosts: int = 1
) -> list[Check]:
    """Check NCCL_SOCKET_IFNAME and its like against the interfaces of this host.

    NCCL takes prefixes, `=` makes them exact, `^` leaves them out; gloo and TensorPipe take exact names.
    """
    checks = []
    for key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = environment.get(key)
        if value is None:
            continue
        chosen = chosen_interfaces(value, found, by_prefix=key.startswith("NCCL"))
        shown, usable = f"{key}={value}", [one for one in found if one.is_up and one.addresses]
        names = ", ".join(one.name for one in usable)
        outward = next((one.name for one in usable if not one.is_inner), "lo")
        remedy = f"export {key}={outward}, or unset it"
        listed = 1 if key.startswith("NCCL") else len(value.split(","))  # gloo needs each that it is given
        if len(chosen) < listed:
            guess = nearest(value.strip("^="), [one.name for one in usable])
            checks.append(failure(key, f"{shown}: no such interface{guess}; there are: {names}", remedy))
        elif not any(one.is_up and one.addresses for one in chosen):
            dead = ", ".join(one.name for one in chosen)
            checks.append(failure(key, f"{shown}: {dead} is down or has no address", remedy))
        elif hosts > 1 and all(one.is_inner for one in chosen if one.is_up and one.addresses):
            checks.append(failure(key, f"{shown}: other hosts cannot be reached through it", remedy))
        else:
            which = ", ".join(f"{one.name} {one.addresses[0]}" for one in chosen if one.addresses)
            checks.append(ok(key, f"{shown}: traffic goes through {which}"))
    return checks


def chosen_interfaces(value: str, found: Sequence[Interface], by_prefix: bool) -> list[Interface]:
    """Return the interfaces that a *_SOCKET_IFNAME selects, in its own rules."""
    if not by_prefix:
        return [one for name in value.split(",") for one in found if one.name == name.strip()]
    excludes, text = value.startswith("^"), value.lstrip("^")
    exact, text = text.startswith("="), text.lstrip("=")
    names = [name.strip() for name in text.split(",") if name.strip()]
    matched = [one for one in found if any(one.name == n if exact else one.name.startswith(n) for n in names)]
    return [one for one in found if one not in matched] if excludes else matched
