# SPDX-License-Identifier: Apache-2.0
"""Entry: the server of rounds, in a process whose processor time can be limited:
``python -m bench.papers.dpu_server.server_process LIBRARY SIZE THREADS FD...``.

It prints the ports of its UDP sockets; then each line of its input says how a round is done and its number,
and each line of its output the times of that round, the datagrams that came, and the processor's seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from bench.papers.dpu_server.library import BUSY_POLL, MILLPOND, UDP, Library, busy_poll, datagram_socket
from bench.papers.dpu_server.millpond_round import heads, plan
from millpond.aggregate.udp.exchange import aggregate


def main() -> None:
    """Serve until the input ends. ``FD`` are the connections of clients by TCP."""
    size, threads, *connections = map(int, sys.argv[2:])
    library, clients = Library(Path(sys.argv[1])), len(connections)
    each = -(-clients // threads)
    sockets = [datagram_socket(each, size) for _ in range(threads)]
    sums, mean = np.zeros(size, np.float32), np.zeros(size, np.float32)
    print(json.dumps([own.getsockname()[1] for own in sockets]), flush=True)
    for line in sys.stdin:
        how, number = map(int, line.split())
        for own in sockets:
            busy_poll(own, on=bool(how & BUSY_POLL))
        if how & MILLPOND:
            aggregate(sockets[0], plan(number, size), heads(clients))
            print(json.dumps(([0.0, 0.0, 0.0], 0, 0.0)), flush=True)
            continue
        used, before = [own.fileno() for own in sockets] if how & UDP else connections, time.process_time()
        times, came = library.serve(used, clients, how, sums, mean)
        print(json.dumps((times, came, time.process_time() - before)), flush=True)


if __name__ == "__main__":
    main()
