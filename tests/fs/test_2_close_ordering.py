# SPDX-License-Identifier: Apache-2.0
"""A file that a client closes stays closed, whatever the client's other session slots send meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millpond.fs.proto import file_ops as p
from millpond.fs.server.handlers import RequestHandlers
from millpond.fs.vfs.path_api import Handle

from .hostile_world import World, world
from .support import NAME

__all__ = ["world"]


def forgets(world: World, node: int) -> None:
    """Over another slot, and hears that it was done."""
    with world.server.talk(NAME, b"one more slot...") as other:
        other.post(p.Forget((node,)))
        other.ask(p.GetStatistics())


def ends(world: World, _node: int) -> None:
    """It says over another slot that it is done."""
    with world.server.talk(NAME, b"one more slot...") as other:
        other.ask(p.Goodbye())


@pytest.mark.parametrize("meanwhile", [forgets, ends])
def test_a_file_that_is_forgotten_while_it_is_closed_is_closed(
    world: World, meanwhile: Callable[[World, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, handle = world.file, world.open()
    before, end_gathering = world.server.open_files, RequestHandlers._end_gathering

    def late(self: RequestHandlers, handle: Handle) -> None:
        monkeypatch.undo()
        end_gathering(self, handle)
        meanwhile(world, node)

    monkeypatch.setattr(RequestHandlers, "_end_gathering", late)
    world.say(p.Release(handle))
    if meanwhile is forgets:
        assert world.server.open_files == before - 1
    else:  # nothing is left of it but what others have open
        assert world.server.open_files == 1
        world.begin()
