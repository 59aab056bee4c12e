# SPDX-License-Identifier: Apache-2.0
"""The device's mount hears of what hosts remove, and has its kernel forget what has no name any more."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from millpond.fs.coherence.delegation_table import DEVICE
from millpond.fs.coherence.removed_files import RemovedFiles
from millpond.fs.proto.delegations import ALL_KNOWN
from millpond.fs.store.backing_fs import BackingFs

from ..waiting import eventually
from .caching_client import Kernel, Listening, managed
from .support import lasts

D, F, G = 2, 10, 11


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[Listening, set[int]]]:
    """A manager, and what it tells a mount of."""
    heard = set[int]()

    class Hearing(RemovedFiles):
        def look(self, inodes: Collection[int]) -> None:
            heard.update(inodes)

    with managed(tmp_path / "locks") as server:
        root = os.open(tmp_path, os.O_PATH)
        mount = Hearing(BackingFs(root), tmp_path / "locks")
        mount.start(Kernel())
        eventually(lambda: ALL_KNOWN in heard, "the mount looks at all that it knows at first")
        heard.clear()
        yield server, heard
        mount.stop()
        os.close(root)


def test_a_manager_that_was_started_again_tells_of_all(
    told: tuple[Listening, set[int]], tmp_path: Path
) -> None:
    server, heard = told
    server.kill()
    with managed(tmp_path / "locks") as again:
        eventually(lambda: heard == {ALL_KNOWN}, "the mount looks at all that it knows")
        with again.manager.write_intent(again.client(), D, inodes=(F,)):
            pass
        eventually(lambda: F in heard, "it is told")


def test_the_mount_is_told_whose_names_a_host_may_have_removed(told: tuple[Listening, set[int]]) -> None:
    server, heard = told
    host = server.client()
    with server.manager.write_intent(host, D, inodes=(F,)) as recall:
        recall(G)
        assert lasts(lambda: not heard)
    eventually(lambda: heard == {F, G}, "both are told")


@pytest.mark.parametrize("device", [True, False])
def test_what_removes_no_name_of_a_host_is_not_told(told: tuple[Listening, set[int]], device: bool) -> None:
    server, heard = told
    holder, directories = (DEVICE, (D,)) if device else (server.client(), ())
    with server.manager.write_intent(holder, *directories, inodes=(F,)):
        pass
    with server.manager.write_intent(server.client(), D):
        pass
    assert lasts(lambda: not heard)


def test_of_very_many_the_mount_is_told_in_a_word(told: tuple[Listening, set[int]]) -> None:
    server, heard = told
    with server.manager.write_intent(server.client(), D, inodes=tuple(range(F, F + 5000))):
        pass
    eventually(lambda: heard == {ALL_KNOWN}, "one message")
