# SPDX-License-Identifier: Apache-2.0
"""A program with an interface of its own, without offloads, to which the kernel forwards what comes in by
another: ``FROM SOURCE OWN DESTINATION``, until SIGTERM.

Prints how many packets the kernel handed over, and those that were not from SOURCE to DESTINATION.
"""

from __future__ import annotations

import ipaddress
import json
import os
import select
import signal
import socket
import sys

from millpond.base.deadline import Deadline
from millpond.linux.netlink.rtnetlink import set_forwarding
from millpond.tunnel.netdev.tun import Tun

VNET_HEADER = 12
MOST = 20


def main(inward: str, source: str, own: str, destination: str) -> None:
    expected = ipaddress.ip_address(source).packed + ipaddress.ip_address(destination).packed
    stop, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    tun = Tun("mp-out", VNET_HEADER, Deadline.after(1))
    tun.set_offloads(0)
    tun.configure(ipaddress.ip_interface(own), 1500)
    for interface in (inward, "mp-out"):
        set_forwarding(interface, on=True)
    print("listening", flush=True)
    seen, changed = 0, []
    while stop not in select.select([tun.descriptor, stop], [], [])[0]:
        packet = os.read(tun.descriptor, 1 << 17)[VNET_HEADER:]
        if packet[9] == socket.IPPROTO_ICMP and packet[12:16] != expected[:4]:
            continue  # the kernel's own word about a packet
        seen += 1
        if packet[12:20] != expected:
            changed.append(packet[:60].hex())
    print(json.dumps({"seen": seen, "changed": changed[:MOST]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
