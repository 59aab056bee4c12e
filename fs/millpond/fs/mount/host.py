# SPDX-License-Identifier: Apache-2.0
"""Edge: mounts a device's volume on the host, through raw /dev/fuse or, where that is impossible,
fuse-python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from millpond.fs.client.callbacks import CallbackChannel
from millpond.fs.client.metrics import MountStats
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.client.rpc import Dial
from millpond.fs.fuse import libfuse2, server
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.mount.stats_socket import serve_stats
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.linux.confinement.userns import has_many_uids

_TIMEOUT = 15.0
BINDINGS = ("auto", "raw", "fuse-python")


class _StatsSource:
    """The source of a mount's statistics."""

    def __init__(self, tree: RemoteFs, about: MountStats) -> None:
        self._tree, self._about = tree, about
        self._kernel: FuseDevice | None = None

    def is_up(self, how: str, kernel: FuseDevice | None = None) -> str:
        """Record that the mount is up, and how it caches; return ``how``."""
        self._about, self._kernel = replace(self._about, how=how), kernel
        return how

    def numbers(self) -> MountStats:
        """Return the present statistics."""
        meter = self._tree.rpc.meter
        return replace(
            self._about,
            asked={code.name.lower(): count for code, count in self._kernel.asked.items()}
            if self._kernel
            else {},
            took={kind: tuple(classes) for kind, classes in list(meter.kinds.items())},
            ahead=meter.ahead,
            ahead_used=meter.ahead_used,
        )


def mount_and_serve(
    dial: Dial,
    mountpoint: Path,
    *,
    name: str,
    allow_other: bool,
    read_only: bool = False,
    binding: str = "auto",
    timeout: float = _TIMEOUT,
    numbers: Path | None = None,
    on_ready: Callable[[str], None],
) -> None:
    """Mount the volume that ``dial`` reaches at ``mountpoint`` as ``name``, and serve it until it is
    unmounted.

    ``on_ready`` is called with a line on how names and data are cached. ``timeout`` is in seconds for each
    operation. The mount's statistics are served at a socket in the directory ``numbers``. Signals are as of
    the binding. Raises LocalError if it cannot mount.
    """
    tree = RemoteFs(dial, timeout)
    state = _StatsSource(tree, MountStats(name, str(mountpoint)))
    served = contextlib.nullcontext() if numbers is None else serve_stats(numbers, state.numbers)
    if binding == "fuse-python" or (binding == "auto" and not has_many_uids()):
        with served:
            libfuse2.mount_and_serve(
                PathAdapter(tree),
                mountpoint,
                name=name,
                allow_other=allow_other,
                read_only=read_only,
                on_ready=lambda: on_ready(state.is_up("nothing is kept (fuse-python)")),
            )
        return
    channels: list[CallbackChannel] = []

    def ready(kernel: FuseDevice) -> None:
        channels.append(CallbackChannel(tree, dial, kernel, timeout))
        channels[0].start()
        names = "names, " if kernel.caches_names else ""
        on_ready(state.is_up(f"{names}attributes and data are kept until they are recalled", kernel))

    options = [option for option, wanted in (("allow_other", allow_other), ("ro", read_only)) if wanted]
    try:
        with served:
            server.mount_and_serve(
                tree, mountpoint, name=name, options=options, prefetch=tree.prefetcher.ask, on_ready=ready
            )
    finally:
        for each in channels:
            each.stop()
