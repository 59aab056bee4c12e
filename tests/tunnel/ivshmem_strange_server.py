# SPDX-License-Identifier: Apache-2.0
"""A doorbell server that gives each client something wrong, as a program."""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

from millpond.linux import sockets
from millpond.tunnel.transports.ivshmem.doorbell_server import make_memory
from millpond.tunnel.transports.ivshmem.server_protocol import Switchboard

VECTORS = 3
SIZE = 16 << 20


def serve_strangely(path: Path, case: str) -> None:
    memory = make_strange_memory(path, case)
    vectors = [os.pipe()[1] if case == "pipes" else os.eventfd(0) for _ in range(VECTORS)]
    with sockets.listen(path) as listener:
        print("listening", flush=True)
        while True:
            client, _ = listener.accept()
            with client:
                greet(client, memory, vectors, case)
                client.recv(1)


def make_strange_memory(path: Path, case: str) -> int:
    if case == "file":
        memory = os.open(path.with_suffix(".file"), os.O_CREAT | os.O_RDWR)
    elif case == "unsealed":
        memory = os.memfd_create("loose")
    else:
        return make_memory(4096 if case == "small" else SIZE)
    os.ftruncate(memory, SIZE)
    return memory


def greet(client: socket.socket, memory: int, vectors: list[int], case: str) -> None:
    if case == "text":
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return
    for said in Switchboard(memory).join(vectors)[1]:
        number = said.message.number or int(case == "version")
        carried = [] if said.message.descriptor is None else [said.message.descriptor]
        socket.send_fds(client, [struct.pack("<q", number)], carried)


if __name__ == "__main__":
    serve_strangely(Path(sys.argv[1]), sys.argv[2])
