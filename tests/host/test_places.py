# SPDX-License-Identifier: Apache-2.0
"""The places at the daemon's socket: idle, unfinished, unread or foreign connections shut nobody out."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, LocalError, Refused
from millpond.host.api import daemon, progress
from millpond.host.api.connection import CLOSED, ENDED
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.daemon import server
from millpond.host.daemon.places import UserPlace, UserPlaces
from millpond.linux import sockets
from millpond.wire import framing
from millpond.wire.channel import Channel
from millpond.wire.framing import PREFIX, PROTOCOL, Receiver
from millpond.wire.messages import Failure

from .daemon_rig import Rig

OWNER, ONE, OTHER = 7, 8, 9


class Entered:
    """Places of some users, and the far ends of their connections."""

    def __init__(self, undo: contextlib.ExitStack, most: int) -> None:
        self._undo, self.places = undo, UserPlaces(OWNER, most)

    def enter(self, uid: int, count: int = 1) -> list[UserPlace]:
        found = []
        for _ in range(count):
            near, far = socket.socketpair()
            self._undo.enter_context(near)
            self._undo.enter_context(far)
            found.append(self._undo.enter_context(self.places.enter(near, uid)))
        return found


@pytest.fixture
def entered() -> Iterator[Entered]:
    with contextlib.ExitStack() as undo:
        yield Entered(undo, 8)


def lost(places: list[UserPlace]) -> list[bool]:
    return [place.lost for place in places]


def test_a_new_connection_takes_the_place_of_an_idle_one_of_its_user(entered: Entered) -> None:
    own, others = entered.enter(OWNER, 8), entered.enter(ONE, 2)
    with entered.places.answering(own[0]):
        entered.enter(0)  # root is as the owner
        assert lost(own) == [False, True, *[False] * 6]
    entered.enter(OWNER)
    assert lost(own)[:3] == [False, True, True]  # the first has had a request since
    entered.enter(ONE)
    assert lost(others) == [True, False] and not any(lost(own)[3:])


def test_the_user_with_most_connections_makes_room_for_others(entered: Entered) -> None:
    found = {uid: entered.enter(uid, 2) for uid in (11, 12, 13, 14)}
    assert not any(lost([place for places in found.values() for place in places]))
    entered.enter(OTHER)
    assert sum(lost([place for places in found.values() for place in places])) == 1
    entered.enter(OWNER, 8)


def test_a_user_with_answers_under_way_everywhere_is_refused(entered: Entered) -> None:
    with contextlib.ExitStack() as answers:
        for place in entered.enter(ONE, 2):
            answers.enter_context(entered.places.answering(place))
        with pytest.raises(Refused, match="try again"):
            entered.enter(ONE)
        entered.enter(OTHER)
    entered.enter(ONE)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "most_places", lambda: 4)
    monkeypatch.setattr(server, "MESSAGE_SECONDS", 0.3)


def idle(rig: Rig, stack: contextlib.ExitStack) -> socket.socket:
    return stack.enter_context(sockets.connect(rig.directory / "host.sock", 30.0))


def test_idle_connections_shut_no_command_out(few: None, rig: Rig) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            idle(rig, stack)
            assert rig.command("jobs")[0] == 0


def test_a_request_that_does_not_end_is_given_up(few: None, rig: Rig) -> None:
    with contextlib.ExitStack() as stack:
        begun = idle(rig, stack)
        begun.sendall(PREFIX.pack(b"mp", PROTOCOL, 4 << 20, 0) + b"x")
        assert begun.recv(1) == b""


@pytest.mark.parametrize(("step", "advice"), [(1, "restart it"), (-1, "update this one")])
def test_another_version_is_told_as_such(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, step: int, advice: str
) -> None:
    with DaemonClient(rig.directory) as client:
        client._channel._receiver = Receiver(client.LIMITS, "the host daemon", version=PROTOCOL + step)
        encode = framing.encode
        monkeypatch.setattr(
            "millpond.wire.channel.encode",
            lambda message, size=0: encode(
                message, size, version=PROTOCOL + step * isinstance(message, daemon.GetJobs)
            ),
        )
        with pytest.raises(
            LocalError, match=rf"of another version .*{PROTOCOL}, .*{PROTOCOL + step}.*{advice}"
        ):
            client.jobs()


def test_a_follower_that_does_not_read_for_a_while_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REPLY_SECONDS", 0.1)
    rig.submit()
    rig.wait_for(1, "running")
    with Channel(sockets.connect(rig.directory / "host.sock"), "the daemon") as client:
        client.send(daemon.Watch(1), Deadline.after(30))
        for number in range(1, 400):  # more than the socket holds
            rig.add_round(1, round=number, missing={f"csd{i}": "x" * 100 for i in range(20)})
        rig.begun[1].log.info("at last")
        rig.finish(1)
        rounds = 0
        while (found := client.expect(progress.StoredProgress, Deadline.after(30))).info.state != "done":
            rounds += len(found.rounds)
        assert rounds + len(found.rounds) == 399


def test_what_has_become_of_the_daemon_is_told_truly(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with DaemonClient(rig.directory) as client:
        client._channel.shut_down()
        with pytest.raises(ConnectionLost, match=CLOSED):
            client.jobs()
    with DaemonClient(rig.directory) as client:
        monkeypatch.setattr(client, "_is_served", lambda: False)
        client._channel.shut_down()
        with pytest.raises(ConnectionLost, match=ENDED):
            client.jobs()


def test_a_daemon_in_the_place_of_one_that_has_ended_is_another(rig: Rig) -> None:
    """Before: where it was started again at once, the lost one passed for one that runs."""
    with DaemonClient(rig.directory) as client:
        client._daemon += 1
        client._channel.shut_down()
        with pytest.raises(ConnectionLost, match=ENDED):
            client.overview()


def test_the_last_word_of_the_daemon_is_heard_in_the_middle_of_a_request(rig: Rig) -> None:
    near, far = socket.socketpair()
    with DaemonClient(rig.directory) as client, Channel(far, "a command") as there:
        client._channel.close()
        client._channel = Channel(near, "the host daemon")
        there.send(Failure("busy", "try again"), Deadline.after(30))
        there.shut_down()
        with pytest.raises(Refused, match="try again"):
            client._call(daemon.StopJob(1), daemon.Submitted, Deadline.after(30), bytes(8 << 20))
