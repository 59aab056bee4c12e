# SPDX-License-Identifier: Apache-2.0
"""A client has its files open again before others may remove them: their inode numbers stay theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .caching_client import Client, Device
from .gathering_clients import client, device, patience, public, server
from .support import Doing, Server

__all__ = ["client", "device", "patience", "public", "server"]


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_RDONLY])
def test_files_that_are_open_are_held_again_at_the_end_of_the_grace_period(
    client: Client, server: Server, device: Device, public: Path, flags: int
) -> None:
    (public / "f").write_bytes(b"mine")
    handle, number = client.tree.open(client.find(b"f"), flags), (public / "f").stat().st_ino
    names = [f"g{count}" for count in range(20)]  # ext4 gives the first of them the number

    def replace() -> None:
        with device.write_intent(public.stat().st_ino, inodes=(number,)):
            (public / "f").unlink()
            for name in names:
                (public / name).write_bytes(b"other")

    server.refusing = True
    server.crash()
    replacing = Doing(replace)
    server.refusing = False
    replacing.result()
    for name in names:
        client.find(name.encode())
    assert bytes(client.tree.read(handle, 9, 0)) == b"mine"
    if flags == os.O_RDWR:
        client.tree.write(handle, b"MINE", 0)
    assert all((public / name).read_bytes() == b"other" for name in names)
