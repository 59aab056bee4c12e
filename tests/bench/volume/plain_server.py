# SPDX-License-Identifier: Apache-2.0
"""Entry: SFTP without encryption, for sshfs' directport: ``plain_server.py ADDRESS PORT PROGRAM``.

Each connection becomes standard input and output of PROGRAM. Says "listening" once it is.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys


def main(address: str, port: str, program: str) -> None:
    """Until it is killed; its servers end with their connections."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    with socket.create_server((address, int(port))) as listener:
        print("listening", flush=True)
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection:
                subprocess.Popen([program], stdin=connection.fileno(), stdout=connection.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
