"""Edge: mounts a device's volume here, through /dev/fuse itself or, where that cannot be, fuse-python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millpond.fs import fuse, raw
from millpond.fs.by_path import ByPath
from millpond.fs.client import RemoteTree
from millpond.fs.connection import Dial
from millpond.fs.kernel import Kernel
from millpond.fs.recalls import Recalls
from millpond.linux.sandbox import has_many_uids

_TIMEOUT = 15.0
BINDINGS = ("auto", "raw", "fuse-python")


def mount_and_serve(
    dial: Dial,
    mountpoint: Path,
    *,
    name: str,
    allow_other: bool,
    read_only: bool = False,
    binding: str = "auto",
    timeout: float = _TIMEOUT,
    on_ready: Callable[[str], None],
) -> None:
    """Mount the volume that ``dial`` reaches at ``mountpoint`` as ``name``, and serve it until it is
    unmounted. ``on_ready`` is told how names and data are kept. ``timeout`` is in seconds for each operation.

    Signals are as of the binding. Raises LocalError if it cannot mount.
    """
    tree = RemoteTree(dial, timeout)
    if binding == "fuse-python" or (binding == "auto" and not has_many_uids()):
        fuse.mount_and_serve(
            ByPath(tree),
            mountpoint,
            name=name,
            allow_other=allow_other,
            read_only=read_only,
            on_ready=lambda: on_ready("nothing is kept (fuse-python)"),
        )
        return
    recalls: list[Recalls] = []

    def ready(kernel: Kernel) -> None:
        recalls.append(Recalls(tree, dial, kernel, timeout))
        recalls[0].start()
        names = "names, " if kernel.keeps_names else ""
        on_ready(f"{names}attributes and data are kept until they are recalled")

    options = [option for option, wanted in (("allow_other", allow_other), ("ro", read_only)) if wanted]
    try:
        raw.mount_and_serve(tree, mountpoint, name=name, options=options, on_ready=ready)
    finally:
        for each in recalls:
            each.stop()
