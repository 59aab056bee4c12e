# SPDX-License-Identifier: Apache-2.0
"""Entry: mount a device's volume on the device: ``python -m millpond.fs.mount.device BACKING MOUNTPOINT``.

The private part is the flash's own directory (``volume_root``); this process serves the public part alone.
Prints one line when the mount is up: ``ready``, and how public files are read and written. SIGTERM, or the
end of the parent process, unmounts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path

from millpond.base.errors import LocalError, MillpondError
from millpond.fs.coherence.coherent_fs import CoherentFs
from millpond.fs.coherence.device_client import DeviceDelegationBreaker
from millpond.fs.coherence.device_fs import DeviceFs
from millpond.fs.coherence.removed_files import RemovedFiles
from millpond.fs.fuse import server
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.fuse.mounts import has_fuse_python
from millpond.fs.fuse.operation_log import OperationLog
from millpond.fs.mount.volume_root import is_laid_out, lay_out, take_away
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.file_locks import FileLocks
from millpond.fs.store.layout import PUBLIC
from millpond.fs.vfs.inode_api import ROOT, InodeFs, KnownFile
from millpond.fs.vfs.kernel_memory import KernelMemory
from millpond.linux.confinement.userns import has_many_uids
from millpond.linux.descriptors import allow_most
from millpond.linux.malloc import trim_heap
from millpond.linux.syscalls import die_with_parent

_SPARE = 8  # more descriptors than any one operation opens
_MARK = 0.75  # of the descriptors that there may be: the others last while the kernel forgets


def main(argv: list[str] | None = None) -> int:
    """Mount and serve until the end. Returns 0, or 1 with one line on standard error."""
    arguments = _parser().parse_args(argv)
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before prctl took effect
        return 0
    try:
        _mount(arguments)
    except (MillpondError, OSError) as error:
        print(f"millpond.fs.mount.device: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millpond.fs.mount.device", description="Mount a device's volume on the device."
    )
    parser.add_argument("backing", type=Path, help="the flash directory, with its public and private part")
    parser.add_argument("mountpoint", type=Path, help="an empty directory, or the root of a volume")
    parser.add_argument("--name", default="millpond", help="what the mount is called in the table of mounts")
    parser.add_argument(
        "--binding",
        choices=("auto", "raw", "fuse-python"),
        default="auto",
        help="how the kernel is talked to; by itself fuse-python where it cannot read and write files itself",
    )
    parser.add_argument(
        "--locks", type=Path, help="the socket of the delegation manager, where hosts share the volume"
    )
    return parser


def _mount(arguments: argparse.Namespace) -> None:
    backing, mountpoint, binding = arguments.backing, arguments.mountpoint, arguments.binding
    try:
        root = os.open(backing / PUBLIC, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise LocalError(f"{backing}: cannot be a volume: {error.strerror}") from None
    with contextlib.ExitStack() as mounted:
        mounted.callback(os.close, root)
        if not is_laid_out(mountpoint):  # the agent lays it out itself, to survive this process
            lay_out(backing, mountpoint)
            mounted.callback(take_away, mountpoint)
        mountpoint /= PUBLIC
        refusal = "" if binding == "fuse-python" else server.passthrough_refusal(mountpoint, root)
        by_path = binding == "fuse-python" or (binding == "auto" and bool(refusal) and has_fuse_python())
        inodes = BackingFs(root, chown_new=_may_chown())
        inodes.last_descriptor = allow_most() - _SPARE  # each file that the kernel has looked up takes one
        tree: InodeFs = inodes
        removed: RemovedFiles | None = None
        memory = _descriptor_memory(inodes)
        if arguments.locks:
            breaker = mounted.enter_context(DeviceDelegationBreaker(arguments.locks))
            if not by_path:
                removed = RemovedFiles(inodes, lambda: breaker.bitmap)
                mounted.callback(removed.stop)
            tree = _coherent(inodes, breaker, None if by_path else memory)
        if by_path:
            _mount_by_fuse_python(tree, mountpoint, arguments.name, refusal)
        else:
            operations = OperationLog(inodes.path_of)
            _mount_raw(tree, root, mountpoint, arguments.name, refusal, operations, removed, memory)


def _mount_raw(
    tree: InodeFs,
    root: int,
    mountpoint: Path,
    name: str,
    refusal: str,
    operations: OperationLog,
    removed: RemovedFiles | None,
    memory: KernelMemory,
) -> None:
    def ready(kernel: FuseDevice) -> None:
        if removed:
            removed.start(kernel)
            if kernel.prunes:  # an earlier one forgets what a lookup does not find
                memory.start(kernel)
        _print_ready(how)

    how = f"by this process ({refusal})" if refusal else "by the kernel itself (FUSE passthrough)"
    server.mount_and_serve(
        tree,
        mountpoint,
        name=name,
        backing=root,
        operations=operations,
        on_ready=ready,
    )


def _descriptor_memory(inodes: BackingFs) -> KernelMemory:
    """Return what has the kernel forget the files found longest ago, by their nodes, in time."""

    def oldest() -> list[KnownFile]:
        return [(node, ROOT, b"") for node in inodes.nodes_of(None)]

    return KernelMemory(int(inodes.last_descriptor * _MARK), lambda: len(oldest()), oldest)


def _mount_by_fuse_python(tree: InodeFs, mountpoint: Path, name: str, refusal: str) -> None:
    """Mount through fuse-python, imported here alone: the process lasts, and holds only the code of its own
    binding.
    """
    from millpond.fs.fuse import libfuse2
    from millpond.fs.vfs.path_adapter import PathAdapter

    how = f"through fuse-python{f', since {refusal}' if refusal else ''}"
    libfuse2.mount_and_serve(
        PathAdapter(tree), mountpoint, name=name, allow_other=True, on_ready=lambda: _print_ready(how)
    )


def _coherent(
    inodes: BackingFs,
    breaker: DeviceDelegationBreaker,
    memory: KernelMemory | None,
) -> InodeFs:
    locks = FileLocks(inodes, breaker.await_hosts, breaker.is_settled)
    if memory:
        return DeviceFs(inodes, breaker, memory, locks)
    return CoherentFs(inodes, breaker.write_intent, breaker.recall_writer, locks)


def _may_chown() -> bool:
    """Return whether new files can belong to the user that creates them."""
    return os.geteuid() == 0 and has_many_uids()


def _print_ready(how: str) -> None:
    trim_heap()
    print(f"ready: files are read and written {how}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
