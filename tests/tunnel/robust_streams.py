# SPDX-License-Identifier: Apache-2.0
"""TCP streams that live for seconds and are checked: ``serve ADDRESS`` and ``call ADDRESS SEED``.

The caller keeps two connections open; each carries counted bytes both ways at a steady rate, ends after a few
seconds and is followed by another, until SIGTERM. Both sides print a JSON object for each connection: its
number, when it began and ended, and, of what was sent and what came, the bytes, whether they are intact, and
the error that ended it.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from counted_stream import CountedCheck, counted

PORT = 7001
CHUNK, PAUSE = 1 << 16, 0.01
SHORTEST, LONGEST = 4.0, 12.0
STALLED = 150.0
"""Seconds without progress that end a stream. After a loss TCP tries again later and later, at most 120 s
apart (TCP_RTO_MAX): a stream whose every attempt met a dead link is not harmed, it goes on with the next one.
"""
ANSWERS = 1 << 16
"""The stream that answers number n is n plus this."""

_ended = threading.Event()


class Sent:
    """What was sent of a stream."""

    def __init__(self, stream: int) -> None:
        self._stream, self._bytes, self._error = stream, 0, ""

    def send(self, sock: socket.socket, done: Callable[[], bool]) -> None:
        """Send it at a steady rate until ``done``."""
        try:
            while not done():
                data = counted(self._stream, self._bytes, CHUNK)
                self._bytes += CHUNK
                sock.sendall(data)
                time.sleep(PAUSE)
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._error = str(error)

    def report(self) -> list[object]:
        return [self._bytes, "intact", self._error]


class Received:
    """What came of a stream."""

    def __init__(self, stream: int) -> None:
        self._check, self._error = CountedCheck(stream), ""

    def receive(self, sock: socket.socket) -> None:
        """Receive it to its end."""
        data = b"x"
        try:
            while data:
                data = sock.recv(1 << 18)
                self._check.take(data)
        except OSError as error:
            self._error = str(error)

    def report(self) -> list[object]:
        return [self._check.bytes, self._check.verdict, self._error]


def report(number: int, began: float, sent: Sent, received: Received) -> None:
    figures = {"number": number, "began": began, "ended": time.monotonic()}
    found = figures | {"sent": sent.report(), "received": received.report()}
    print(json.dumps(found) + "\n", end="", flush=True)


def answer(sock: socket.socket) -> None:
    """As the server: send for as long as the caller does."""
    began, heard_all = time.monotonic(), threading.Event()
    with sock:
        sock.settimeout(STALLED)
        number = struct.unpack("<Q", sock.recv(8))[0]
        sent, received = Sent(number + ANSWERS), Received(number)
        sender = threading.Thread(target=sent.send, args=(sock, heard_all.is_set))
        sender.start()
        received.receive(sock)
        heard_all.set()
        sender.join()
        report(number, began, sent, received)


def connect(address: str) -> socket.socket | None:
    """A connection as soon as there is a link; None at the end."""
    while not _ended.is_set():
        try:
            return socket.create_connection((address, PORT), 2)
        except OSError:
            time.sleep(0.05)
    return None


def converse(address: str, number: int, life: float) -> None:
    """As the caller: one connection."""
    sock = connect(address)
    if sock is None:
        return
    began, sent, received = time.monotonic(), Sent(number), Received(number + ANSWERS)
    with sock:
        sock.settimeout(STALLED)
        sock.sendall(struct.pack("<Q", number))
        receiver = threading.Thread(target=received.receive, args=(sock,))
        receiver.start()
        sent.send(sock, lambda: _ended.is_set() or time.monotonic() > began + life)
        receiver.join()
        report(number, began, sent, received)


def converse_again_and_again(address: str, seed: int, line: int) -> None:
    source = random.Random(seed + line)
    number = 1000 * line
    while not _ended.is_set():
        number += 1
        converse(address, number, source.uniform(SHORTEST, LONGEST))


def call(address: str, seed: str) -> None:
    lines = [
        threading.Thread(target=converse_again_and_again, args=(address, int(seed), line)) for line in (1, 2)
    ]
    for thread in lines:
        thread.start()
    for thread in lines:
        thread.join()


def serve(address: str) -> None:
    with socket.create_server((address, PORT)) as server:
        server.settimeout(0.2)
        print("listening", flush=True)
        while not _ended.is_set():
            try:
                sock, _ = server.accept()
            except TimeoutError:
                continue
            threading.Thread(target=answer, args=(sock,)).start()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda _number, _frame: _ended.set())
    {"serve": serve, "call": call}[sys.argv[1]](*sys.argv[2:])
