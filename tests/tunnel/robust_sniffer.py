# SPDX-License-Identifier: Apache-2.0
"""A program that prints the packets that reach an interface: ``INTERFACE SOURCE DESTINATION``, until SIGTERM.

Prints how many packets came in, and those that were not from SOURCE to DESTINATION, in hex.
"""

from __future__ import annotations

import ipaddress
import json
import select
import signal
import socket
import sys

ETH_P_ALL = 3
MOST = 20


def main(interface: str, source: str, destination: str) -> None:
    here = ipaddress.ip_address(destination)
    expected = ipaddress.ip_address(source).packed + here.packed
    start = 12 if here.version == 4 else 8
    stop, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    seen, foreign = 0, []
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL)) as sniffer:
        sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
        sniffer.bind((interface, ETH_P_ALL))
        print("listening", flush=True)
        while stop not in select.select([sniffer, stop], [], [])[0]:
            packet, (_, _, kind, _, _) = sniffer.recvfrom(1 << 17)
            if kind == socket.PACKET_OUTGOING:
                continue
            seen += 1
            head = packet[: start + len(expected)]
            if head[start:] != expected or head[0] >> 4 != here.version:
                foreign.append(packet[:60].hex())
    print(json.dumps({"seen": seen, "foreign": foreign[:MOST]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
