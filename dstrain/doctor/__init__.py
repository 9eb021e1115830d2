"""What is wrong before a run: checks of this machine, a recipe, the hosts of a hostfile and real ranks.

`python -m dstrain doctor` prints what `examine` returns.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.doctor import disk, gpu, hosts, machine, nccl, network, ranks, recipe, tracking
from dstrain.doctor.check import Check, as_json, failure, guarded, ok, summary, table, worst
from dstrain.errors import UserError, nearest
from dstrain.hosts import read_hostfile, ssh_command

__all__ = ["GROUPS", "Report", "build_ops", "examine", "one_host"]

_GROUP_S = 900.0  # for all checks of a group
GROUPS = ("machine", "gpu", "disk", "network", "recipe", "tracking", "ranks")


@dataclass
class Report:
    """All that was found. facts: of this host, or of each host by name."""

    checks: list[Check]
    facts: dict[str, Any]

    @property
    def status(self) -> int:
        """Exit status: 1 if something failed; warnings alone are 0."""
        return 1 if worst(self.checks) == "failure" else 0

    def text(self) -> str:
        """Return the table for people."""
        return table(self.checks)

    def json(self) -> dict[str, Any]:
        """Return everything for machines."""
        state, counted = worst(self.checks), summary(self.checks)
        return {"state": state, "summary": counted, "checks": as_json(self.checks), "facts": self.facts}


def examine(
    config: Path | None,
    overrides: Sequence[str],
    hostfile: Path | None,
    count: int | None,
    skip: Sequence[str],
) -> Report:
    """Check this machine, or the hosts of a hostfile, and ranks over them.

    count: ranks to start here; unset, one a GPU, or 2 on a CPU. skip: names of GROUPS.
    Raises UserError for a mistake in the command line, the hostfile, or a recipe that cannot be read.
    """
    for name in skip:
        if name not in GROUPS:
            valid = ", ".join(GROUPS)
            raise UserError(f"command line: --skip {name}: not one of {valid}{nearest(name, GROUPS)}")
    if overrides and config is None:
        raise UserError(f"command line: {overrides[0]!r}: an override needs --config")
    if hostfile is not None:
        if count is not None:
            raise UserError("command line: --ranks and --hostfile: the hostfile's slots say how many")
        listed = [hosts.Host(name, slots) for name, slots in read_hostfile(hostfile)]
        if len(listed) > 1:
            return _several_hosts(listed, config, overrides, skip)
        count = listed[0].slots  # the deepspeed launcher starts these here, without ssh
    if count is None:
        count = gpu.usable([gpu.Gpu(**one) for one in _gpu_facts()["gpus"]]) or 2
    if count < 1:
        raise UserError(f"command line: --ranks {count}: at least 1")
    checks, facts = one_host(config, overrides, ranks=count, world=count, hosts=1, skip=skip)
    if "ranks" not in skip and not any(
        check.name == "libraries" and check.state == "failure" for check in checks
    ):
        on_gpu = not facts["on_cpu"]

        def local() -> list[Check]:
            return _local_ranks(count, facts, on_gpu)

        checks += guarded("barrier", local, 2 * ranks.START_S + 8 * ranks.LIMIT_S)
    return Report(checks, facts)


def _local_ranks(count: int, facts: dict[str, Any], on_gpu: bool) -> list[Check]:
    if count == 1:
        return [ok("barrier", "one rank: there is nobody to wait for")]
    if on_gpu and count > facts["devices"]:
        return [
            failure("barrier", f"{count} ranks on {facts['devices']} GPUs", "lower --ranks, or the slots")
        ]
    ended = ranks.run([ranks.Place("", count)], "127.0.0.1", network.free_port(), on_gpu=on_gpu)
    return ranks.judge(ended, [facts], on_gpu=on_gpu, tcp_only=False)


def _several_hosts(
    listed: list[hosts.Host], config: Path | None, overrides: Sequence[str], skip: Sequence[str]
) -> Report:
    world = sum(host.slots for host in listed)
    if config is not None:
        from dstrain.config import load_recipe

        load_recipe(config, overrides)  # a mistake in it is said once, not by each host
    request = {"config": str(config.absolute()) if config else None, "overrides": list(overrides)}
    hosts.examine(listed, {**request, "world": world, "skip": [*skip, "ranks"]})
    checks = [*hosts.launcher_tools(len(listed)), *hosts.report(listed, hosts.identity(config))]
    facts = {host.name: host.facts for host in listed}
    known = [host for host in listed if host.facts is not None]
    if "ranks" in skip:
        return Report(checks, facts)
    if len(known) < len(listed):
        checks.append(
            failure("barrier", "no ranks were started: not every host can be used", "mend those first")
        )
        return Report(checks, facts)

    def over_all() -> list[Check]:
        on_gpu = all(not host.facts["on_cpu"] for host in known if host.facts)
        places = [ranks.Place(host.name, host.slots, ssh_command(host.name)) for host in known]
        address, port = hosts.first_address(known[0]), known[0].facts["port"] if known[0].facts else 0
        ended = ranks.run(places, address, port, on_gpu=on_gpu, forwarded=hosts.forwarded())
        tcp_only = os.environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
        return ranks.judge(ended, [host.facts or {} for host in known], on_gpu=on_gpu, tcp_only=tcp_only)

    checks += guarded("barrier", over_all, 2 * ranks.START_S + 8 * ranks.LIMIT_S)
    return Report(checks, facts)


def one_host(
    config: Path | None, overrides: Sequence[str], *, ranks: int, world: int, hosts: int, skip: Sequence[str]
) -> tuple[list[Check], dict[str, Any]]:
    """Run all checks of this host. ranks: on it; world: on all hosts. Returns them and the host's facts.

    Raises UserError for a recipe that cannot be read.
    """
    if config is not None:
        from dstrain.config import load_recipe

        load_recipe(config, overrides)
    start = [*guarded("python", machine.python), *guarded("packages", machine.packages)]
    # Importing them takes seconds, and only these two look at them.
    imported = guarded("libraries", machine.libraries, 180) if {"machine", "recipe"} - set(skip) else []
    usable = bool(imported) and imported[0].state == "ok"
    facts = _facts(config)
    facts["devices"] = gpu.usable([gpu.Gpu(**one) for one in facts["gpus"]])
    on_cpu = not facts["devices"]
    if usable:
        from dstrain import distributed

        on_cpu = distributed.on_cpu()
        facts["devices"] = facts["devices"] or (0 if on_cpu else gpu.torch_facts()["count"])
    facts["on_cpu"] = on_cpu
    of_recipe: list[Check] = []
    needs = recipe.Needs()
    if config is not None and usable and "recipe" not in skip:
        found: list[recipe.Needs] = []

        def examined() -> list[Check]:
            checks, known = recipe.examine(config, overrides, world, ranks)
            found.append(known)
            return checks

        of_recipe = guarded("recipe", examined, _GROUP_S)
        needs = found[0] if found else needs
    groups: dict[str, Callable[[], list[Check]]] = {
        "machine": lambda: [*start, *imported, *_machine(needs, config, ranks, on_cpu, usable, facts)],
        "gpu": lambda: _gpu(needs, facts, usable),
        "disk": lambda: _disk(needs),
        "network": lambda: _network(facts, hosts),
        "recipe": lambda: of_recipe,
        "tracking": lambda: _tracking(needs),
    }
    kept = {name: group for name, group in groups.items() if name not in skip}
    # Each check is guarded by itself; this catches what goes wrong between them.
    return [check for name, group in kept.items() for check in guarded(name, group, _GROUP_S)], facts


def _gpu_facts() -> dict[str, Any]:
    """Return the facts of the GPUs; none where nvidia-smi fails or hangs, which a check of its own says."""
    facts: dict[str, Any] = {"gpus": [], "joined": {}, "nvlink_bytes_s": []}
    guarded("facts", lambda: facts.update(gpu.facts()) or [])
    return facts


def _facts(config: Path | None) -> dict[str, Any]:
    """Return what other parts and hosts want to know of this one, as plain values."""
    facts = _gpu_facts() | {"identity": hosts.identity(config), "interfaces": [], "infiniband": []}
    facts["port"] = network.free_port()
    guarded("facts", lambda: facts.update(interfaces=network.facts(network.interfaces())) or [])
    guarded("facts", lambda: facts.update(infiniband=network.infiniband_ports()) or [])
    return facts


def _machine(
    needs: recipe.Needs, config: Path | None, count: int, on_cpu: bool, usable: bool, facts: dict[str, Any]
) -> list[Check]:
    checks = guarded("build tools", lambda: machine.build_tools(bool(needs.nvme_paths)))
    if usable:
        names, command = needed_ops(needs, config is not None, on_cpu), "python -m dstrain doctor --build-ops"
        command += f" --config {config}" if config else ""
        checks += guarded("ops", lambda: machine.compiled_ops(names, command))
    has_ib = any(port["state"] == "ACTIVE" for port in facts["infiniband"])
    pins = "InfiniBand pins what it sends" if has_ib else None
    pins = "offload to NVMe pins its buffers" if needs.nvme_paths else pins
    why = "model states of the ranks here"
    checks += guarded("processor", lambda: machine.processor(count, on_cpu))
    checks += guarded("host memory", lambda: machine.host_memory(needs.host_bytes or None, why))
    checks += guarded("/dev/shm", lambda: machine.shared_memory(count, on_cpu))
    return checks + guarded("pinned memory", lambda: machine.locked_memory(pins))


def needed_ops(needs: recipe.Needs, has_recipe: bool, on_cpu: bool) -> tuple[str, ...]:
    """Return the ops that a recipe needs, or without one the usual ones."""
    from dstrain import ops

    usual = ("cpu_adam", *(ops.NVME if ops.has_libaio() else ()))
    names = needs.ops if has_recipe else usual
    return (*ops.COLLECTIVES, *names) if on_cpu else tuple(names)


def _gpu(needs: recipe.Needs, facts: dict[str, Any], usable: bool) -> list[Check]:
    gpus = [gpu.Gpu(**one) for one in facts["gpus"]]
    checks: list[Check] = []
    if usable:

        def driver() -> list[Check]:
            failed = not gpus and gpu.is_broken()
            return gpu.driver(gpus, gpu.parse_cuda(gpu.ask() or ""), gpu.torch_facts(), failed)

        checks += guarded("GPU driver", driver)
    checks += guarded("GPU memory", lambda: gpu.memory(gpus, needs.device_bytes))
    checks += guarded("precision", lambda: gpu.precision(gpus, needs.precision))
    return checks + guarded("topology", lambda: gpu.topology(facts["joined"], len(gpus)))


def _disk(needs: recipe.Needs) -> list[Check]:
    from huggingface_hub import constants

    default = Path(os.environ.get("DSTRAIN_CACHE") or Path.home() / ".cache" / "dstrain")
    checks = guarded(
        "token cache", lambda: disk.space("token cache", needs.cache_dir or default, "data.cache_dir")
    )
    if needs.uses_hub:
        folder = Path(constants.HF_HUB_CACHE)
        checks += guarded("Hub cache", lambda: disk.space("Hub cache", folder, "HF_HOME"))
    folder, size = needs.output_dir or Path("runs").absolute(), needs.checkpoint_bytes
    checks += guarded(
        "output disk", lambda: disk.space("output disk", folder, "output_dir", size, "its checkpoints")
    )
    for path in needs.nvme_paths:
        checks += guarded("NVMe disk", lambda path=path: disk.nvme(Path(path)))
    return checks


def _network(facts: dict[str, Any], count: int) -> list[Check]:
    found, environment = network.interfaces(), os.environ
    checks = guarded("interfaces", lambda: network.describe(found))
    checks += guarded("environment", lambda: network.launcher_variables(environment))
    checks += guarded("MASTER_ADDR", lambda: network.master_address(environment, found, count))
    checks += guarded("MASTER_PORT", lambda: network.master_port(environment, found))
    checks += guarded("interfaces", lambda: nccl.socket_interfaces(environment, found, count))
    if facts["on_cpu"]:
        checks += guarded("gloo address", lambda: network.gloo_address(environment, found, count))
    checks += guarded("NCCL", lambda: nccl.variables(environment, facts, count))
    return checks + guarded("InfiniBand", lambda: network.infiniband(facts["infiniband"]))


def _tracking(needs: recipe.Needs) -> list[Check]:
    checks = guarded("trackers", lambda: tracking.trackers(needs.report_to)) if needs.report_to else []
    return checks + guarded("W&B", lambda: tracking.wandb(needs.report_to))


def build_ops(config: Path | None, overrides: Sequence[str]) -> dict[str, str]:
    """Build the ops that are not ready, and return the state of each. Raises UserError if a build fails."""
    from dstrain import distributed, ops, request

    distributed.prepare()  # quiets the libraries
    on_cpu = distributed.on_cpu()
    needs = recipe.Needs()
    if config is not None:
        needs = recipe.Needs(ops=request.load(config, overrides, dp_size=1, on_cpu=on_cpu).ds.ops)
    names = needed_ops(needs, config is not None, on_cpu)
    ops.ready(names)
    return {name: ops.state(ops.cache_dir() / name) for name in names}
