# SPDX-License-Identifier: Apache-2.0
"""An agent whose power fails in the middle of an upload, in the second round."""

import os
import signal
import sys

from millpond.agent import daemon
from millpond.train.protocol import Part, Update
from millpond.wire.channel import Channel
from millpond.wire.framing import encode

_send = Channel.send
_round = 0


def send(self, message, deadline, payload=b""):
    global _round
    if self.sock.family.name == "AF_INET" and isinstance(message, Update):
        _round = message.exchange
    if isinstance(message, Part) and _round == 2:
        self.sock.sendall(encode(message, len(payload)))
        self.sock.sendall(payload[: len(payload) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    _send(self, message, deadline, payload)


Channel.send = send
sys.exit(daemon.main(["--config", "/etc/millpond/agent.toml"]))
