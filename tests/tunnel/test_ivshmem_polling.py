# SPDX-License-Identifier: Apache-2.0
"""The device's endpoint without interrupts: its polling process, on files in place of the PCI device."""

from __future__ import annotations

import logging
import mmap
import os
import select
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from millpond.base.errors import ConnectionLost
from millpond.tunnel.ring import nvme_defs
from millpond.tunnel.ring.layout import RECV, SEND, STRIDE, Layout
from millpond.tunnel.transports.ivshmem.device_side import DeviceConnection
from millpond.tunnel.transports.ivshmem.polling import PolledDevice

LAYOUT = Layout(2)


def children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@pytest.fixture
def others() -> frozenset[int]:
    """Children that this process has for other tests."""
    return frozenset(children())


@pytest.fixture
def board(others: frozenset[int], undo: ExitStack, tmp_path: Path) -> PolledDevice:
    (tmp_path / "resource0").write_bytes(bytes(256))
    board = PolledDevice(tmp_path, memoryview(mmap.mmap(-1, LAYOUT.size)), weakly_ordered=True)
    undo.callback(board.close)
    return board


def is_rung(board: PolledDevice, queue: int) -> bool:
    """Within 2 s; from now on it is silent."""
    rung = bool(select.select([board.wakes[queue]], [], [], 2)[0])
    return rung and bool(os.eventfd_read(board.wakes[queue]))


def ring_tail(board: PolledDevice, queue: int) -> None:
    place = nvme_defs.DOORBELLS + nvme_defs.doorbell_offset(2 * queue, STRIDE)
    board.memory[place] ^= 1


@pytest.mark.parametrize("queue", [SEND, RECV])
def test_a_new_tail_wakes_its_pump(board: PolledDevice, queue: int) -> None:
    assert is_rung(board, SEND) and is_rung(board, RECV), "whoever waits already must look once"
    ring_tail(board, queue)
    assert is_rung(board, queue)


@pytest.mark.expected_log("starting another")
def test_the_looking_process_is_replaced_when_it_is_killed(
    board: PolledDevice, others: frozenset[int], undo: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    (first,) = children() - others
    link = undo.enter_context(DeviceConnection(board, LAYOUT))
    os.kill(first, signal.SIGKILL)
    assert select.select(board.events, [], [], 2)[0], "its death tells nobody"
    with caplog.at_level(logging.WARNING), pytest.raises(ConnectionLost, match="no sign of life"):
        link.check()
    assert "starting another" in caplog.text and len(children() - others - {first}) == 1
    for queue in (SEND, RECV):
        assert is_rung(board, queue)
        ring_tail(board, queue)
        assert is_rung(board, queue)


def test_a_closed_board_leaves_no_process(board: PolledDevice, others: frozenset[int]) -> None:
    (pid,) = children() - others
    board.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
