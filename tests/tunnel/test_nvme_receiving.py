# SPDX-License-Identifier: Apache-2.0
"""The threads that receive from a controller: packets in order, and a link that ends where one is lost."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.transports.nvme import transport
from millpond.tunnel.transports.nvme.ioctl import CommandOutcome, VendorCommand


class Controller:
    """Completes RECVs with packets of these numbers, and then with none."""

    descriptors = frozenset[int]()

    def __init__(self, *numbers: int) -> None:
        self._numbers = itertools.chain(numbers, itertools.repeat(None))
        self._lock = threading.Lock()

    def buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def io(self, command: VendorCommand) -> CommandOutcome:
        with self._lock:
            number = next(self._numbers)
        if number is None:
            time.sleep(0.01)
            return CommandOutcome(0, 0)
        command.data[0] = number
        return CommandOutcome(0, number << 32 | 100)

    def admin(self, command: VendorCommand) -> CommandOutcome:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Interface:
    def __init__(self) -> None:
        self.written: list[int] = []

    def write(self, head: bytes, _rest: memoryview) -> bool:
        self.written.append(head[0])
        if len(self.written) == 3:
            raise InterruptedError("three are enough")
        return True


def receive(controller: Controller) -> Interface:
    interface = Interface()
    passing = SimpleNamespace(head=40, verdict=lambda _head, _size: None)
    counters = SimpleNamespace(count=lambda _size: None, drop=lambda _cause: None)
    params = SimpleNamespace(generation=1, vnet_header=10)
    datapath = SimpleNamespace(interface=interface, filter=passing, inward=counters, params=params)
    try:
        transport._run(transport._Receiving(controller, datapath).loops())  # type: ignore[arg-type]
    except InterruptedError:
        return interface


def test_packets_that_overtake_each_other_come_in_order() -> None:
    assert receive(Controller(1, 2, 0)).written == [0, 1, 2]


def test_a_packet_that_is_lost_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had overtaken it waited for ever; the tunnel was said to be up, and brought nothing."""
    monkeypatch.setattr(transport, "GAP_SECONDS", 0.1)
    with pytest.raises(LinkViolation, match=r"packet 1 has not come 0\.1 s after packet 2"):
        receive(Controller(0, 2))
