# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the volume's tests: private mount namespaces, and one fleet inside them."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.fs.client.metrics import MountStats
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.coherence.lease_file import open_leases
from millpond.fs.mount.stats_socket import read_stats
from millpond.fs.store.layout import prepare
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.linux import syscalls

from ..waiting import eventually
from .support import SOON, Server
from .world import World

InNamespace = Callable[[Callable[[], None]], None]
WithBoth = Callable[..., None]
Test = Callable[..., None]


@pytest.fixture
def world(fuse_usable: None, tmp_path: Path) -> Iterator[World]:
    """The directories of a device and its host; nothing is mounted yet."""
    made = World(tmp_path / "backing", tmp_path / "device", tmp_path / "host", tmp_path / "s", tmp_path / "l")
    made.leases = open_leases(tmp_path / "leases")
    made.device.mkdir()
    made.host.mkdir()
    tmp_path.chmod(0o755)
    yield made
    os.close(made.leases)


@pytest.fixture
def with_both(world: World, in_namespace: InNamespace) -> WithBoth:
    """Run a function where the volume is mounted on the device and on the host."""

    def run(body: Callable[[], None], size: str | None = None) -> None:
        def inside() -> None:
            if size:
                world.backing.mkdir()
                syscalls.mount("tmpfs", world.backing, "tmpfs", 0, f"size={size},mode=755")
            prepare(world.backing)
            world.start_server()
            world.mount_device()
            world.mount_host()
            body()

        in_namespace(inside)

    return run


def within(around: str, test: Test, *, size: str | None = None, **settings: object) -> Test:
    """Have a test run by the fixture ``around``, with these settings of its world."""
    own = inspect.signature(test).parameters

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        for name, value in settings.items():
            setattr(fixtures["world"], name, value)

        def body() -> None:
            test(**{name: fixtures[name] for name in own})
            if "coverage" in sys.modules:
                fixtures["world"].end()

        fixtures[around](body, **({"size": size} if size else {}))

    names = {**dict.fromkeys(own), around: None, "world": None}
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def mounted(**settings: Any) -> Callable[[Test], Test]:
    """Have a test run where the volume is mounted on the device and on the host, on a flash of this ``size``,
    with these other settings of its world.
    """
    return lambda test: within("with_both", test, **settings)


def in_own_mounts(test: Test) -> Test:
    """Have a test run in a process with mounts and pids of its own."""
    return within("in_namespace", test)


def stats(world: World) -> MountStats:
    """The numbers of the host's only mount."""
    (mount,) = eventually(lambda: read_stats(world.numbers, "csd0"), "the host's mount tells its numbers")
    return mount


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A volume's directory, beside something that it must not lead to."""
    directory = tmp_path / "root"
    directory.mkdir()
    (tmp_path / "secret").write_text("outside")
    return directory


@pytest.fixture
def server(top: Path) -> Iterator[Server]:
    made = Server(top)
    yield made
    made.close()


@pytest.fixture
def tree(server: Server) -> Iterator[RemoteFs]:
    made = RemoteFs(server.dial, timeout=SOON)
    yield made
    made.close()


@pytest.fixture
def volume(tree: RemoteFs) -> PathAdapter:
    return PathAdapter(tree)
