# SPDX-License-Identifier: Apache-2.0
"""Edge: mounts a device's volume on the host, through raw /dev/fuse or, where that is impossible,
fuse-python.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from millpond.fs.client.callbacks import CallbackChannel
from millpond.fs.client.connection import Dial
from millpond.fs.client.metrics import MountStats
from millpond.fs.client.remote_fs import DEFAULT_SECONDS, RemoteFs
from millpond.fs.fuse import server
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.fuse.mounts import MountWatch, has_fuse_python
from millpond.fs.fuse.operation_log import OperationLog
from millpond.fs.mount.stats_socket import serve_stats
from millpond.fs.vfs.ownership import OwnerMap
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.fs.vfs.path_api import Owner
from millpond.linux.confinement.userns import has_many_uids

BINDINGS = ("auto", "raw", "fuse-python")
_COLLECT_EVERY = (20_000, 20, 20)
"""Listings make many objects, all of which live long: looking through them for cycles more often takes a
fifth of the processor time of a listing.
"""


class _StatsSource:
    """The source of a mount's statistics."""

    def __init__(self, tree: RemoteFs, about: MountStats) -> None:
        self._tree, self._about = tree, about
        self._kernel: FuseDevice | None = None
        self.operations = OperationLog(tree.path_of)

    def is_up(self, how: str, kernel: FuseDevice | None = None) -> str:
        """Record that the mount is up, and how it caches; return ``how``."""
        self._about, self._kernel = replace(self._about, how=how), kernel
        return how

    def _errors(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (operation, error), count in list(self.operations.errors.items()):
            found.setdefault(operation, {})[error] = count
        return found

    def numbers(self) -> MountStats:
        """Return the present statistics."""
        meter = self._tree.meter
        return replace(
            self._about,
            asked={code.name.lower(): count for code, count in self._kernel.asked.items()}
            if self._kernel
            else {},
            took={kind: tuple(classes) for kind, classes in list(meter.kinds.items())},
            ahead=meter.ahead,
            ahead_used=meter.ahead_used,
            dirty=self._tree.write_behind.dirty,
            operations={kind: tuple(each) for kind, each in list(self.operations.latencies.kinds.items())},
            errors=self._errors(),
        )


def mount_and_serve(
    dial: Dial,
    mountpoint: Path,
    *,
    name: str,
    allow_other: bool,
    read_only: bool = False,
    binding: str = "auto",
    timeout: float = DEFAULT_SECONDS,
    numbers: Path | None = None,
    uid: int | None = None,
    gid: int | None = None,
    on_ready: Callable[[str], None],
) -> None:
    """Mount the volume that ``dial`` reaches at ``mountpoint`` as ``name``, and serve it until it is
    unmounted.

    ``on_ready`` is called with a line on how names and data are cached. ``timeout`` is how many seconds an
    operation may take while the device answers keep-alives. The server's files show as this process's user's
    and group's, or all files as ``uid``'s and ``gid``'s. The mount's statistics are served at a socket in
    the directory ``numbers``. Signals are as of the binding. Raises LocalError if it cannot mount.
    """
    gc.freeze()
    gc.set_threshold(*_COLLECT_EVERY)
    tree = RemoteFs(dial, timeout)
    owners = OwnerMap(lambda: tree.session.welcome.owner, Owner(os.geteuid(), os.getegid()), uid, gid)
    state = _StatsSource(tree, MountStats(name, str(mountpoint)))
    served = contextlib.nullcontext() if numbers is None else serve_stats(numbers, state.numbers)
    by_path = binding == "auto" and not has_many_uids() and has_fuse_python()
    if by_path or binding == "fuse-python":
        from millpond.fs.fuse import libfuse2  # the raw binding does without the package

        with served, contextlib.closing(tree):
            libfuse2.mount_and_serve(
                PathAdapter(tree),
                mountpoint,
                name=name,
                allow_other=allow_other,
                read_only=read_only,
                owners=owners,
                on_ready=lambda: on_ready(state.is_up("nothing is kept (fuse-python)")),
            )
        return
    options = [option for option, wanted in (("allow_other", allow_other), ("ro", read_only)) if wanted]
    with served, contextlib.closing(tree):
        _mount_raw(tree, dial, mountpoint, name, state, owners, options, on_ready)


def _mount_raw(
    tree: RemoteFs,
    dial: Dial,
    mountpoint: Path,
    name: str,
    state: _StatsSource,
    owners: OwnerMap,
    options: Sequence[str],
    on_ready: Callable[[str], None],
) -> None:
    ends = contextlib.ExitStack()

    def ready(kernel: FuseDevice) -> None:
        channel = CallbackChannel(tree, dial, kernel, tree.session.silence)
        channel.start()
        ends.callback(channel.stop)
        ends.enter_context(_ended_when_unmounted(kernel, mountpoint, tree))
        names = "names, " if kernel.caches_names else ""
        on_ready(state.is_up(f"{names}attributes and data are kept until they are recalled", kernel))

    with ends:
        server.mount_and_serve(
            tree,
            mountpoint,
            name=name,
            options=options,
            operations=state.operations,
            owners=owners,
            gathering=tree.write_behind,
            on_ready=ready,
        )


@contextlib.contextmanager
def _ended_when_unmounted(kernel: FuseDevice, mountpoint: Path, tree: RemoteFs) -> Iterator[None]:
    """Within the context, end the mount once it was unmounted in this namespace and nothing is open in it,
    whatever copies of it other namespaces have.
    """
    watch = MountWatch(mountpoint, lambda: tree.is_used, kernel.stop)
    try:
        yield
    finally:
        watch.close()
