# SPDX-License-Identifier: Apache-2.0
"""Edge: the peers without encryption: loopback, veth, the C relay between two TUNs, socat."""

from __future__ import annotations

import functools
import select
import shutil
import subprocess
import time
from collections.abc import Callable

from bench.tunnel.namespace import Namespace
from bench.tunnel.route import ETHERNET_MTU, MAX_MTU, Candidate, Route, RouteFailed, Tools, Unavailable

HOST, DEVICE, PREFIX = "10.77.0.1", "10.77.0.2", 30
_VNET_HEADER = "12"
_ALL_OFFLOADS, _NO_OFFLOADS = "7", "0"
_STARTS_WITHIN = 5.0


def two_namespaces(tools: Tools) -> tuple[Namespace, Namespace]:
    """The host's and the device's."""
    pair = Namespace(), Namespace()
    for namespace in pair:
        tools.undo.callback(namespace.close)
    return pair


def ends_with(tools: Tools, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """The process, which is killed when the routes are undone."""

    def end() -> None:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()

    tools.undo.callback(end)
    return process


def said(process: subprocess.Popen[bytes]) -> str:
    """The last that a process which has ended had to say."""
    text = process.stderr.read().decode(errors="replace") if process.stderr else ""
    return (text.strip().splitlines() or [f"exit code {process.returncode}"])[-1]


def wait_for_line(process: subprocess.Popen[bytes], seconds: float = _STARTS_WITHIN) -> None:
    """Until it has printed its first line. Raises RouteFailed."""
    assert process.stdout
    if not select.select([process.stdout], [], [], seconds)[0]:
        raise RouteFailed(f"{process.args!r}: silent for {seconds} s")
    if not process.stdout.readline():
        process.wait()
        raise RouteFailed(said(process))


def wait_for_interface(namespace: Namespace, name: str, process: subprocess.Popen[bytes]) -> None:
    """Until ``process`` has made it. Raises RouteFailed."""
    deadline = time.monotonic() + _STARTS_WITHIN
    while True:
        try:
            namespace.traffic(name)
            return
        except KeyError:
            if process.poll() is not None:
                raise RouteFailed(said(process)) from None
            if time.monotonic() > deadline:
                raise RouteFailed(f"{process.args!r}: no interface within {_STARTS_WITHIN} s") from None
        time.sleep(0.02)


def _loopback(tools: Tools) -> Route:
    namespace = Namespace()
    tools.undo.callback(namespace.close)
    return Route(namespace, namespace, "127.0.0.1", "127.0.0.1", "127.0.0.1", "lo")


def veth(tools: Tools, interface: str = "veth0") -> Route:
    """Two namespaces joined by the kernel's own virtual cable."""
    host, device = two_namespaces(tools)
    host.join(device, interface)
    host.configure(interface, HOST, PREFIX, ETHERNET_MTU)
    device.configure(interface, DEVICE, PREFIX, ETHERNET_MTU)
    return Route(host, device, HOST, DEVICE, DEVICE, interface)


def _relay(mtu: int, offloads: str, threads: str, tools: Tools) -> Route:
    host, device = two_namespaces(tools)
    argv = [str(tools.relay), device.file, "relay0", _VNET_HEADER, offloads, threads]
    process = ends_with(tools, host.start(argv))
    wait_for_line(process)
    host.configure("relay0", HOST, PREFIX, mtu)
    device.configure("relay0", DEVICE, PREFIX, mtu)
    return Route(host, device, HOST, DEVICE, DEVICE, "relay0", (process.pid,))


def _relayed(mtu: int, offloads: str = _ALL_OFFLOADS, threads: str = "1") -> Callable[[Tools], Route]:
    return functools.partial(_relay, mtu, offloads, threads)


def _socat(mtu: int, tools: Tools) -> Route:
    """Over a Unix socket that keeps packets apart; a byte stream would not."""
    socat = shutil.which("socat")
    if socat is None:
        raise Unavailable("socat is not installed")
    host, device = two_namespaces(tools)
    socket = tools.scratch / f"socat-{mtu}"
    tun, carriers = "TUN,tun-name=socat0,iff-no-pi", []
    for namespace, address in (
        (device, f"UNIX-LISTEN:{socket},type=5"),
        (host, f"UNIX-CONNECT:{socket},type=5"),
    ):
        process = ends_with(tools, namespace.start([socat, "-b", "131072", tun, address]))
        wait_for_interface(namespace, "socat0", process)
        time.sleep(0.1)  # it makes the interface first and listens after that
        carriers.append(process.pid)
    host.configure("socat0", HOST, PREFIX, mtu)
    device.configure("socat0", DEVICE, PREFIX, mtu)
    return Route(host, device, HOST, DEVICE, DEVICE, "socat0", tuple(carriers))


PLAIN_PEERS = (
    Candidate("loopback", "loopback", _loopback),
    Candidate("veth", "veth pair, TSO", veth),
    Candidate("relay", "C relay, MTU 65520", _relayed(MAX_MTU)),
    Candidate("relay_threads", "C relay, two threads, MTU 65520", _relayed(MAX_MTU, threads="2")),
    Candidate("relay_1500", "C relay, MTU 1500 GSO", _relayed(ETHERNET_MTU)),
    Candidate("relay_1500_plain", "C relay, MTU 1500", _relayed(ETHERNET_MTU, _NO_OFFLOADS)),
    Candidate("socat", "socat, MTU 65520", functools.partial(_socat, MAX_MTU)),
    Candidate("socat_1500", "socat, MTU 1500", functools.partial(_socat, ETHERNET_MTU)),
)
