# SPDX-License-Identifier: Apache-2.0
"""An agent that runs no launched script and answers as the script's first argument says."""

import sys
import time

from millpond.agent import daemon, launched_script
from millpond.base.deadline import NEVER
from millpond.train.distributed.launch_messages import AllSaved, Exited, Output
from millpond.wire.framing import encode
from millpond.wire.messages import Ok


def serve(self, request, host):
    how = request.arguments[0]
    if how == "flood":
        host.send(Output(("x" * 1000,) * 3000), NEVER)
    elif how == "other":
        host.send(Ok(), NEVER)
    elif how == "payload":
        host.sock.sendall(encode(Exited(0), (4 << 30) - 1))
    elif how == "noise":
        host.sock.sendall(b"this is no message of millpond's" * 9)
    elif how == "terminal":
        host.send(Output(("\x1b[2J\r\nhere", "[host] there")), NEVER)
        host.send(Exited(0), NEVER)
        host.send(AllSaved(0, 0, 0), NEVER)
    elif how == "exhausting":
        while True:
            host.send(Output(("x" * 60_000,)), NEVER)
    time.sleep(60)


launched_script.LaunchedScripts.serve = serve
sys.exit(daemon.main(["--config", "/etc/millpond/agent.toml"]))
