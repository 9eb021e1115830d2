"""Start train.py on several hosts with the deepspeed launcher and pdsh, end it everywhere, leak no secret.

`launch/multi_node.sh` runs it. pdsh writes what it is given into a command line on each host, which every
user there can read and a shell splits again. So the arguments of train.py, secrets, and values with quotes
or spaces go another way: by ssh's standard input into files of mode 600, one a rank, which the rank removes
as it starts.
"""

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from dstrain import hosts as at
from dstrain.control import PREEMPTED
from dstrain.errors import UserError
from dstrain.failure import DIED

# What a rank needs from the shell that started the run. DeepSpeed carries PYTHON*, MLFLOW*, UCX*, NCCL*.
_CARRIED = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|WANDB|MLFLOW|NCCL|GLOO|TP|UCX|FI|CUDA|NVIDIA|OMP|MKL|KMP|TORCH|PYTORCH"
    r"|TORCHINDUCTOR|DSTRAIN|DS|DEEPSPEED|TRITON|TOKENIZERS|AWS|S3|GOOGLE|AZURE)_|PYTHON"
    r"|LD_LIBRARY_PATH$|(HTTPS?|NO|ALL)_PROXY$|TOKENIZERS_PARALLELISM$",
    re.IGNORECASE,
)
_NOT_CARRIED = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")  # the launcher's own business on each host
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_NO_SECRET = ("TOKENIZERS_PARALLELISM",)
_HARMLESS = re.compile(r"[\w@%+=:,./-]*")  # what DeepSpeed and a shell leave as it is
_LOST = re.compile(r"pdsh@\S+: (\S+): ssh exited with exit code (\d+)")
# DeepSpeed passes no log level on to the hosts. Its errors say which process ended how, as the ranks do.
_CHATTER = re.compile(r"\[(INFO|ERROR)\] \[launch\.py:|accelerator.*unable to detect it")
_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"  # a dead host is noticed after 15 s
_FAILED_S = 10.0  # what ranks on other hosts get to say what they saw, once one host has failed
_LOST_S = 3.0  # the same, once a host is gone: they wait for it and have nothing to say
_SSH_FAILED = 255
# pdsh gives each ssh a session of its own, so they are no part of the launcher's process group.
_KILL_TREE = 'all=$(pgrep -g "$1"); kill -KILL $(for one in $all; do pgrep -P "$one"; done) $all 2>/dev/null'
_SAVE_S = 60  # what ranks get that have lost their launcher, to save
_SAME_S = 2.0


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the ranks on other hosts need."""
    return {
        name: value
        for name, value in environment.items()
        if _CARRIED.match(name) and name not in _NOT_CARRIED and name != "DSTRAIN_RUN"
    }


def is_private(name: str, value: str) -> bool:
    """Whether a variable must stay out of command lines.

    Its name (KEY, TOKEN, SECRET, PASSWORD) or a user in a URL tells of a secret, or a shell would change it.
    """
    secret = _SECRET.search(name) and name not in _NO_SECRET
    return bool(secret or re.search(r"://[^/\s]*@", value) or not _HARMLESS.fullmatch(value))


def users_own() -> dict[str, str]:
    """Return the variables of the user's .deepspeed_env, in the home and the working directory.

    Blank lines and comments, of which the launcher dies, are passed over. Raises UserError for another line.
    """
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    found = {}
    for file in dict.fromkeys((Path.home() / name, Path(name).absolute())):
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                key, equals, value = line.strip().removeprefix("export ").partition("=")
                if not equals or not re.fullmatch(r"[A-Za-z_]\w*", key.strip()):
                    raise UserError(f"{file}:{number}: {line.strip()!r} is not NAME=value")
                value = value.strip()
                quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
                found[key.strip()] = value[1:-1] if quoted else value
    return found


class _Asked:
    """Signals to this process: the first asks the ranks to save and end, one after it to end at once."""

    def __init__(self) -> None:
        self.times, self._last = 0, -_SAME_S
        for name in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(name, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._last > _SAME_S:  # a terminal and a script pass on the same one
            self.times += 1
        self._last = time.monotonic()


def run(hostfile: Path, address: str, port: int, recipe: str, arguments: Sequence[str]) -> int:
    """Check the hosts, run train.py on all of them once, and return the status of the first host that failed.

    Raises UserError, before anything is started, for what is wrong with the hostfile or a host.
    """
    slots = at.read_hostfile(hostfile)
    names = [host for host, _ in slots]
    asked = _Asked()
    said = at.check(names, Path.cwd())
    address, port = at.meet(names, said, address, port)
    variables = carried(os.environ) | users_own()
    private = {name: value for name, value in variables.items() if is_private(name, value)}
    plain = {name: value for name, value in variables.items() if name not in private}
    if asked.times:
        return PREEMPTED
    ticket = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="dstrain-launch-") as folder:
        hosts = Path(folder, "hostfile")  # without the comments that DeepSpeed takes for errors
        hosts.write_text("".join(f"{host} slots={number}\n" for host, number in slots), encoding="utf-8")
        file = Path(folder, "deepspeed_env")
        lines = [f"{name}={value}\n" for name, value in (plain | {"DSTRAIN_RUN": ticket}).items()]
        file.write_text("".join(lines), encoding="utf-8")
        command = [
            *(str(Path(sys.executable).parent / "deepspeed"), "--log_level", "error", "--force_multi"),
            *("--hostfile", str(hosts), "--no_ssh_check"),
            *("--master_addr", address, "--master_port", str(port)),
            *("--no_local_rank", str(at.REPOSITORY / "launch" / "rank.py"), ticket),
        ]
        on = ", ".join(at.called(name, said) for name in names)
        ranks = sum(number for _, number in slots)
        print(
            f"{ranks} ranks on {on}; rank 0 at {address}:{port}",
            flush=True,
        )
        environment = {name: value for name, value in os.environ.items() if name not in private}
        if not shutil.which("nvidia-smi"):
            environment["DS_ACCELERATOR"] = "cpu"  # the launcher here warns when it finds no GPU
        environment["PDSH_SSH_ARGS_APPEND"] = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {_ALIVE}".strip()
        failed: list[tuple[str, int]] = []
        try:
            _send(slots, ticket, {"environment": private, "arguments": ["--config", recipe, *arguments]})
            return _follow(command, environment | {"DS_ENV_FILE": str(file)}, names, ticket, asked, failed)
        finally:
            # Ranks whose launcher was killed notice it at their next step, save and end.
            for answer in _tell(_reached(names, failed), "end", ticket, str(_SAVE_S)):
                if answer.status != 0:
                    print(f"error: host {answer.host}: cannot be asked: {answer.last_line}", file=sys.stderr)
                elif answer.out.strip():
                    print(f"host {answer.host}: {answer.out.strip()}", file=sys.stderr)


def _send(slots: Sequence[tuple[str, int]], ticket: str, order: Mapping[str, object]) -> None:
    """Put a file for each rank on its host. Raises UserError naming the host that does not take it."""
    first, places = 0, {}
    for host, number in slots:
        places[host] = [str(rank) for rank in range(first, first + number)]
        first += number
    text = json.dumps(order)

    def send(host: str) -> at.Answer:
        return at.ssh(host, at.module_command("dstrain.on_host", "receive", ticket, *places[host]), text)

    for answer in at.on_all(list(places), send):
        if answer.status != 0:
            raise UserError(f"host {answer.host}: does not take its order: {answer.last_line}")


def _tell(names: Sequence[str], *words: str) -> list[at.Answer]:
    command = at.module_command("dstrain.on_host", *words)
    return at.on_all(names, lambda host: at.ssh(host, command, seconds=_SAVE_S + 25))


def _reached(names: Sequence[str], failed: Sequence[tuple[str, int]]) -> list[str]:
    """Leave out the hosts that ssh has lost."""
    lost = {host for host, status in failed if status == _SSH_FAILED}
    return [name for name in names if name not in lost]


def _follow(
    command: Sequence[str],
    environment: Mapping[str, str],
    names: Sequence[str],
    ticket: str,
    asked: _Asked,
    failed: list[tuple[str, int]],
) -> int:
    """Run the launcher, pass signals on, and end all hosts soon after one has `failed`."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes to us alone: DeepSpeed ends all jobs of this user on the hosts
    )
    # If this process is killed, so is the launcher; the ranks then notice that their ssh is gone.
    guard = subprocess.Popen(
        ["sh", "-c", f"read -r _; {_KILL_TREE}", "guard", str(process.pid)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )

    def relay(source: IO[str], screen: TextIO) -> None:
        for line in source:
            if found := _LOST.match(line):
                failed.append((found[1], int(found[2])))
            elif not _CHATTER.search(line):
                print(line, end="", file=screen, flush=True)

    assert process.stdout is not None
    assert process.stderr is not None
    streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    readers = [threading.Thread(target=relay, args=stream, daemon=True) for stream in streams]
    for reader in readers:
        reader.start()
    told, deadline = 0, None
    while process.poll() is None:
        time.sleep(0.2)
        if asked.times > told:
            answers = _tell(names, *(("end", ticket, "0") if told else ("signal", ticket)))
            told += any(answer.out.strip() for answer in answers)  # else no rank is there yet: once more
        if failed and deadline is None:
            host, status = failed[0]
            if status == _SSH_FAILED:
                print(f"error: host {host}: the connection to it was lost; ending the run", file=sys.stderr)
            deadline = time.monotonic() + (_LOST_S if status == _SSH_FAILED else _FAILED_S)
        if deadline and time.monotonic() > deadline:
            _tell(_reached(names, failed), "end", ticket, "3")
            time.sleep(2)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    guard.kill()
    guard.communicate()
    for reader in readers:
        reader.join(5)
    if failed:
        return DIED if failed[0][1] == _SSH_FAILED else failed[0][1]
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an action of the scripts in launch/."""
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    start = actions.add_parser("run")
    start.add_argument("--hostfile", type=Path, required=True)
    start.add_argument("--master_addr", default="")
    start.add_argument("--master_port", type=int, default=0)
    start.add_argument("recipe")
    start.add_argument("arguments", nargs=argparse.REMAINDER)
    for name in ("hostfile", "meet"):
        actions.add_parser(name).add_argument("--hostfile", type=Path, required=True)
    actions.add_parser("names")
    args = parser.parse_args(arguments)
    if args.action == "run":
        return run(args.hostfile, args.master_addr, args.master_port, args.recipe, args.arguments)
    if args.action == "hostfile":
        print("".join(f"{host} slots={number}\n" for host, number in at.read_hostfile(args.hostfile)), end="")
    elif args.action == "meet":
        names = [host for host, _ in at.read_hostfile(args.hostfile)]
        print(*at.meet(names, at.check(names, Path.cwd()), "", 0))
    else:
        print("\n".join(carried(os.environ)))
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.status
    raise SystemExit(status)
