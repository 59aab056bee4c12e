"""An agent of the next version of the protocol."""

import sys

from millpond.agent import daemon
from millpond.wire import frame

frame.encode.__kwdefaults__["version"] = frame.PROTOCOL + 1
frame.Receiver.__init__.__kwdefaults__["version"] = frame.PROTOCOL + 1
sys.exit(daemon.main(["--config", "/etc/millpond/agent.toml"]))
