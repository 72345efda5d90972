"""Several hosts on this machine: network, process and mount namespaces, an SSH server and a home folder each.

All of it belongs to one process: when that ends, the kernel ends every process, network device and mount of every host.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from processes import until

_SPACES = ["--net", "--pid", "--mount"]
_UNSHARE = ["unshare", *_SPACES, "--fork", "--kill-child", "--mount-proc"]
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


def missing():
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "namespaces and an SSH server need root on Linux"
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    absent = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool, path=path)})
    if absent:
        return f"not installed: {', '.join(absent)}"
    command = ["unshare", *_SPACES, "--fork", "ip", "link", "add", "trial", "type", "bridge"]
    trial = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no namespaces here: {trial.stderr.strip()}" if trial.returncode else None


def _child(pid):
    with suppress(FileNotFoundError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return None


class Host:
    def __init__(self, lab, name, address):
        self.name, self.address, self.folder = name, address, lab.folder / name
        self.home = self.folder / "root"
        for folder in (self.home / ".ssh", self.folder / "tmp"):
            folder.mkdir(parents=True)
        (self.folder / "tmp").chmod(0o1777)
        (self.home / ".bashrc").write_text("# as a distribution brings it\n")
        shutil.copy(lab.key.with_suffix(".pub"), self.home / ".ssh" / "authorized_keys")
        shutil.copy(lab.folder / "host_key", self.folder / "host_key")
        (self.folder / "host_key").chmod(0o600)
        (self.folder / "sshd_config").write_text(SSHD.format(address=address, host=self.folder))
        boot = [*_UNSHARE, "--uts", "bash", "-c", BOOT, "boot", str(self.folder), address, *lab.kept]
        output = {"stdout": (self.folder / "boot.log").open("w"), "stderr": subprocess.STDOUT}
        command = ["nsenter", "-t", str(lab.pid), *_SPACES, *boot]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **output)
        below = until(lambda: _child(self.process.pid), name)
        self.pid = until(lambda: _child(below), name)
        until(lambda: Path(f"/proc/{self.pid}/comm").read_text() == "bash\n", name)
        lab.run("ip", "link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        lab.run("ip", "link", "set", f"v-{name}", "master", "switch", "up")
        until((self.folder / "ready").exists, f"{name} ({(self.folder / 'boot.log').read_text()})")

    def command(self, *command, env=None, folder=Path("/root")):
        """Make arguments for `subprocess`: that command on this host, with a clean environment."""
        path = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"} | dict(env or {})
        enter = ["nsenter", "-t", str(self.pid), *_SPACES, "--uts", f"--wdns={folder}"]
        return [*enter, "env", "-i", *(f"{key}={value}" for key, value in variables.items()), *map(str, command)]

    def run(self, *command, timeout=300, **options):
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.run(self.command(*command, **options), **streams, timeout=timeout, check=False)

    def may_connect(self, key):
        (self.home / ".ssh" / "id_ed25519").write_bytes(key.read_bytes())
        (self.home / ".ssh" / "id_ed25519").chmod(0o600)

    def titles(self):
        return self.run("ps", "-axww", "-o", "command=").stdout.splitlines()

    def kill(self):
        """End everything on it at once, as when a spot instance is taken back without notice."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(timeout=20)


class Lab:
    """A context manager: a switch and the hosts connected to it. Nothing is left when it ends."""

    def __init__(self, folder, keep):
        self.folder, self.hosts = folder, {}
        # what hosts must see although it lies below /root or /tmp, outermost first
        real = {os.path.realpath(path) for path in (folder, *keep, sys.prefix, sys.base_prefix)}
        self.kept = sorted(real | {sys.prefix, sys.base_prefix}, key=len)

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.key = self.folder / "key"
        for path in (self.key, self.folder / "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        script = f"mount --bind '{self.folder}' '{self.folder}'; ip link set lo up"
        script += "; ip link add switch type bridge; ip link set switch up; exec sleep infinity"
        command = ["setpriv", "--pdeathsig", "KILL", *_UNSHARE, "sh", "-c", script]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.pid = until(lambda: _child(self.process.pid), "the switch")
        until(lambda: Path(f"/proc/{self.pid}/comm").read_text() == "sleep\n", "the switch")
        return self

    def __exit__(self, kind, error, trace):
        self.process.kill()
        self.process.wait(timeout=20)
        for host in self.hosts.values():
            host.process.wait(timeout=20)

    def add(self, name, address):
        self.hosts[name] = Host(self, name, address)
        return self.hosts[name]

    def run(self, *command):
        subprocess.run(["nsenter", "-t", str(self.pid), "--net", *command], check=True)

    def left(self):
        """List what is still there: processes that see its mounts, and devices that this machine sees."""
        processes = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile
                if str(self.folder) in (folder / "mountinfo").read_text():
                    processes.append(f"process {folder.name}: {(folder / 'cmdline').read_bytes()!r}")
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        return processes + [line for line in links.splitlines() if " switch" in line or " v-" in line]
