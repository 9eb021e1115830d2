"""What the link between ranks should give, from what hosts say of their GPUs, adapters and interfaces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.doctor.gpu import Gpu, pcie_bytes_s

# Shares of a link's rate below which a measured bus bandwidth is a warning.
NVLINK_SHARE = 0.5
PCIE_SHARE = 0.25  # of one slot: several GPUs share bridges
NETWORK_SHARE = 0.5

# Seconds that one hop of a small all-reduce may take.
HOP_S = {"nvlink": 50e-6, "pcie": 100e-6, "infiniband": 50e-6, "ethernet": 1e-3}


@dataclass(frozen=True)
class Link:
    """The slowest link that a sum over all ranks crosses. bytes_s: one direction, None if not known."""

    kind: str  # loopback, nvlink, pcie, infiniband, ethernet
    words: str
    bytes_s: float | None = None
    share: float = 0.0


def between(
    hosts: Sequence[Mapping[str, Any]], interfaces: Sequence[str | None], *, on_gpu: bool, tcp_only: bool
) -> Link:
    """Return the link between ranks.

    hosts: facts of each host, with `gpus`, `joined`, `nvlink_bytes_s`, `infiniband`, `interfaces`.
    interfaces: the one of each host that leads to the first. tcp_only: NCCL is told to leave InfiniBand.
    """
    if len(hosts) == 1:
        return _inside(hosts[0]) if on_gpu else Link("loopback", "one host, through its memory")
    if on_gpu and not tcp_only:
        rates = [_infiniband(host) for host in hosts]
        if all(rates):
            slowest = min(rate for rate in rates if rate)
            return Link(
                "infiniband", f"InfiniBand, {slowest * 8 / 1e9:g} Gb/s a host", slowest, NETWORK_SHARE
            )
    speeds = [_ethernet(host, name) for host, name in zip(hosts, interfaces, strict=True)]
    names = ", ".join(dict.fromkeys(name or "?" for name in interfaces))
    if all(speeds):
        slowest = min(speed for speed in speeds if speed)
        return Link("ethernet", f"{names}, {slowest * 8 / 1e9:g} Gb/s", slowest, NETWORK_SHARE)
    return Link("ethernet", f"{names}, of unknown rate")


def _inside(host: Mapping[str, Any]) -> Link:
    kinds = list(host["joined"].values())
    gpus = [Gpu(**gpu) for gpu in host["gpus"]]
    if kinds and all(kind.startswith("NV") for kind in kinds):
        rate = min((rate for rate in host["nvlink_bytes_s"] if rate), default=None)
        words = f"NVLink, {rate / 1e9:.0f} GB/s a GPU" if rate else "NVLink"
        return Link("nvlink", words, rate, NVLINK_SHARE)
    rates = [pcie_bytes_s(gpu) for gpu in gpus]
    if gpus and all(rates):
        slowest = min(rate for rate in rates if rate)
        return Link("pcie", f"PCIe, {slowest / 1e9:.0f} GB/s a GPU", slowest, PCIE_SHARE)
    return Link("pcie", "PCIe, whose rate the driver does not tell")


def _infiniband(host: Mapping[str, Any]) -> float:
    return sum((port["gbps"] or 0) * 1e9 / 8 for port in host["infiniband"] if port["state"] == "ACTIVE")


def _ethernet(host: Mapping[str, Any], name: str | None) -> float:
    for one in host["interfaces"]:
        if one["name"] == name and one["mbps"]:
            return one["mbps"] * 1e6 / 8
    return 0.0


def bus_bandwidth(size_bytes: float, seconds: float, ranks: int) -> tuple[float, float]:
    """Return algorithm and bus bandwidth of an all-reduce in bytes/s.

    Bus bandwidth is what each link carries, whatever the number of ranks: 2 (n - 1) / n times the other
    (NVIDIA nccl-tests, doc/PERFORMANCE.md).
    """
    algorithm = size_bytes / seconds
    return algorithm, algorithm * 2 * (ranks - 1) / ranks


def least_latency_limit_s(link: Link, ranks: int) -> float | None:
    """Return the seconds that a small all-reduce may take over a link: 2 (n - 1) hops of a ring."""
    hop = HOP_S.get(link.kind)
    return 2 * (ranks - 1) * hop if hop else None
