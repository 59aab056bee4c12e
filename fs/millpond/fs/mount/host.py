"""Edge: mounts a device's volume here, through /dev/fuse itself or, where that cannot be, fuse-python."""

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
from millpond.fs.mount.stats_socket import offered
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.linux.confinement.userns import has_many_uids

_TIMEOUT = 15.0
BINDINGS = ("auto", "raw", "fuse-python")


class _State:
    """What a mount can tell of itself."""

    def __init__(self, tree: RemoteFs, about: MountStats) -> None:
        self._tree, self._about = tree, about
        self._kernel: FuseDevice | None = None

    def is_up(self, how: str, kernel: FuseDevice | None = None) -> str:
        """It is mounted, and how; the same."""
        self._about, self._kernel = replace(self._about, how=how), kernel
        return how

    def numbers(self) -> MountStats:
        """Those of now."""
        meter = self._tree.lanes.meter
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
    unmounted. ``on_ready`` is told how names and data are kept. ``timeout`` is in seconds for each operation.
    Its numbers can be asked for in the directory ``numbers``.

    Signals are as of the binding. Raises LocalError if it cannot mount.
    """
    tree = RemoteFs(dial, timeout)
    state = _State(tree, MountStats(name, str(mountpoint)))
    told = contextlib.nullcontext() if numbers is None else offered(numbers, state.numbers)
    if binding == "fuse-python" or (binding == "auto" and not has_many_uids()):
        with told:
            libfuse2.mount_and_serve(
                PathAdapter(tree),
                mountpoint,
                name=name,
                allow_other=allow_other,
                read_only=read_only,
                on_ready=lambda: on_ready(state.is_up("nothing is kept (fuse-python)")),
            )
        return
    recalls: list[CallbackChannel] = []

    def ready(kernel: FuseDevice) -> None:
        recalls.append(CallbackChannel(tree, dial, kernel, timeout))
        recalls[0].start()
        names = "names, " if kernel.keeps_names else ""
        on_ready(state.is_up(f"{names}attributes and data are kept until they are recalled", kernel))

    options = [option for option, wanted in (("allow_other", allow_other), ("ro", read_only)) if wanted]
    try:
        with told:
            server.mount_and_serve(
                tree, mountpoint, name=name, options=options, prefetch=tree.fetching.ask, on_ready=ready
            )
    finally:
        for each in recalls:
            each.stop()
