"""The hosts of a run: the hostfile, what each host answers before a start, and the way from one to another.

Standard library only: it runs on every host in a moment. `python -m dstrain check-hosts --hostfile FILE`.
"""

import contextlib
import errno
import ipaddress
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import UserError, nearest
from dstrain.fingerprint import REPOSITORY, differences, fingerprint

_CONNECT_S = 10  # until ssh must have connected
_ANSWER_S = 60.0  # until a host must have answered: Python may start slowly from a shared file system
_NO_PYTHON, _NO_CODE, _NO_FOLDER = 91, 92, 93


@dataclass(frozen=True)
class Answer:
    """What a host said. status: of the remote command, 255 if ssh failed, None if it took too long."""

    host: str
    status: int | None
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last line of its errors, which names the fault."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        return lines[-1] if lines else "no message"


def read_hostfile(file: Path) -> list[tuple[str, int]]:
    """Return (host, slots) of each line `HOST slots=N`, in order. `#` begins a comment.

    Raises UserError with file and line for a line of another form, a host given twice, and no host at all.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"hostfile {file}: cannot be read: {getattr(error, 'strerror', 'no text')}") from None
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{file}:{number}"
        if not re.fullmatch(r"[\w.:@-]+", words[0]) or words[0].startswith("-"):
            raise UserError(f"{where}: {words[0]!r} is no host name or address")
        if len(words) == 1:
            raise UserError(f"{where}: {words[0]!r} has no slots; write: {words[0]} slots=N")
        key, _, value = words[1].partition("=")
        if key != "slots":
            raise UserError(f"{where}: {words[1]!r} is not slots=N{nearest(key, ['slots'])}")
        if not value.isdecimal() or int(value) == 0:
            raise UserError(f"{where}: slots={value!r} is no number of ranks above 0")
        if len(words) > 2:
            raise UserError(f"{where}: {words[2]!r} after slots={value}; a line is: HOST slots=N")
        if words[0] in found:
            raise UserError(f"{where}: {words[0]} is there twice; give it one line with all its slots")
        found[words[0]] = int(value)
    if not found:
        raise UserError(f"hostfile {file}: names no host; a line is: HOST slots=N")
    return list(found.items())


def ssh_command(host: str, *options: str) -> tuple[str, ...]:
    """Return the start of a command on a host, without a question, with the options that pdsh would take."""
    own = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    return ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", *options, *own, host)


def ssh(host: str, command: str, text: str = "", seconds: float = _ANSWER_S) -> Answer:
    """Run a shell command on a host, with `text` as its input, and never ask for a password.

    Raises FileNotFoundError where there is no ssh.
    """
    process = subprocess.Popen(
        [*ssh_command(host, "-o", "ServerAliveInterval=5"), command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a signal to the run is none to its messengers
    )
    try:
        out, err = process.communicate(text, timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what it started, such as a ProxyCommand, as well
        process.communicate()
        return Answer(host, None, "", f"no answer within {seconds:.0f} s")
    return Answer(host, process.returncode, out, err)


def on_all(hosts: Sequence[str], ask: Callable[[str], Answer]) -> list[Answer]:
    """Ask all hosts at once, and return their answers in order."""
    with ThreadPoolExecutor(max(1, min(len(hosts), 64))) as pool:
        return list(pool.map(ask, hosts))


def module_command(module: str, *arguments: str) -> str:
    """Return a shell command that runs a module of this repository on a host."""
    words = [sys.executable, "-m", module, *arguments]
    return f"cd {shlex.quote(str(REPOSITORY))} && exec {shlex.join(words)}"


def check(hosts: Sequence[str], folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Ask each host for what a run needs of it, and return what each said of itself.

    folder: the working directory, which must be there too. Raises UserError, one line for each host that
    cannot be reached, lacks interpreter, repository or folder, or has other versions or code than this one.
    """
    python, code = shlex.quote(sys.executable), shlex.quote(str(REPOSITORY / "train.py"))
    command = f"[ -f {code} ] || exit {_NO_CODE}; [ -x {python} ] || exit {_NO_PYTHON}; "
    if folder:
        command += f"[ -d {shlex.quote(str(folder))} ] || exit {_NO_FOLDER}; "
    command += module_command("dstrain.hosts", "answer")
    own, said, problems = fingerprint(), {}, []
    try:
        answers = on_all(hosts, lambda host: ssh(host, command))
    except FileNotFoundError:
        raise UserError("ssh is missing; install the package 'openssh-client', or use --no_ssh") from None
    for answer in answers:
        problem = _problem(answer, folder)
        if problem is None:
            said[answer.host] = json.loads(answer.out.splitlines()[-1])
            problem = differences(own, said[answer.host]["fingerprint"])
        if problem:
            problems.append(f"host {answer.host}: {problem}")
    if problems:
        raise UserError("\nerror: ".join(problems))
    return said


def called(host: str, said: dict[str, dict[str, Any]]) -> str:
    """Return a host as the hostfile has it, and what it calls itself, as errors of ranks do."""
    name = said[host]["name"]
    return host if name == host else f"{host} ({name})"


def _problem(answer: Answer, folder: Path | None) -> str | None:
    if answer.status == 0:
        return None
    reasons = {
        None: f"cannot be reached by ssh: {answer.last_line}",
        255: f"cannot be reached by ssh: {answer.last_line}",
        _NO_PYTHON: f"no {sys.executable} there; make the same virtual environment at the same path",
        _NO_CODE: f"no {REPOSITORY}/train.py there; put the repository at the same path",
        _NO_FOLDER: f"no folder {folder} there; start from one that all hosts have",
    }
    return reasons.get(answer.status, f"the code in {REPOSITORY} is another there: {answer.last_line}")


def meet(hosts: Sequence[str], said: dict[str, dict[str, Any]], address: str, port: int) -> tuple[str, int]:
    """Return address and port at which rank 0 can listen and every host can reach it.

    hosts: the first is that of rank 0. address: "" for the one that ssh came to. port: 0 for a free one.
    Raises UserError naming the host for an address that is not its own, a taken port, and no way there.
    """
    first = hosts[0]
    address = address or said[first]["address"]
    command = module_command("dstrain.hosts", "listen", address, str(port), str(len(hosts)))
    listener = subprocess.Popen(
        [*ssh_command(first), command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert listener.stdout is not None
        line = listener.stdout.readline().strip()
        if not line.isdecimal():
            all_of_it = ", ".join(said[first]["addresses"])
            raise UserError(f"host {first}: {line or 'no answer'}; its addresses: {all_of_it}")
        command = module_command("dstrain.hosts", "connect", address, line)
        for answer in on_all(hosts, lambda host: ssh(host, command)):
            if answer.status != 0:
                reason = answer.out.strip() or answer.last_line
                raise UserError(
                    f"host {answer.host}: cannot reach rank 0 at {address} port {line}: {reason}; "
                    "a firewall is in between, or --master_addr must name another address"
                )
    finally:
        listener.kill()
        listener.communicate()
    return address, int(line)


def own_address(towards: str) -> str | None:
    """Return this host's address on the way to another address or host name; None if there is no way."""
    with contextlib.suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(towards.strip("[]"), 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing; the system chooses the way
            return probe.getsockname()[0].partition("%")[0]
    return None


def interface_to(address: str) -> str | None:
    """Return the name of this host's network interface towards an address or host name; None if unknown."""
    import psutil

    own = own_address(address)
    if own and ipaddress.ip_address(own).is_loopback and own != address:  # a host's own name for 127.0.1.1
        own = next(iter(_addresses()), own)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in entries):
            return name
    return None


def use_interface(address: str | None) -> None:
    """Let Gloo listen on the interface towards rank 0, unless GLOO_SOCKET_IFNAME names one.

    Left alone, it takes the address that this host's own name stands for, often 127.0.1.1, and the other
    hosts wait for it in vain. Interfaces may have other names on other hosts, so each finds its own.
    """
    name = interface_to(address) if address and not os.environ.get("GLOO_SOCKET_IFNAME") else None
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _addresses() -> list[str]:
    import psutil

    found = [
        entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries
    ]
    plain = []
    for text in found:
        with contextlib.suppress(ValueError):  # a hardware address
            one = ipaddress.ip_address(text)
            if not (one.is_loopback or one.is_link_local):
                plain.append(text)
    return plain


def _answer() -> None:
    """Print this host's fingerprint and addresses, the one that ssh came to first in mind."""
    came_to = (os.environ.get("SSH_CONNECTION", "").split() or [""] * 3)[2]
    addresses = _addresses()
    address = came_to if came_to in addresses else (addresses or ["127.0.0.1"])[0]
    said = {"name": socket.gethostname(), "fingerprint": fingerprint()}
    print(json.dumps(said | {"address": address, "addresses": addresses}))


def _listen(address: str, port: int, times: int) -> None:
    try:
        family, _, _, _, place = socket.getaddrinfo(address.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        print(f"port {port} is in use there" if taken else f"{address} is no address of it", flush=True)
        return
    listener.listen(times)
    print(listener.getsockname()[1], flush=True)
    listener.settimeout(_ANSWER_S)
    for _ in range(times):
        listener.accept()


def _connect(address: str, port: int) -> None:
    try:
        socket.create_connection((address.strip("[]"), port), timeout=_CONNECT_S).close()
    except OSError as error:
        print(error.strerror or error)
        raise SystemExit(1) from None


if __name__ == "__main__":  # on a host, by ssh
    match sys.argv[1:]:
        case ["answer"]:
            _answer()
        case ["listen", where, number, times]:
            _listen(where, int(number), int(times))
        case ["own", towards]:
            print(own_address(towards) or "127.0.0.1")
        case ["connect", where, number]:
            _connect(where, int(number))
