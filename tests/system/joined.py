# SPDX-License-Identifier: Apache-2.0
"""Two emulated machines that are joined by a network, and launches over both; an SSH server on one."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.forking import CLI, Command, Result, server

from .processes import descendants
from .support import Emulation, create

PEERS = "10.77.0.0/16"
ADDRESSES = ("192.0.2.1", "192.0.2.2")
HOSTS = f"a={ADDRESSES[0]},b={ADDRESSES[1]}"


@dataclass(frozen=True)
class JoinedHosts:
    """Two hosts with their fleets, each a machine with a network of its own. The remote shell is a program
    that runs the command here, on the fleet of the host that it is given.
    """

    fleets: tuple[Emulation, Emulation]
    rsh: Path

    def words(self, *arguments: str | Path, plain: bool = True) -> tuple[str | Path, ...]:
        """The arguments of a launch over both."""
        options = ("--plain-hosts",) if plain else ()
        return ("launch", "--hosts", HOSTS, "--rsh", str(self.rsh), *options, *arguments)

    def launch(self, *arguments: str | Path, plain: bool = True, timeout: float = 180.0) -> Result:
        """Launch a script over both."""
        return server(CLI).run("millpond", *self.words(*arguments, plain=plain), timeout=timeout)

    def begin(self, *arguments: str | Path) -> Command:
        """Begin a launch over both; who calls it closes it."""
        return server(CLI).start("millpond", *self.words(*arguments))


@contextmanager
def joined(base: Path, devices: Sequence[Sequence[str]]) -> Iterator[JoinedHosts]:
    """Switch two fleets with these devices on, and join their hosts."""
    with ExitStack() as stack:
        fleets = []
        for number, names in enumerate(devices):
            folder = base / "ab"[number]
            folder.mkdir()
            fleet = create(folder, names, network=f"10.77.{number}.0/24", peers=PEERS)
            stack.callback(fleet.stop)
            fleet.start()
            fleets.append(fleet)
        for fleet in fleets:
            fleet.wait_ready(180.0)
        join(fleets)
        yield JoinedHosts((fleets[0], fleets[1]), shell(base))


def join(fleets: Sequence[Emulation]) -> None:
    """Make a wire between the networks of both machines, which goes away with them."""
    first, second = (str(fleet.daemon().pid) for fleet in fleets)
    inside = ["nsenter", "-t", first, "-n", "ip"]
    _run(*inside, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second)
    for pid, address in zip((first, second), ADDRESSES, strict=True):
        inside = ["nsenter", "-t", pid, "-n", "ip"]
        _run(*inside, "addr", "add", f"{address}/24", "dev", "wire")
        _run(*inside, "link", "set", "wire", "up")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def shell(base: Path) -> Path:
    """Write the remote shell of hosts whose machines are in folders of ``base``."""
    program, python = base / "rsh", shlex.quote(sys.executable)
    lines = [
        "#!/bin/sh",
        f'export MILLPOND_FLEET={shlex.quote(str(base))}/"$1"/fleet',
        "shift 2",  # the host, and the name of the command
        f'exec {python} -m millpond.host.main "$@"',
    ]
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o700)
    return program


SSHD = """\
ListenAddress {address}
HostKey {base}/host_key
AuthorizedKeysFile {base}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PidFile none
SetEnv PATH={base}/bin:/usr/bin:/bin MILLPOND_FLEET={base}/b/fleet
"""
SSH = """\
Host b
    HostName {address}
    IdentityFile {base}/key
    IdentitiesOnly yes
    UserKnownHostsFile {base}/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
"""
ON_B = 'mount -t tmpfs run /run && mkdir /run/sshd && exec /usr/sbin/sshd -D -e -f "$0"'


@contextmanager
def ssh_server(hosts: JoinedHosts) -> Iterator[Path]:
    """Run OpenSSH's server on the second host, in its network. Yields the client's configuration, by which
    the first host's 'ssh b' finds it.
    """
    base = hosts.rsh.parent
    for name in ("host_key", "key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{base}/{name}")
    (base / "known_hosts").write_text(f"{ADDRESSES[1]} {(base / 'host_key.pub').read_text()}")
    for name, text in (("sshd_config", SSHD), ("ssh_config", SSH)):
        (base / name).write_text(text.format(base=base, address=ADDRESSES[1]))
    program = base / "bin" / "millpond"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m millpond.host.main "$@"\n')
    program.chmod(0o700)
    argv = ["unshare", "-m", "sh", "-c", ON_B, f"{base}/sshd_config"]
    inside = ["nsenter", "-t", str(hosts.fleets[1].daemon().pid), "-n", *argv]
    with subprocess.Popen(inside, stderr=subprocess.PIPE, text=True) as sshd:
        try:
            assert sshd.stderr
            for line in sshd.stderr:
                if line.startswith("Server listening"):
                    break
            else:
                raise AssertionError("sshd does not listen")
            yield base / "ssh_config"
        finally:
            for each in descendants(sshd.pid):
                each.kill()
