# SPDX-License-Identifier: Apache-2.0
"""A peer's doorbells cost the endpoint no time and never stop it, whatever their values."""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from millpond.linux import sockets
from millpond.tunnel.ring.layout import ADMIN, QUEUES, Layout
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.ring.region import Region
from millpond.tunnel.transports.ring_connection import RingConnection

from ..waiting import eventually
from .conftest import DEVICE_ADDRESS, HOST_ADDRESS, End
from .robust_random_peer import Mallory, cpu_seconds, sealed_region

SECONDS = 2.0
MOST_CPU = 0.3
"""Of an end in these seconds; one that spins gets all that the machine can give it."""


@contextmanager
def again_and_again(act: Callable[[], None]) -> Iterator[None]:
    """``act`` in a thread, without a pause."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            act()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def attack(pair: Any, undo: ExitStack, victim: str) -> tuple[End, Mallory, RingConnection]:
    """An end and the hostile other side of its link, which is not open yet."""
    side = pair.device_side if victim == "device" else pair.host_side
    end = side.end(victim, pair.socket)
    end.wait_begun()
    role = "host" if victim == "device" else "device"
    mallory = Mallory(role, pair.socket, random.Random(0), HOST_ADDRESS, DEVICE_ADDRESS)
    undo.callback(mallory.close)
    return end, mallory, undo.enter_context(mallory.join())


def ring(link: RingConnection) -> None:
    for notifier in link.notifiers:
        notifier.notify()


@pytest.mark.parametrize("victim", ["device", "host"])
def test_endless_notifications_cost_an_open_link_little(pair: Any, undo: ExitStack, victim: str) -> None:
    end, mallory, link = attack(pair, undo, victim)
    mallory.open(link, LinkParameters())
    end.wait_up()
    before = cpu_seconds(end)
    with again_and_again(lambda: ring(link)):
        time.sleep(SECONDS)
    assert cpu_seconds(end) - before < MOST_CPU
    assert end.status["state"] == "up"


@pytest.mark.parametrize("victim", ["device", "host"])
def test_endless_notifications_cost_an_opening_little(pair: Any, undo: ExitStack, victim: str) -> None:
    end, _, link = attack(pair, undo, victim)
    before = cpu_seconds(end)
    with again_and_again(link.notifiers[ADMIN].notify):
        end.wait_down("did not open the link in time")
    assert cpu_seconds(end) - before < MOST_CPU


def test_a_notifier_that_never_falls_silent_costs_little(pair: Any, undo: ExitStack) -> None:
    """An eventfd that counts down by one, from 2^63, and nobody needs to ring it."""
    notifiers = [os.eventfd(1 << 31, os.EFD_SEMAPHORE | os.EFD_NONBLOCK) for _ in range(2 * QUEUES)]
    for notifier in notifiers:
        undo.callback(os.close, notifier)
        for _ in range(3):
            os.eventfd_write(notifier, 1 << 61)
    layout = Layout(32)
    descriptor, memory = sealed_region(undo, layout.size)
    Region.create(memory, layout)
    server = undo.enter_context(sockets.listen(pair.socket))
    host = pair.host_side.end("host", pair.socket)
    assert select.select([server], [], [], 30)[0]
    with server.accept()[0] as client:
        client.sendall(b"+")
        before = cpu_seconds(host)
        sockets.send_descriptors(client, [descriptor, *notifiers])
        host.wait_down("did not open the link in time")
        assert cpu_seconds(host) - before < MOST_CPU


def jam(notifier: int) -> None:
    """Fill an eventfd, and have all who write to it wait: whether they do is up to each who holds it."""
    with suppress(BlockingIOError):
        os.eventfd_read(notifier)
    os.set_blocking(notifier, True)
    os.eventfd_write(notifier, 2**64 - 2)


@contextmanager
def teasing(notifier: int) -> Iterator[None]:
    """A notifier that fires again and again, and stops when a process takes the event, which then waits."""

    def tease() -> None:
        with suppress(BlockingIOError):
            os.eventfd_write(notifier, 1)
            os.eventfd_read(notifier)

    os.set_blocking(notifier, True)
    with again_and_again(tease):
        try:
            yield
        finally:
            os.set_blocking(notifier, False)
            os.eventfd_write(notifier, 1)  # the thread may wait itself


@contextmanager
def jammed(link: RingConnection, victim: str) -> Iterator[None]:
    """An opening in which the notifiers do what a peer can have them do."""
    registers = link.region.registers
    jam(link.wakes[ADMIN])
    if victim == "device":
        registers.enable(link.region.layout)
        eventually(lambda: registers.ready, "the device answering")
    else:
        eventually(lambda: registers.enabled, "the host asking")
        registers.set_ready()
    with teasing(link.notifiers[ADMIN].descriptor):
        time.sleep(0.3)
        yield


@pytest.mark.parametrize("victim", ["device", "host"])
def test_an_end_whose_notifiers_are_jammed_stops_when_asked(pair: Any, undo: ExitStack, victim: str) -> None:
    end, _, link = attack(pair, undo, victim)
    with jammed(link, victim):
        end.process.terminate()
        assert end.process.wait(10) == 0


@pytest.mark.parametrize("victim", ["device", "host"])
def test_an_end_serves_the_next_peer_after_jammed_notifiers(pair: Any, undo: ExitStack, victim: str) -> None:
    end, mallory, link = attack(pair, undo, victim)
    with jammed(link, victim):
        end.wait_down("did not open the link in time")
    link.__exit__(None, None, None)
    mallory.close()
    role, side = ("host", pair.host_side) if victim == "device" else ("device", pair.device_side)
    side.end(role, pair.socket).wait_up()
    end.wait_up()
