# SPDX-License-Identifier: Apache-2.0
"""TCP streams that live for seconds and print their digests: ``serve ADDRESS`` and ``call ADDRESS SEED``.

The caller keeps two connections open; each carries random bytes both ways at a steady rate, ends after a few
seconds and is followed by another, until SIGTERM. Both sides print a JSON object for each connection: its
number, when it began and ended, and bytes and SHA-256 of what was sent and what came.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

PORT = 7001
CHUNK, PAUSE = 1 << 16, 0.01
SHORTEST, LONGEST = 4.0, 12.0
STALLED = 60.0

_ended = threading.Event()


class Tally:
    """Bytes and their digest, and the error that ended the stream, if any."""

    def __init__(self) -> None:
        self.bytes, self._digest, self.error = 0, hashlib.sha256(), ""

    def add(self, data: bytes) -> bytes:
        self.bytes += len(data)
        self._digest.update(data)
        return data

    def report(self) -> list[object]:
        return [self.bytes, self._digest.hexdigest(), self.error]


def send(sock: socket.socket, tally: Tally, seed: int, done: Callable[[], bool]) -> None:
    """Random bytes, no piece like another, at a steady rate until ``done``."""
    source = random.Random(seed)
    pool = source.randbytes(1 << 20)
    while not done():
        start = source.randrange(len(pool) - CHUNK)
        sock.sendall(tally.add(pool[start : start + CHUNK]))
        time.sleep(PAUSE)
    sock.shutdown(socket.SHUT_WR)


def receive(sock: socket.socket, tally: Tally) -> None:
    try:
        while tally.add(sock.recv(1 << 18)):
            pass
    except OSError as error:
        tally.error = str(error)


def report(number: int, began: float, sent: Tally, received: Tally) -> None:
    figures = {"number": number, "began": began, "ended": time.monotonic()}
    print(
        json.dumps(figures | {"sent": sent.report(), "received": received.report()}) + "\n",
        end="",
        flush=True,
    )


def answer(sock: socket.socket) -> None:
    """As the server: send for as long as the caller does."""
    began, sent, received, heard_all = time.monotonic(), Tally(), Tally(), threading.Event()
    with sock:
        sock.settimeout(STALLED)
        number = struct.unpack("<Q", received.add(sock.recv(8, socket.MSG_WAITALL)))[0]
        sender = threading.Thread(target=send, args=(sock, sent, number + (1 << 32), heard_all.is_set))
        sender.start()
        receive(sock, received)
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
    began, sent, received = time.monotonic(), Tally(), Tally()
    with sock:
        sock.settimeout(STALLED)
        sock.sendall(sent.add(struct.pack("<Q", number)))
        receiver = threading.Thread(target=receive, args=(sock, received))
        receiver.start()
        send(sock, sent, number, lambda: _ended.is_set() or time.monotonic() > began + life)
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
