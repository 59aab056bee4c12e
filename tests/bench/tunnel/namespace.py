# SPDX-License-Identifier: Apache-2.0
"""Edge: a network namespace: programs started in it, interfaces set up and counted in it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pyroute2 import IPRoute

from millpond.linux import syscalls
from millpond.linux.network import loopback_up

_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an interface has received and sent, bytes."""

    received: int
    sent: int


class Namespace:
    """It lives as long as its descriptor or a process in it. The caller must have one thread only."""

    def __init__(self) -> None:
        home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        syscalls.unshare(syscalls.CLONE_NEWNET)
        try:
            self.descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            loopback_up()
            self.congestion_control = _choose_congestion_control()
        finally:
            _enter(home)
            os.close(home)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.descriptor)

    @property
    def file(self) -> str:
        """A name of it that other processes of the benchmark can open."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this thread one of the namespace for a while."""
        home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _enter(self.descriptor)
        try:
            yield
        finally:
            _enter(home)
            os.close(home)

    def start(
        self,
        argv: Sequence[str],
        *,
        stdout: int | BinaryIO = subprocess.PIPE,
        stderr: int | BinaryIO = subprocess.PIPE,
        keep: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """A program in this namespace; it keeps the descriptors ``keep``."""
        return subprocess.Popen(
            argv,
            preexec_fn=functools.partial(_enter, self.descriptor),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(keep),
        )

    def configure(self, interface: str, address: str, prefix: int, mtu: int) -> None:
        """Give an interface its address and MTU, and bring it up."""
        with self.entered(), IPRoute() as netlink:
            (index,) = netlink.link_lookup(ifname=interface)
            netlink.addr("add", index=index, address=address, prefixlen=prefix)
            netlink.link("set", index=index, mtu=mtu, state="up")

    def join(self, other: Namespace, interface: str) -> None:
        """A veth pair, called ``interface`` on both sides."""
        with self.entered(), IPRoute() as netlink:
            peer = {"ifname": interface, "net_ns_fd": other.descriptor}
            netlink.link("add", ifname=interface, kind="veth", peer=peer)

    def traffic(self, interface: str) -> Traffic:
        """What its counters say. Raises KeyError if there is none of that name."""
        with self.entered():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
        table = {line.split(":")[0].strip(): line.split(":")[1].split() for line in lines}
        return Traffic(int(table[interface][0]), int(table[interface][8]))


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, syscalls.CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _choose_congestion_control() -> str:
    """Cubic; where only the first network namespace may choose it, Reno, which any may."""
    for name in ("cubic", "reno"):
        with contextlib.suppress(OSError):
            _CONTROL.write_text(name)
            break
    return _CONTROL.read_text().strip()
