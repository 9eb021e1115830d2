"""Several hosts on this machine: namespaces for network, processes and names, an sshd in each, a bridge between."""

import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from running import REPOSITORY, Started, clean_environment

_TOOLS = ("ip", "unshare", "sshd", "ssh", "ssh-keygen", "pdsh")


def missing() -> str | None:
    """Say why this machine cannot be several hosts, or return None."""
    tools = [name for name in _TOOLS if not _find(name)]
    if tools:
        return f"{', '.join(tools)} not installed"
    if os.geteuid() != 0:
        return "making hosts of namespaces needs root"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--uts", "ip", "link", "add", "type", "veth"],
        capture_output=True, text=True,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"no right to make namespaces: {tried.stderr.strip()}"


def _find(name):
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _run(*words):
    subprocess.run([_find(words[0]), *map(str, words[1:])], check=True, capture_output=True, text=True)


@dataclass
class Host:
    """address: what others reach it at. process: `unshare`, whose child is the host's first process."""

    number: int
    address: str
    space: str
    link: str
    process: subprocess.Popen | None = None

    def die(self):
        """Fall silent: all processes gone at once, and no packet says so."""
        _run("ip", "link", "set", self.link, "down")
        self.process.kill()
        self.process.wait()


@dataclass
class Hosts:
    """A set of hosts, reached from the machine itself as from a login host."""

    folder: Path
    hosts: list[Host] = field(default_factory=list)
    tag: str = field(default_factory=lambda: f"{os.getpid() % 10000:x}")

    def start(self, count):
        """Make the hosts and wait until each answers."""
        self.bridge, net = f"dsb{self.tag}", f"10.{190 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "address", "add", f"{net}.1/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")
        Path("/run/sshd").mkdir(exist_ok=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "user")
        for number in range(1, count + 1):
            host = Host(number, f"{net}.{10 + number}", f"ds{self.tag}n{number}", f"dsv{self.tag}n{number}")
            self.hosts.append(host)
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / f"host{number}")
            _run("ip", "netns", "add", host.space)
            _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.space)
            _run("ip", "link", "set", host.link, "master", self.bridge, "up")
            for words in (
                ("address", "add", f"{host.address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
                ("route", "add", "default", "via", f"{net}.1"),
            ):
                _run("ip", "-n", host.space, *words)
        known = [f"{host.address} {self._key(host)}" for host in self.hosts]
        (self.folder / "known_hosts").write_text("".join(known))
        (self.folder / "config").write_text(
            f"Host {net}.*\nIdentityFile {self.folder}/user\nIdentitiesOnly yes\nUser root\n"
            f"UserKnownHostsFile {self.folder}/known_hosts\nStrictHostKeyChecking yes\n"
        )
        names = [f"{host.address} node{host.number}\n" for host in self.hosts]
        (self.folder / "hosts").write_text("".join(["127.0.0.1 localhost\n::1 localhost\n", *names]))
        for host in self.hosts:
            self.revive(host)
        return self

    def _key(self, host):
        return (self.folder / f"host{host.number}.pub").read_text()

    def revive(self, host):
        """Start the first process of a host, its sshd, and wait until it answers."""
        command = [
            *(_find("sshd"), "-D", "-e", "-f", "/dev/null", "-o", f"ListenAddress={host.address}"),
            *("-h", str(self.folder / f"host{host.number}"), "-o", "StrictModes=no", "-o", "UsePAM=no"),
            *("-o", f"AuthorizedKeysFile={self.folder}/user.pub", "-o", "PidFile=none"),
            *("-o", "PermitRootLogin=prohibit-password", "-o", "MaxStartups=100"),
        ]
        _run("ip", "link", "set", host.link, "up")
        # Hosts know one another's names: without that, each question takes a time-out of the name server.
        name = f'hostname node{host.number} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        host.process = subprocess.Popen(
            [
                *("ip", "netns", "exec", host.space, "unshare", "--pid", "--fork", "--kill-child"),
                *("--mount-proc", "--uts", "sh", "-c", name, "sshd", *command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / f"sshd{host.number}.log").open("w"),
            env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
        )
        deadline = time.monotonic() + 30
        while self.on(host, "true").returncode != 0:
            assert time.monotonic() < deadline, (self.folder / f"sshd{host.number}.log").read_text()
            time.sleep(0.2)

    def on(self, host, command, timeout=20):
        """Run a shell command on a host."""
        return subprocess.run(
            ["ssh", "-F", str(self.folder / "config"), "-o", "ConnectTimeout=3", host.address, command],
            capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def processes(self, host):
        """Return the command lines of a host's processes that run this repository."""
        answer = self.on(host, f"pgrep -a -f '[p]ython.*({REPOSITORY}|deepspeed)'")
        return answer.stdout.splitlines()

    def hostfile(self, slots=1, count=None):
        """Write a hostfile of the first hosts."""
        file = self.folder / f"hosts-{count or len(self.hosts)}x{slots}"
        lines = [f"{host.address} slots={slots}  # node{host.number}\n\n" for host in self.hosts[:count]]
        file.write_text("".join(lines))
        return file

    def environment(self, **more):
        """Return an environment in which pdsh and ssh find the hosts."""
        return clean_environment() | {"PDSH_SSH_ARGS_APPEND": f"-F {self.folder}/config"} | more

    def launch(self, recipe, *arguments, slots=1, count=None, cwd=None, **more):
        """Start launch/multi_node.sh, and return its process."""
        command = [str(REPOSITORY / "launch" / "multi_node.sh"), str(recipe)]
        command += ["--hostfile", str(self.hostfile(slots, count)), *map(str, arguments)]
        return Started(command, cwd=cwd or REPOSITORY, env=self.environment(**more))

    def stop(self):
        """Take all of it away."""
        for host in self.hosts:
            if host.process:
                host.process.kill()
                host.process.wait()
            subprocess.run(["ip", "netns", "delete", host.space], capture_output=True)
            subprocess.run(["ip", "link", "delete", host.link], capture_output=True)
        subprocess.run(["ip", "link", "delete", self.bridge], capture_output=True)
