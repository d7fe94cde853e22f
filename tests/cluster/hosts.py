"""Hosts for the multi-host test: each is a set of namespaces with an address, a home, a shared memory and an sshd.

What runs on one sees no process, mount or loopback of another; they meet on a bridge only. Losing power is the death of
a host's first process, a cut cable is a link that is down.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = REPOSITORY / ".venv"
BRIDGE, NETWORK_BITS = "dspark-br", 24
SHARED_MEMORY, TEMPORARY = "1g", "3g"
BOOT_TIMEOUT_S, COMMAND_TIMEOUT_S = 15.0, 120.0
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")  # version 1; a host can be slowed where it is writable

# The first process of a host: private mounts, then an sshd that everything else on the host descends from.
_FIRST_PROCESS = """
set -euo pipefail
interpreter={interpreter}
mount --make-rprivate /
mount -t tmpfs -o size={shared_memory} tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/user
cp {folder}/hosts {folder}/sshd_config {folder}/host_key {folder}/authorized_keys /run/
: > /run/resolv.conf          # nobody answers names here, and every question would wait ten seconds
mount --bind /run/hosts /etc/hosts
mount --bind /run/resolv.conf /etc/resolv.conf
hostname {name}
# The interpreter below the environment may lie in the home that is about to be covered.
case $interpreter in "$HOME"/*)
  below={folder}/home/${{interpreter#"$HOME"/}}
  mkdir -p "$below"; mount --bind "$interpreter" "$below";;
esac
mount --rbind {folder}/home "$HOME"
mount -t tmpfs -o size={temporary} tmpfs /tmp
cd "$HOME"
exec /usr/sbin/sshd -D -e -f /run/sshd_config
"""

_SSHD = """
ListenAddress {address}
HostKey /run/host_key
AuthorizedKeysFile /run/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
MaxStartups 100
MaxSessions 100
PidFile none
Subsystem sftp internal-sftp
"""


@dataclass
class Host:
    """One machine; `name` is also its host name."""

    name: str
    address: str
    folder: Path
    key: Path
    first_process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def link(self) -> str:
        return f"v-{self.name}"

    def ssh(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """What the command prints; raises CalledProcessError with its stderr."""
        options = ["-q", "-i", str(self.key), "-o", "StrictHostKeyChecking=no"]
        options += ["-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=5"]
        target = f"root@{self.address}"
        done = subprocess.run(
            ["ssh", *options, target, f"bash -lc {shlex.quote(command)}"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise HostError(
                f"{self.name}: {command}: exit {done.returncode}: {done.stderr[-2000:]}"
            )
        return done.stdout

    def power_off(self) -> None:
        """Everything on it ends at once, without a word to anybody."""
        assert self.first_process is not None
        self.first_process.kill()
        self.first_process.wait()
        self.first_process = None

    def processes(self) -> list[int]:
        """Ids, as this process sees them, of what runs on the host."""
        if self.first_process is None:
            return []
        # `unshare` waits outside for the first process inside.
        wanted = _namespace(_only_child(self.first_process.pid))
        ids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [i for i in ids if _namespace(i) == wanted]

    def limit_cpu(self, cores: float) -> None:
        """What runs on the host now, and what it starts, shares so many cores from now on."""
        group = CPU_GROUPS / f"dspark-{os.getpid()}-{self.name}"
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_period_us").write_text("20000")
        (group / "cpu.cfs_quota_us").write_text(str(int(20000 * cores)))
        for process in self.processes():
            try:
                (group / "cgroup.procs").write_text(str(process))
            except ProcessLookupError:
                continue  # it has just ended


class HostError(RuntimeError):
    """A host did not do what it was told."""


class Network:
    """Hosts on a bridge, whose own address is that of the machine the cluster is operated from.

    Args:
        folder: where homes and keys lie.
        operator_address: of the bridge.
    """

    def __init__(self, folder: Path, operator_address: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.operator_address = operator_address
        self.key = folder / "key"
        self.hosts: dict[str, Host] = {}
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{operator_address}/{NETWORK_BITS}", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")

    def add(self, name: str, address: str) -> Host:
        """A host that has never been switched on."""
        folder = self.folder / name
        host = self.hosts[name] = Host(name, address, folder, self.key)
        (folder / "home").mkdir(parents=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key"))
        shutil.copy(self.key.with_suffix(".pub"), folder / "authorized_keys")
        (folder / "sshd_config").write_text(_SSHD.format(address=address))
        (folder / "first_process.sh").write_text(
            _FIRST_PROCESS.format(
                name=name,
                folder=folder,
                shared_memory=SHARED_MEMORY,
                temporary=TEMPORARY,
                interpreter=sys.base_prefix,
            )
        )
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", host.link, "master", BRIDGE, "up")
        _run("ip", "-n", name, "addr", "add", f"{address}/{NETWORK_BITS}", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", device, "up")
        _run("ip", "-n", name, "route", "add", "default", "via", self.operator_address)
        return host

    def boot(self, host: Host) -> None:
        """Switch it on and wait until ssh answers; its disk (the home) is as it was left."""
        known = [f"{other.address} {other.name}" for other in self.hosts.values()]
        (host.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known]) + "\n")
        log = (host.folder / "sshd.log").open("ab")
        environment = {"PATH": os.environ["PATH"], "HOME": pwd.getpwuid(0).pw_dir}
        spaces = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = host.folder / "first_process.sh"
        host.first_process = subprocess.Popen(
            ["ip", "netns", "exec", host.name, "unshare", *spaces, "bash", str(script)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self._await_ssh(host)

    def _await_ssh(self, host: Host) -> None:
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while True:
            try:
                host.ssh("true", timeout_s=5)
            except (HostError, subprocess.TimeoutExpired):
                if time.monotonic() > deadline:
                    log = (host.folder / "sshd.log").read_text(errors="replace")
                    raise HostError(f"{host.name} did not come up: {log[-2000:]}") from None
                time.sleep(0.1)
            else:
                return

    def cut(self, host: Host) -> None:
        """Its cable is out; what runs on it goes on."""
        _run("ip", "link", "set", host.link, "down")

    def heal(self, host: Host) -> None:
        _run("ip", "link", "set", host.link, "up")

    def remove(self) -> None:
        """Switch everything off and take it away."""
        for host in self.hosts.values():
            if host.first_process is not None:
                host.power_off()
            _run("ip", "netns", "del", host.name)
            subprocess.run(["ip", "link", "del", host.link], capture_output=True, check=False)
        _run("ip", "link", "del", BRIDGE)
        for group in CPU_GROUPS.glob(f"dspark-{os.getpid()}-*"):
            _remove_group(group)


def _remove_group(group: Path) -> None:
    """Of processes that end: the kernel lets it go with the last of them."""
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    while True:
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def missing() -> str:
    """Why there cannot be hosts on this machine; empty when there can."""
    if os.geteuid() != 0:
        return "not root: network namespaces cannot be made"
    if Path(__file__).resolve().is_relative_to("/tmp"):
        return "this copy of the repository lies in /tmp, and the hosts have a /tmp of their own; put it elsewhere"
    for tool, package in (
        ("ip", "iproute2"), ("/usr/sbin/sshd", "openssh-server"), ("ssh", "openssh-client"),
        ("rsync", "rsync"), ("unshare", "util-linux"),
    ):  # fmt: skip
        if shutil.which(tool) is None:
            return f"{tool} is missing (package {package})"
    tried = subprocess.run(
        [
            "unshare",
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "ip",
            "link",
            "add",
            "probe",
            "type",
            "bridge",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces with bridges here: {tried.stderr.strip()}" if tried.returncode else ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostError(f"{shlex.join(command)}: {done.stderr.strip()}")


def _only_child(process: int) -> int:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(children[0]) if children else process


def _namespace(process: int) -> str:
    try:
        return str(Path(f"/proc/{process}/ns/pid").readlink())
    except OSError:
        return ""
