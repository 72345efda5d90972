"""Several hosts on this machine: network, process and mount namespaces, an SSH server and a home folder each.

All of it belongs to one process. When that process ends, the kernel ends every process, network device and mount of
every host. Nothing has a name outside: no `ip netns`, no device on this machine, no mount that others see.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from processes import until

TOOLS = {"sshd": "openssh-server", "rsync": "rsync", "ip": "iproute2", "unshare": "util-linux", "ss": "iproute2"}

# $1 the host's folder, $2 its address, then the folders that stay visible below what is covered. As process 1 of its
# namespace it takes in what Ray's daemons leave, as a real init does.
BOOT = """
set -eu
host=$1 address=$2; shift 2
for kept in "$@"; do
  for covered in /root /tmp; do
    case $kept in $covered/*)
      mkdir -p "$host$covered${kept#$covered}"
      mount --bind "$kept" "$host$covered${kept#$covered}" ;;
    esac
  done
done
mount --rbind "$host/root" /root
mount --rbind "$host/tmp" /tmp
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir -p /run/sshd
hostname "$(basename "$host")"
printf '127.0.0.1 localhost\n%s %s\n' "$address" "$(hostname)" > "$host/hosts"
mount --bind "$host/hosts" /etc/hosts  # Gloo listens where a host's own name leads
ip link set lo up
until ip link show eth0 > /dev/null 2>&1; do sleep 0.05; done
ip address add "$address/24" dev eth0
ip link set eth0 up
ip route add default dev eth0  # leads nowhere; Ray asks it which address is its own
/usr/sbin/sshd -D -e -f "$host/sshd_config" 2> "$host/sshd.log" &
touch "$host/ready"
while :; do wait || true; sleep 1; done
"""

SSHD = """
ListenAddress {address}
HostKey {host}/host_key
AuthorizedKeysFile .ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxSessions 100
Subsystem sftp internal-sftp
"""


def missing() -> str | None:
    """Reason why such hosts cannot be made here; None if they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "namespaces and an SSH server need root on Linux"
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    absent = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool, path=path)})
    if absent:
        return f"not installed: {', '.join(absent)}"
    trial = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--fork", "ip", "link", "add", "trial", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces here: {trial.stderr.strip()}" if trial.returncode else None


def _child(pid: int) -> int | None:
    """The only child of a process; None if it has none yet."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return None
    return int(children[0]) if children else None


class Host:
    """One host: run commands on it, look at its processes, kill it."""

    def __init__(self, lab: "Lab", name: str, address: str) -> None:
        self.name, self.address = name, address
        self.folder = lab.folder / name
        self.home = self.folder / "root"
        for folder in (self.home / ".ssh", self.folder / "tmp"):
            folder.mkdir(parents=True)
        (self.folder / "tmp").chmod(0o1777)
        (self.home / ".bashrc").write_text("# as a distribution brings it\n")
        shutil.copy(lab.key.with_suffix(".pub"), self.home / ".ssh" / "authorized_keys")
        shutil.copy(lab.folder / "host_key", self.folder / "host_key")
        (self.folder / "host_key").chmod(0o600)
        (self.folder / "sshd_config").write_text(SSHD.format(address=address, host=self.folder))
        unshare = ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        boot = ["bash", "-c", BOOT, "boot", str(self.folder), address, *lab.kept]
        self.process = subprocess.Popen(
            ["nsenter", "-t", str(lab.pid), "--net", "--pid", "--mount", *unshare, *boot],
            stdin=subprocess.DEVNULL,
            stdout=(self.folder / "boot.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        below = until(lambda: _child(self.process.pid), name)
        self.pid = until(lambda: _child(below), name)
        until(lambda: Path(f"/proc/{self.pid}/comm").read_text() == "bash\n", name)
        lab.run("ip", "link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        lab.run("ip", "link", "set", f"v-{name}", "master", "switch", "up")
        until((self.folder / "ready").exists, f"{name} ({(self.folder / 'boot.log').read_text()})")

    def command(
        self, *command: object, env: Mapping[str, str] | None = None, folder: Path = Path("/root")
    ) -> list[str]:
        """Make arguments for `subprocess`: that command on this host, with a clean environment."""
        path = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"} | dict(env or {})
        enter = ["nsenter", "-t", str(self.pid), "--net", "--pid", "--mount", "--uts", f"--wdns={folder}"]
        return [*enter, "env", "-i", *(f"{key}={value}" for key, value in variables.items()), *map(str, command)]

    def run(self, *command: object, timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run it to its end; return the finished process with its output."""
        return subprocess.run(
            self.command(*command, **options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def may_connect(self, key: Path) -> None:
        """Give it the key that every host admits."""
        (self.home / ".ssh" / "id_ed25519").write_bytes(key.read_bytes())
        (self.home / ".ssh" / "id_ed25519").chmod(0o600)

    def titles(self) -> list[str]:
        """List the titles of the processes that run on it."""
        return self.run("ps", "-axww", "-o", "command=").stdout.splitlines()

    def kill(self) -> None:
        """End everything on it at once, as when a spot instance is taken back without notice."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(timeout=20)


class Lab:
    """A context manager: a switch and the hosts connected to it. Nothing is left when it ends."""

    def __init__(self, folder: Path, keep: Sequence[str | Path]) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        # what hosts must see although it lies below /root or /tmp, outermost first
        real = {os.path.realpath(path) for path in (folder, *keep, sys.prefix, sys.base_prefix)}
        self.kept = sorted(real | {sys.prefix, sys.base_prefix}, key=len)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.key = self.folder / "key"
        for path in (self.key, self.folder / "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        script = f"mount --bind '{self.folder}' '{self.folder}'; ip link set lo up"
        script += "; ip link add switch type bridge; ip link set switch up; exec sleep infinity"
        unshare = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *unshare, "sh", "-c", script], stdin=subprocess.DEVNULL
        )
        self.pid = until(lambda: _child(self.process.pid), "the switch")
        until(lambda: Path(f"/proc/{self.pid}/comm").read_text() == "sleep\n", "the switch")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(timeout=20)
        for host in self.hosts.values():
            host.process.wait(timeout=20)

    def add(self, name: str, address: str) -> Host:
        """Start a host."""
        self.hosts[name] = Host(self, name, address)
        return self.hosts[name]

    def run(self, *command: str) -> None:
        """Run a command in the namespace of the switch."""
        subprocess.run(["nsenter", "-t", str(self.pid), "--net", *command], check=True)

    def left(self) -> list[str]:
        """List what is still there: processes that see its mounts, and devices that this machine sees.

        Numbers of namespaces are no sign, because the kernel gives them to others as soon as they are free.
        """
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if str(self.folder) in (folder / "mountinfo").read_text():
                    found.append(f"process {folder.name}: {(folder / 'cmdline').read_bytes()!r}")
            except OSError:  # it ended meanwhile
                continue
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        found += [line for line in links.splitlines() if " switch" in line or " v-" in line]
        return found
