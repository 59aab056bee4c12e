# SPDX-License-Identifier: Apache-2.0
"""A client gathers writes to a file of which another descriptor is closed meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

from .caching_client import Client, make
from .gathering_clients import client, close, device, patience, public, server
from .support import Doing

__all__ = ["client", "device", "patience", "public", "server"]


def test_what_is_written_while_the_first_descriptor_is_released_is_kept(client: Client, public: Path) -> None:
    node, handle = make(client, b"f")
    second = client.tree.open(node, os.O_RDWR)
    assert client.gather(node, b"data")
    client.gate.shut("fs.written")
    releasing = Doing(client.tree.release, handle)
    client.gate.reached()
    gathered = client.gather(node, b"more", 4)
    client.gate.open()
    releasing.result()
    assert gathered or client.tree.write(second, b"more", 4) == 4
    close(client, second)
    assert (public / "f").read_bytes() == b"datamore"
