# SPDX-License-Identifier: Apache-2.0
"""An agent that answers every handshake by announcing 4 GiB: of a head, then of a payload, and so on."""

import itertools
import sys
import time

from millpond.agent import control, daemon
from millpond.wire.control_messages import Welcome
from millpond.wire.framing import MAGIC, PREFIX, PROTOCOL, encode

MOST = (4 << 30) - 1
WELCOME = encode(Welcome("flood", "1", "1", "x", 1, 1, 1), MOST)
ANSWERS = itertools.cycle([PREFIX.pack(MAGIC, PROTOCOL, MOST, 0), WELCOME])


def serve(self, host):
    host.sock.sendall(next(ANSWERS))
    time.sleep(1)


control.AgentService.serve = serve
sys.exit(daemon.main(["--config", "/etc/millpond/agent.toml"]))
