# SPDX-License-Identifier: Apache-2.0
"""The doorbell server's protocol: its messages to each peer, and a client given arbitrary ones."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.tunnel.transports.ivshmem.doorbell_client import DoorbellClient
from millpond.tunnel.transports.ivshmem.server_protocol import MEMORY, Roster, ServerMessage, Switchboard

from ..waiting import eventually
from .conftest import Program
from .ivshmem_support import VECTORS, RawClient, start_server, start_strange_server


def test_a_newcomer_hears_what_the_specification_says_in_its_order() -> None:
    board = Switchboard(99)
    board.join((10, 11, 12))
    own, told = board.join((20, 21, 22))
    mine = [(said.message.number, said.message.descriptor) for said in told if said.to == own]
    assert mine == [
        (0, None),
        (own, None),
        (MEMORY, 99),
        *((0, vector) for vector in (10, 11, 12)),
        *((own, vector) for vector in (20, 21, 22)),
    ]
    others = [(said.message.number, said.message.descriptor) for said in told if said.to == 0]
    assert others == [(own, vector) for vector in (20, 21, 22)]
    assert [(said.to, said.message) for said in board.leave(own)] == [(0, ServerMessage(own))]


def test_an_id_is_not_given_again_at_once() -> None:
    board = Switchboard(99)
    first, _ = board.join((1, 2, 3))
    board.leave(first)
    assert board.join((1, 2, 3))[0] != first


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=40))
def test_everyone_knows_exactly_who_is_there(events: list[int | None]) -> None:
    """None: somebody comes. A number: the one at that place leaves."""
    board, clients, number = Switchboard(1), {}, 100
    for event in events:
        if event is None:
            vectors = tuple(range(number, number + VECTORS))
            number += VECTORS
            own, told = board.join(vectors)
            clients[own] = (Roster(VECTORS), vectors)
        elif event < len(clients):
            leaver = sorted(clients)[event]
            del clients[leaver]
            told = board.leave(leaver)
        else:
            continue
        for said in told:
            clients[said.to][0].take(said.message)
        for own, (roster, vectors) in clients.items():
            assert roster.complete and roster.position == own and tuple(roster.wakes) == vectors
            assert roster.peers == {peer: theirs for peer, (_, theirs) in clients.items() if peer != own}


@given(
    st.lists(
        st.tuples(st.one_of(st.integers(-2, 3), st.integers(-(1 << 63), (1 << 63) - 1)), st.booleans()),
        max_size=60,
    )
)
def test_no_message_breaks_a_client_or_loses_a_descriptor(messages: list[tuple[int, bool]]) -> None:
    roster, given_out = Roster(VECTORS), []
    for place, (number, carries) in enumerate(messages):
        descriptor = 1000 + place if carries else None
        if descriptor:
            given_out.append(descriptor)
        try:
            roster.take(ServerMessage(number, descriptor))
        except ProtocolError:
            if descriptor and descriptor not in (held := roster.release()):
                held.append(descriptor)  # the caller closes what it could not hand over
                assert sorted(held) == given_out
            return
    assert sorted(roster.release()) == given_out


@pytest.fixture
def server(undo: ExitStack, tmp_path: Path) -> tuple[Path, Program]:
    path = tmp_path / "doorbells"
    return path, start_server(undo, path)


def connect(undo: ExitStack, path: Path, role: str) -> DoorbellClient:
    peer = DoorbellClient(path, role)
    undo.callback(peer.close)
    return peer


def test_two_peers_share_memory_and_ring_each_other(undo: ExitStack, server: tuple[Path, Program]) -> None:
    host, device = connect(undo, server[0], "host"), connect(undo, server[0], "device")
    host.memory[12345] = 77
    assert device.memory[12345] == 77
    host.refresh()
    for sender, receiver in ((host, device), (device, host)):
        notifiers = sender.notifiers(receiver.position)
        assert notifiers
        for vector, notifier in enumerate(notifiers):
            notifier.notify()
            counts = [_count(wake) for wake in receiver.wakes]
            assert counts == [int(vector == place) for place in range(VECTORS)]


def _count(wake: int) -> int:
    try:
        return os.eventfd_read(wake)
    except BlockingIOError:
        return 0


def test_one_end_of_each_role_at_a_time(undo: ExitStack, server: tuple[Path, Program]) -> None:
    host = connect(undo, server[0], "host")
    with pytest.raises(Refused, match="another host is connected"):
        DoorbellClient(server[0], "host")
    connect(undo, server[0], "device")
    with pytest.raises(Refused, match="another device is connected"):
        DoorbellClient(server[0], "device")
    host.memory.release()
    host.close()
    connect(undo, server[0], "host")


def test_a_peer_that_leaves_is_announced_and_descriptors_do_not_gather(
    undo: ExitStack, server: tuple[Path, Program]
) -> None:
    host = connect(undo, server[0], "host")

    def held(pid: int | str) -> int:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    def visit() -> None:
        guest = DoorbellClient(server[0], "device")
        eventually(lambda: host.refresh() or host.notifiers(guest.position), "the host hears of it")
        guest.memory.release()
        guest.close()
        eventually(lambda: host.refresh() or not host.notifiers(guest.position), "the host hears of its end")

    visit()
    before = held("self"), held(server[1].process.pid)
    for _ in range(20):
        visit()
    assert (held("self"), held(server[1].process.pid)) == before


def test_a_peer_that_does_not_read_loses_nothing_and_harms_nobody(
    undo: ExitStack, server: tuple[Path, Program]
) -> None:
    """As QEMU while it is stopped: far more than a socket's buffer comes meanwhile."""
    silent = RawClient(undo, server[0])
    for _ in range(300):
        peer = DoorbellClient(server[0], "host")
        peer.memory.release()
        peer.close()
    last = connect(undo, server[0], "device")
    while last.position not in silent.roster.peers:
        silent.hear()


def test_the_server_keeps_no_privilege_and_removes_its_socket(server: tuple[Path, Program]) -> None:
    path, program = server
    peer = DoorbellClient(path, "host")  # it serves by then, and ends as asked
    peer.memory.release()
    peer.close()
    status = Path(f"/proc/{program.process.pid}/status").read_text()
    assert "\nCapEff:\t0000000000000000\n" in status and "\nNoNewPrivs:\t1\n" in status
    program.process.terminate()
    assert program.process.wait(30) == 0
    assert not path.exists()


def test_the_memory_can_not_be_truncated(undo: ExitStack, server: tuple[Path, Program]) -> None:
    host = connect(undo, server[0], "host")
    memory = next(
        link for link in Path("/proc/self/fd").iterdir() if "millpond-ivshmem" in str(link.readlink())
    )
    with pytest.raises(PermissionError):
        os.truncate(memory, 4096)
    assert len(host.memory) == 16 << 20


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        ("unsealed", "not sealed: it could be truncated"),
        ("file", "not a memory file"),
        ("small", "has 4096 bytes"),
        ("pipes", "something else for an eventfd"),
        ("version", "speaks version 1"),
        ("text", "sent a descriptor before|instead of its memory|gave this client the ID|speaks version"),
    ],
)
def test_a_strange_server_is_refused(undo: ExitStack, tmp_path: Path, case: str, complaint: str) -> None:
    path = tmp_path / "strange"
    start_strange_server(undo, path, case)
    with pytest.raises(ProtocolError, match=complaint):
        DoorbellClient(path, "host")


def test_no_server(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match="no doorbell server answers"):
        DoorbellClient(tmp_path / "nothing", "host")
