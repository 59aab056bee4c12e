# SPDX-License-Identifier: Apache-2.0
"""Edge: the peers that encrypt: ``ssh -L`` and ``ssh -w``, with a server and keys of their own."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from pathlib import Path

from bench.tunnel.namespace import Namespace
from bench.tunnel.plain_routes import DEVICE, HOST, PREFIX, ends_with, said, veth, wait_for_interface
from bench.tunnel.route import ETHERNET_MTU, Candidate, Route, RouteFailed, Tools, Unavailable
from millpond.linux.confinement.userns import has_many_uids

FORWARDED_PORT = "7000"
"""The one port that ``ssh -L`` carries."""

CIPHER = "aes128-gcm@openssh.com"
_INNER_HOST, _INNER_DEVICE = "10.78.0.1", "10.78.0.2"
_LARGEST_MTU = 16000
"""ssh drops packets of half its channel's packet size, 32 KiB, and more."""

_SERVER = """\
Port 22
ListenAddress {address}
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
AllowTcpForwarding yes
PermitTunnel yes
Ciphers {cipher}
"""


def _programs() -> tuple[str, str, str]:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    found = [shutil.which(name, path=path) for name in ("ssh", "sshd", "ssh-keygen")]
    if None in found:
        raise Unavailable("OpenSSH's client and server are not both installed")
    if not has_many_uids():
        raise Unavailable("its server needs root and more than one user")
    ssh, sshd, keygen = found
    assert ssh and sshd and keygen
    return ssh, sshd, keygen


def _connected(tools: Tools, name: str, *wishes: str) -> tuple[Route, subprocess.Popen[bytes]]:
    """Host and device joined by a veth pair, a server on the device, a client with ``wishes`` on the host."""
    ssh, sshd, keygen = _programs()
    keys = tools.scratch / name
    keys.mkdir()
    for key in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(keys / key)], check=True)
    (keys / "sshd_config").write_text(_SERVER.format(address=DEVICE, keys=keys, cipher=CIPHER))
    (keys / "known").write_text(f"{DEVICE} {(keys / 'host.pub').read_text()}")
    Path("/run/sshd").mkdir(exist_ok=True)  # where the server keeps its unprivileged part
    cable = veth(tools, "cable0")
    log = tools.undo.enter_context((keys / "log").open("wb"))
    argv = [sshd, "-D", "-e", "-f", str(keys / "sshd_config")]
    server = ends_with(tools, cable.device.start(argv, stderr=log))
    _wait_for_server(cable.device, server)
    argv = [ssh, "-F", "none", "-N", "-c", CIPHER, "-i", str(keys / "user"), "-o", "BatchMode=yes"]
    argv += [
        "-o",
        f"UserKnownHostsFile={keys}/known",
        "-o",
        "ExitOnForwardFailure=yes",
        *wishes,
        f"root@{DEVICE}",
    ]
    client = ends_with(tools, cable.host.start(argv, stderr=log))
    carriers = (client.pid, server.pid)
    return Route(cable.host, cable.device, "", "127.0.0.1", "127.0.0.1", "cable0", carriers, False), client


def _listens(namespace: Namespace, port: int) -> bool:
    listing = namespace.start(["cat", "/proc/thread-self/net/tcp"])
    table = listing.communicate()[0].decode()
    return any(
        line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
        for line in table.splitlines()[1:]
    )


def _wait_for_server(namespace: Namespace, process: subprocess.Popen[bytes], port: int = 22) -> None:
    deadline = time.monotonic() + 5
    while not _listens(namespace, port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RouteFailed(f"{process.args!r} does not listen: {said(process)}")
        time.sleep(0.02)


def _forwarded_port(tools: Tools) -> Route:
    port = FORWARDED_PORT
    route, client = _connected(tools, "ssh-L", "-L", f"127.0.0.1:{port}:127.0.0.1:{port}")
    _wait_for_server(route.host, client, int(port))
    return route


def _tunnel_device(mtu: int, tools: Tools) -> Route:
    route, client = _connected(tools, f"ssh-w-{mtu}", "-w", "0:0")
    for side, address in ((route.host, _INNER_HOST), (route.device, _INNER_DEVICE)):
        wait_for_interface(side, "tun0", client)
        side.configure("tun0", address, PREFIX, mtu)
    return Route(route.host, route.device, _INNER_HOST, _INNER_DEVICE, _INNER_DEVICE, "tun0", route.carriers)


SSH_PEERS = (
    Candidate("ssh", "ssh -L, aes128-gcm", _forwarded_port),
    Candidate("ssh_w", f"ssh -w, MTU {_LARGEST_MTU}", functools.partial(_tunnel_device, _LARGEST_MTU)),
    Candidate("ssh_w_1500", "ssh -w, MTU 1500", functools.partial(_tunnel_device, ETHERNET_MTU)),
)

__all__ = ["CIPHER", "FORWARDED_PORT", "HOST", "SSH_PEERS"]
