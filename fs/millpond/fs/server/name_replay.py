# SPDX-License-Identifier: Apache-2.0
"""Edge: makes files whose names a client had not flushed, or not certainly, when an earlier server ended."""

from __future__ import annotations

import errno

from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.coherence.lease_file import reclaiming
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto import async_create as n
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.bulk_files import make_again
from millpond.fs.vfs.bulk_api import SmallFile
from millpond.fs.vfs.inode_api import Buffer, Node
from millpond.fs.vfs.path_api import os_error, within


def replay_names(
    tree: BackingFs,
    delegations: DelegationManager,
    holder: Holder,
    directory: Node,
    request: n.ReplayNames,
    payload: Buffer,
) -> n.NamesReplayed:
    """Perform a ReplayNames request, as a change of the directory that others hear of. A file for which there
    is no room is not made: what was held for it ended with the earlier server. Raises WouldBlock and OSError.
    """
    files = _unpack(request.files, payload)
    inodes, errors = [0] * len(files), [0] * len(files)
    with reclaiming(), delegations.write_intent(holder, tree.inode(directory)):
        unchanged = delegations.may_reclaim(holder)
        for number, file in enumerate(files):
            try:
                sent = request.files[number].sent
                inodes[number] = make_again(tree, directory, file, sent=sent, unchanged=unchanged)
            except OSError as error:
                errors[number] = error.errno or errno.EIO
    return n.NamesReplayed(tuple(inodes), tuple(errors))


def _unpack(files: tuple[n.ReplayedName, ...], payload: Buffer) -> list[SmallFile]:
    """Return the files with their contents. Raises OSError: EINVAL if the payload is of another length, or a
    number is none that a file can have.
    """
    if len(files) > n.MAX_BATCH:
        raise os_error(errno.EMSGSIZE)
    left, found = memoryview(payload), list[SmallFile]()
    for file in files:
        size = within(file.size, 0, len(left))
        times = (within(time, 0, n.MAX_TIME) for time in (file.accessed, file.time))
        found.append(SmallFile(file.name, left[:size], within(file.mode, 0, 0o777), *times))
        left = left[size:]
    if left:
        raise os_error(errno.EINVAL)
    return found
