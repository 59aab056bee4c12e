# SPDX-License-Identifier: Apache-2.0
"""A peer that breaks the protocol loses its own link; the endpoint lives on and serves an honest one."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, VersionMismatch
from millpond.linux import sockets
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.handshake import open_as_device, open_as_host
from millpond.tunnel.ring.layout import RECV, SEND, Layout
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.transports.memfd import MemfdConnector, MemfdListener
from millpond.tunnel.transports.ring_connection import RingConnection

SQE = struct.Struct("<BBHIQQQQIIIIII")
CQE_BODY = struct.Struct("<IIHHH")


def meet(ready: Callable[[], bool]) -> None:
    """Waiting by looking again and again."""
    deadline = Deadline.after(30)
    while not ready():
        assert not deadline.passed
        time.sleep(0.001)


def join(path: Path) -> RingConnection:
    """As the host: connect to the device end that is about to listen at ``path``."""
    deadline = Deadline.after(30)
    while True:
        try:
            return MemfdConnector(path).join()
        except (ConnectionLost, TimeoutError):  # it does not listen yet, or is slow
            assert not deadline.passed
            time.sleep(0.01)


def open_link(path: Path) -> RingConnection:
    """As the host: a link to the device end, open."""
    link = join(path)
    open_as_host(link.region, LinkParameters(name="mallory"), meet)
    return link


def test_a_wrong_command_resets_the_link(pair: Any) -> None:
    device = pair.device_side.end("device", pair.socket)
    with open_link(pair.socket) as link:
        device.wait_up()
        memory = link.region.queue(SEND, 32)
        address = Layout(32).buffers(SEND).start
        SQE.pack_into(memory.submissions, 0, 0x01, 0, 0, 0, 0, 0, address, 0, 60, 0, 0, 0, 0, 0)
        memory.tail_doorbell[0] = 1
        os.eventfd_write(link.notifiers[SEND].descriptor, 1)
        assert device.wait_down("opcode")["resets"] == 1
        assert select.select([link.gone], [], [], 30)[0], "the hostile host was not cut off"
    pair.host_side.end("host", pair.socket).wait_up()
    assert device.wait_up(after=1)["resets"] == 1


def accept(listener: MemfdListener) -> RingConnection:
    """As the device: the next host."""
    readable = listener.readiness()
    assert readable is not None and select.select([readable], [], [], 30)[0]
    return listener.join()


def test_a_wrong_completion_resets_the_link(pair: Any, undo: ExitStack) -> None:
    listener = MemfdListener(pair.socket, 32)
    undo.callback(listener.close)
    host = pair.host_side.end("host", pair.socket)
    with accept(listener) as link:
        open_as_device(link.region, LinkParameters(name="mallory"), meet)
        host.wait_up()
        memory = link.region.queue(RECV, 32)
        meet(lambda: memory.tail_doorbell[0] == 31)
        CQE_BODY.pack_into(memory.completions, 0, 60, 0, 1, RECV, 999)
        memory.completions.cast("H")[7] = 1
        os.eventfd_write(link.notifiers[RECV].descriptor, 1)
        assert host.wait_down("not in flight")["resets"] == 1
    listener.close()
    pair.device_side.end("device", pair.socket)
    assert host.wait_up(after=1)["resets"] == 1


def test_another_version_is_named_at_both_ends(pair: Any, undo: ExitStack) -> None:
    device = pair.device_side.end("device", pair.socket)
    with join(pair.socket) as link, pytest.raises(VersionMismatch, match="speaks protocol 1, this side 2"):
        open_as_host(link.region, replace(LinkParameters(), version=2), meet)
    device.wait_down("the host end of the tunnel speaks protocol 2, this side 1")
    pair.host_side.end("host", pair.socket).wait_up()


@pytest.mark.serial
def test_the_host_end_names_another_version_and_tries_again_slowly(pair: Any, undo: ExitStack) -> None:
    listener = MemfdListener(pair.socket, 32)
    undo.callback(listener.close)
    host = pair.host_side.end("host", pair.socket)
    began = 0.0
    for _ in range(2):
        with accept(listener) as link, pytest.raises(VersionMismatch):
            waited, began = time.monotonic() - began, time.monotonic()
            newer = replace(LinkParameters(), version=2)
            open_as_device(link.region, newer, meet)
            host.wait_down("the device end of the tunnel speaks protocol 2, this side 1")
    assert 0.8 < waited < 1.5


def test_a_silent_host_does_not_hold_the_device_for_ever(pair: Any) -> None:
    device = pair.device_side.end("device", pair.socket)
    with join(pair.socket):
        device.wait_down("did not open the link in time")
    pair.host_side.end("host", pair.socket).wait_up()


class TestTheRegion:
    """What the host end takes from a device, without any process."""

    def refuse(self, path: Path, descriptors: list[int], match: str) -> None:
        with sockets.listen(path) as server, ExitStack() as undo:
            for descriptor in descriptors:
                undo.callback(os.close, descriptor)
            answer = _answer_later(server, descriptors)
            undo.callback(answer.join)
            with pytest.raises(LinkViolation, match=match):
                MemfdConnector(path).join()

    def notifiers(self) -> list[int]:
        return [os.eventfd(0) for _ in range(6)]

    def test_unsealed(self, tmp_path: Path) -> None:
        region = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(region, Layout(32).size)
        self.refuse(tmp_path / "s", [region, *self.notifiers()], "not sealed")

    def test_not_a_memory_file(self, tmp_path: Path) -> None:
        region = os.open(tmp_path, os.O_RDONLY)
        self.refuse(tmp_path / "s", [region, *self.notifiers()], "not")

    @pytest.mark.parametrize("size", [0, 4096, 1 << 40])
    def test_of_a_strange_size(self, tmp_path: Path, size: int) -> None:
        region = _sealed(size)
        self.refuse(tmp_path / "s", [region, *self.notifiers()], "bytes")

    def test_with_pipes_for_eventfds(self, tmp_path: Path) -> None:
        notifiers = [end for _ in range(3) for end in os.pipe()]
        self.refuse(tmp_path / "s", [_sealed(Layout(32).size), *notifiers], "for an eventfd")

    def test_zeros(self, tmp_path: Path) -> None:
        self.refuse(tmp_path / "s", [_sealed(Layout(32).size), *self.notifiers()], "not a millpond tunnel")


def _sealed(size: int) -> int:
    region = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(region, size)
    fcntl.fcntl(region, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return region


def _answer_later(server: socket.socket, descriptors: list[int]) -> threading.Thread:
    def answer() -> None:
        client, _ = server.accept()
        with client:
            client.sendall(b"+")
            sockets.send_descriptors(client, descriptors)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_parameters_are_packed_as_documented() -> None:
    assert struct.unpack_from("<HHIQIHH", LinkParameters().pack()) == (1, 88, 7, 1, 65520, 32, 12)
