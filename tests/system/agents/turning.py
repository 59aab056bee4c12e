"""An agent that behaves until the host's third heartbeat, then sends what is no message."""

import sys
import time

from millpond.agent import control, daemon
from millpond.wire.control_messages import GetLoad

_load = control.AgentService._ANSWERS[GetLoad]
asked = []


def load(self, request):
    asked.append(request)
    return _load(self, request)


def serve(self, host, _serve=control.AgentService.serve):
    asked.clear()

    def passing(*arguments, _passing=host._outlet.passing):
        if len(asked) == 3:
            asked.append(None)
            host.sock.sendall(b"this is no message of millpond's")
            time.sleep(1)
        _passing(*arguments)

    host._outlet.passing = passing
    return _serve(self, host)


control.AgentService._ANSWERS[GetLoad] = load
control.AgentService.serve = serve
sys.exit(daemon.main(["--config", "/etc/millpond/agent.toml"]))
