# SPDX-License-Identifier: Apache-2.0
"""Requests of a mount that wait for their turn all get it, without a kernel."""

from __future__ import annotations

import errno
import os
import queue
import threading

from millpond.fs.fuse.abi import Code, Header
from millpond.fs.fuse.threads import RequestKind, RequestThreads
from millpond.fs.vfs.inode_api import WouldBlock, may_block
from millpond.fs.vfs.operation import about_to_wait

from ..waiting import eventually

MORE = RequestKind.ORDINARY.limit + 6


class Requests:
    """A source of requests whose numbers are 1 to ``MORE``."""

    def __init__(self) -> None:
        self._numbers = queue.Queue[int]()

    def send(self, number: int) -> None:
        self._numbers.put(number)

    def new_buffer(self) -> memoryview:
        return memoryview(bytearray(16))

    def receive(self, buffer: memoryview) -> tuple[Header, memoryview]:
        number = self._numbers.get()
        if not number:
            self.stop()
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        return Header(40, Code.MKDIR, number, 1, 0, 0), buffer[:4]

    def has_request(self, descriptor: int, seconds: float) -> bool:
        return True

    def stop(self) -> None:
        self._numbers.put(0)


def test_all_have_their_turn_though_all_that_are_under_way_block_meanwhile() -> None:
    source, answered, changed = Requests(), list[int](), threading.Condition()
    all_have_come = threading.Event()

    def perform(header: Header, _body: memoryview) -> None:
        if not may_block.get():
            about_to_wait()
            assert all_have_come.wait(20)
            with changed:  # each blocks when the one before has been answered
                assert changed.wait_for(lambda: len(answered) >= header.unique - 1, 20)
            raise WouldBlock
        with changed:
            answered.append(header.unique)
            changed.notify_all()

    threads = RequestThreads(
        source, lambda _: RequestKind.ORDINARY, lambda _h, _b: None, perform, lambda _h, _e: None
    )
    running = threading.Thread(target=threads.run)
    running.start()
    for number in range(1, MORE + 1):
        source.send(number)
    try:
        eventually(lambda: len(threads._backlog[RequestKind.ORDINARY]) == 6, "requests that wait")
        all_have_come.set()
        eventually(lambda: len(answered) == MORE, "an answer to each", seconds=20)
    finally:
        assert threads.close()
        running.join()
