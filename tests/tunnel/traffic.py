# SPDX-License-Identifier: Apache-2.0
"""TCP traffic between two namespaces, as a program: serve, exchange, echo, ping-pong.

``serve``: accepts one connection, receives and sends BYTES at once, prints how many came and whether they are
those that were sent. ``pause``: the same, but this process stops itself (SIGSTOP) when the first bytes have
come. ``exchange``: the same as ``serve`` from the connecting side. ``echo`` and ``pingpong``: one byte there
and back, N times.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

from counted_stream import CountedCheck, counted

CHUNK = 1 << 16


def send(sock: socket.socket, stream: int, total: int) -> None:
    for offset in range(0, total, CHUNK):
        sock.sendall(counted(stream, offset, min(CHUNK, total - offset)))
    sock.shutdown(socket.SHUT_WR)


def receive(sock: socket.socket, stream: int, pauses: bool = False) -> str:
    check = CountedCheck(stream)
    while data := sock.recv(1 << 18):
        check.take(data)
        if check.bytes == len(data):
            print("begun", flush=True)
            if pauses:
                os.kill(os.getpid(), signal.SIGSTOP)
    return f"{check.bytes} {check.verdict}"


def both_ways(sock: socket.socket, mine: int, other: int, total: int, pauses: bool = False) -> None:
    sender = threading.Thread(target=send, args=(sock, mine, total), daemon=True)
    sender.start()
    found = receive(sock, other, pauses)
    sender.join()
    print(found, flush=True)


def pingpong(sock: socket.socket, rounds: int) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        sock.sendall(b"x")
        if sock.recv(1) != b"x":
            raise SystemExit("the echo is gone")
        times.append(time.perf_counter() - began)
    print(f"{sorted(times)[rounds // 2] * 1e6:.0f}", flush=True)


def echo(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := sock.recv(1024):
        sock.sendall(data)


def accept(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as server:
        print("listening", flush=True)
        return server.accept()[0]


def main(role: str, address: str, port: str, number: str) -> None:
    listens = role in ("serve", "pause", "echo")
    sock = accept(address, int(port)) if listens else socket.create_connection((address, int(port)), 10)
    # After a link was down TCP tries again as late as twice that time.
    sock.settimeout(90)
    with sock:
        if role == "echo":
            echo(sock)
        elif role == "pingpong":
            pingpong(sock, int(number))
        else:
            both_ways(sock, *((1, 2) if listens else (2, 1)), int(number), role == "pause")


if __name__ == "__main__":
    main(*sys.argv[1:])
