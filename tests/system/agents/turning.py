# SPDX-License-Identifier: Apache-2.0
"""An agent that behaves until it is told to turn, then answers a heartbeat with what is no message."""

import sys
import time
from pathlib import Path

from millpond.agent import control, daemon
from millpond.wire.control_messages import GetLoad

TOLD = Path("/flash/public/turn")
_load = control._HANDLERS[GetLoad]
asked = []


def load(self, request, host):
    asked.append(request)
    return _load(self, request, host)


def serve(self, host, _serve=control.AgentService.serve):
    asked.clear()

    def passing(*arguments, _passing=host.outlet.passing):
        if asked and TOLD.exists():
            host.sock.sendall(b"this is no message of millpond's")
            time.sleep(1)
        _passing(*arguments)

    host.outlet.passing = passing
    return _serve(self, host)


control._HANDLERS[GetLoad] = load
control.AgentService.serve = serve
sys.exit(daemon.main(["--config", "/etc/millpond/agent.toml"]))
