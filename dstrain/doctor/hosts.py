"""The hosts of a hostfile: reached by ssh, checked there, and compared with this one."""

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.doctor import machine, network
from dstrain.doctor.check import Check, failure, from_json, guarded, ok, on_hosts, summary, warning, worst
from dstrain.fingerprint import REPOSITORY, fingerprint
from dstrain.hosts import ssh

_REACH_S = 20.0
_EXAMINE_S = 300.0
_AT_ONCE = 32

# What processes on other hosts get of this environment, much as the deepspeed launcher gives it. No secrets:
# the values stand in a command line.
_FORWARDED = re.compile(
    r"(NCCL_|GLOO_|TP_|UCX_|TORCH_NCCL_|PYTHON)\w+|HF_HOME|HF_HUB_OFFLINE|HF_HUB_CACHE|HF_DATASETS_CACHE|"
    r"TRANSFORMERS_OFFLINE|DS_ACCELERATOR|DSTRAIN_CACHE|TORCH_EXTENSIONS_DIR|WANDB_MODE|WANDB_BASE_URL|"
    r"MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS"
)


@dataclass
class Host:
    """A line of a hostfile, and what was found there. facts: None if it was not reached."""

    name: str
    slots: int
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, Any] | None = None


def forwarded() -> dict[str, str]:
    """Return the variables of this environment that a process on another host gets."""
    return {key: value for key, value in os.environ.items() if _FORWARDED.fullmatch(key)}


def on_host(host: str, command: Sequence[str], limit_s: float) -> tuple[int | None, str, str]:
    """Run a command on a host, in this folder. Returns status (None: past the limit), stdout, stderr."""
    variables = [f"{name}={value}" for name, value in forwarded().items()]
    line = f"cd {shlex.quote(os.getcwd())} && {shlex.join(['env', *variables, *command])}"
    answer = ssh(host, line, seconds=limit_s)
    return answer.status, answer.out, answer.err


def _unreached(host: str, status: int | None, err: str, limit_s: float) -> Check:
    """Say why a host could not be used, from what ssh or its shell said last."""
    lines = [line for line in err.strip().splitlines() if not line.startswith("Warning:")]
    reason = lines[-1].strip() if lines else "it said nothing"
    if status is None:
        seen = f"{host}: no answer within {limit_s:.0f} s"
        return failure("hosts", seen, f"try: ssh -o BatchMode=yes {host} true")
    if status == 255:  # ssh's own
        remedies = {
            "Permission denied": f"ssh-copy-id {host}: ssh must not ask for a password",
            "Host key verification": f"ssh-keyscan {host} >> ~/.ssh/known_hosts, once you trust it",
            "Could not resolve": "mend the name in the hostfile, in DNS or in /etc/hosts",
            "Connection refused": "start sshd there, or give its port: PDSH_SSH_ARGS_APPEND='-p PORT'",
            "timed out": "look whether the host is up and a firewall lets ssh through",
            "No route": "look whether the host is up and the address right",
        }
        remedy = next((text for words, text in remedies.items() if words in reason), f"try: ssh {host} true")
        return failure("hosts", f"{host}: cannot be reached: {reason}", remedy)
    remedy = f"put code and environment at the same paths there: {os.getcwd()} and {sys.prefix}"
    return failure("hosts", f"{host}: {reason}", remedy)


def examine(hosts: Sequence[Host], request: Mapping[str, Any]) -> None:
    """Reach all hosts and run the checks of one host on each, at once. request: arguments of `one_host`."""

    def one(host: Host) -> None:
        status, _, err = on_host(host.name, ["true"], _REACH_S)
        if status != 0:
            host.checks = [_unreached(host.name, status, err, _REACH_S)]
            return
        asked = json.dumps({**request, "ranks": host.slots, "hosts": len(hosts)})
        status, out, err = on_host(host.name, [sys.executable, "-m", "dstrain.doctor", asked], _EXAMINE_S)
        # A login script may have printed something before.
        answer = next((line for line in reversed(out.splitlines()) if line.startswith('{"checks"')), None)
        if answer is None:
            host.checks = [_unreached(host.name, status, err, _EXAMINE_S)]
            return
        said = json.loads(answer)
        host.checks, host.facts = from_json(said["checks"]), said["facts"]

    def safely(host: Host) -> None:
        found = guarded("hosts", lambda: one(host) or [], _REACH_S + _EXAMINE_S + 30)
        host.checks = host.checks or found

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(safely, hosts))


def identity(config: Path | None) -> dict[str, Any]:
    """Return what must be the same on all hosts: versions, hashes of the code, and of recipe and JSONs."""
    tested = machine.pins((REPOSITORY / "requirements.txt").read_text(encoding="utf-8"))
    recipe = None
    if config is not None:
        file = config / "recipe.yaml" if config.is_dir() else config
        own = sorted(file.parent.glob("*.json")) + sorted(REPOSITORY.glob("ds_configs/*.json"))
        recipe = hashlib.sha256(b"\0".join(one.read_bytes() for one in (file, *own))).hexdigest()[:12]
    runs = fingerprint()
    return {
        "python": runs["python"],
        "packages": machine.installed(list(tested)),
        "code": runs["code"],
        "recipe": recipe,
    }


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what differs between `identity` here and there, and what to do about it."""
    found = []
    if there["python"] != here["python"]:
        found.append(
            (f"Python {there['python']}, here {here['python']}", "make .venv there with the same Python")
        )
    packages = [
        f"{name} {there['packages'].get(name) or 'missing'}, here {version or 'missing'}"
        for name, version in here["packages"].items()
        if there["packages"].get(name) != version
    ]
    if packages:
        found.append(("; ".join(packages), "pip install -r requirements.txt there"))
    if there["code"] != here["code"]:
        remedy = "copy the repository there (rsync -a), or keep it on a shared file system"
        found.append(("another version of train.py or dstrain/ than here", remedy))
    if there["recipe"] != here["recipe"]:
        found.append(
            (
                "another recipe or DeepSpeed JSON than here",
                "copy the recipe there, or keep it on a shared file system",
            )
        )
    return found


def report(hosts: Sequence[Host], here: Mapping[str, Any]) -> list[Check]:
    """Return a line for all hosts that are well, and one for each thing that is not, with its hosts."""
    good, wrong = [], []
    for host in hosts:
        if host.facts is None:
            wrong += [(host.name, check) for check in host.checks]
            continue
        gpus = host.facts["gpus"]
        what = f"{len(gpus)} x {gpus[0]['name']}" if gpus else "CPU"
        # The parts that have something to say do so in lines of their own.
        state = "reached" if worst(host.checks) == "ok" else "reached, see below"
        good.append((host.name, ok("hosts", f"{state}: {what}, slots={host.slots}, {summary(host.checks)}")))
        devices = host.facts["devices"]
        if devices and host.slots > devices:
            seen = f"slots={host.slots}, but {devices} GPUs"
            wrong.append((host.name, failure("hosts", seen, f"write slots={devices} into the hostfile")))
        differs = [failure("same versions", *one) for one in differences(here, host.facts["identity"])]
        wrong += [(host.name, check) for check in differs]
        wrong += [(host.name, check) for check in host.checks if check.state != "ok"]
    reached = [host for host in hosts if host.facts is not None]
    same = [ok("same versions", "Python, packages, code and recipe as here, on every host")]
    if not reached or any(check.name == "same versions" for _, check in wrong):
        same = []
    merged = [_without_own_name(check) for check in on_hosts(wrong)]
    return [*on_hosts(good), *same, *merged]


def _without_own_name(check: Check) -> Check:
    """Leave a line that begins with its host's name as it is: the table would say it twice."""
    if len(check.hosts) == 1 and check.seen.startswith(f"{check.hosts[0]}: "):
        return Check(
            check.name, check.state, check.seen.removeprefix(f"{check.hosts[0]}: "), check.remedy, check.hosts
        )
    return check


def first_address(host: Host) -> str:
    """Return the address of the first host at which all meet: the hostfile's if it is one, else its first."""
    assert host.facts is not None
    if given := os.environ.get("MASTER_ADDR"):
        return given
    outward = [one for one in host.facts["interfaces"] if one["is_up"] and not one["is_inner"]]
    addresses = [
        address for one in outward for address in one["addresses"] if not address.startswith("fe80:")
    ]
    try:
        named = network.resolve(host.name)
    except (OSError, UnicodeError):  # a name that only ~/.ssh/config knows
        named = []
    own = [address for address in named if address in addresses]
    return (own or sorted(addresses, key=lambda address: ":" in address) or [host.name])[0]


def launcher_tools(count: int) -> list[Check]:
    """Check what the deepspeed launcher reaches other hosts with."""
    import shutil

    if count < 2 or shutil.which("pdsh"):
        return []
    remedy = "install the package pdsh, or start each host by itself: launch/multi_node.sh --no_ssh"
    return [warning("hosts", "pdsh is missing here, with which the deepspeed launcher reaches them", remedy)]
