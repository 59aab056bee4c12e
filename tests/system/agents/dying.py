# SPDX-License-Identifier: Apache-2.0
"""An agent whose power fails in the middle of an upload, in the second round."""

import os
import signal
import sys

from millpond.agent import daemon
from millpond.train.protocol import Trained
from millpond.wire.channel import Channel
from millpond.wire.framing import encode

_send = Channel.send


def send(self, message, deadline, payload=b""):
    if isinstance(message, Trained) and message.round == 2 and self.sock.family.name == "AF_INET":
        self.sock.sendall(encode(message, len(payload)))
        self.sock.sendall(payload[: len(payload) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    _send(self, message, deadline, payload)


Channel.send = send
sys.exit(daemon.main(["--config", "/etc/millpond/agent.toml"]))
