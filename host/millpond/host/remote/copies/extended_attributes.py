# SPDX-License-Identifier: Apache-2.0
"""Edge (volumes): carries the extended attributes (``user.*``) of files that are copied between volumes."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from millpond.fs.vfs.inode_api import ExtendedFs, Node
from millpond.fs.vfs.path_adapter import BulkPathAdapter
from millpond.host.remote.copies.small_copies import naming

_MOST = 128  # of a file; the kernel bounds each value
_NOT_HELD = (errno.E2BIG, errno.ENOSPC, errno.EOPNOTSUPP, errno.EPERM)


def carry(here: BulkPathAdapter, source: str, there: BulkPathAdapter, target: str) -> bool:
    """Give a file the extended attributes of its source, and no others. Returns whether it has all: a file
    system may hold none, or none so large, and of a file 128 are carried. Raises CopyFailed.
    """
    with naming(here, source), here.extended(source) as (attributes, node):
        wanted, is_whole = _read(attributes, node)
    with naming(there, target), there.extended(target) as (attributes, node):
        known, _ = _read(attributes, node)
        for name in known.keys() - wanted.keys():
            with _passing(errno.ENODATA):
                attributes.remove(node, name)
        for name in [name for name, value in wanted.items() if known.get(name) != value]:
            is_held = False
            with _passing(*_NOT_HELD):
                attributes.set(node, name, wanted[name], 0)
                is_held = True
            is_whole &= is_held
    return is_whole


def _read(attributes: ExtendedFs, node: Node) -> tuple[dict[bytes, bytes], bool]:
    """Return the extended attributes of a file, and whether these are all."""
    found, names = dict[bytes, bytes](), tuple[bytes, ...]()
    with _passing(errno.EOPNOTSUPP):
        names = attributes.names(node)
    for name in sorted(names)[:_MOST]:
        with _passing(errno.ENODATA):  # removed meanwhile
            found[name] = attributes.get(node, name)
    return found, len(names) <= _MOST


@contextlib.contextmanager
def _passing(*codes: int) -> Iterator[None]:
    """Suppress an OSError with one of these numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in codes:
            raise
