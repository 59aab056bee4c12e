# SPDX-License-Identifier: Apache-2.0
"""An agent of the next version of the protocol."""

import sys

from millpond.agent import daemon
from millpond.wire import framing

framing.encode.__kwdefaults__["version"] = framing.PROTOCOL + 1
framing.Receiver.__init__.__kwdefaults__["version"] = framing.PROTOCOL + 1
sys.exit(daemon.main(["--config", "/etc/millpond/agent.toml"]))
