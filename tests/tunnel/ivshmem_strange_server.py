"""A doorbell server that gives one client something wrong, as a program."""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

from millpond.linux import sockets
from millpond.tunnel.ivshmem.protocol import Switchboard
from millpond.tunnel.ivshmem.server import make_memory

VECTORS = 3


def serve_strangely(path: Path, case: str) -> None:
    """A server that gives one client something wrong."""
    memory = make_memory(4096 if case == "small" else 16 << 20)
    if case == "unsealed":
        memory = os.memfd_create("loose")
        os.ftruncate(memory, 16 << 20)
    elif case == "file":
        memory = os.open(path.with_suffix(".file"), os.O_CREAT | os.O_RDWR)
        os.ftruncate(memory, 16 << 20)
    vectors = [os.pipe()[1] if case == "pipes" else os.eventfd(0) for _ in range(VECTORS)]
    with sockets.listen(path) as listener:
        client, _ = listener.accept()
        with client:
            if case == "text":
                client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            else:
                told = Switchboard(memory).join(vectors)[1]
                for said in told:
                    number = said.message.number or int(case == "version")
                    carried = [] if said.message.descriptor is None else [said.message.descriptor]
                    socket.send_fds(client, [struct.pack("<q", number)], carried)
            client.recv(1)


if __name__ == "__main__":
    serve_strangely(Path(sys.argv[1]), sys.argv[2])
