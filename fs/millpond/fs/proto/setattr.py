# SPDX-License-Identifier: Apache-2.0
"""Pure: converts attributes to set into a message and back."""

from __future__ import annotations

from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import Now, SetAttr
from millpond.fs.vfs.path_api import within

_MAX_OFFSET = (1 << 63) - 1
_MAX_SECONDS = 1 << 40  # 34,000 years, within any file system's own clamp


def set_attributes(node: int, c: SetAttr, handle: int | None) -> p.SetAttributes:
    """Build the request to set attributes of a node, through an open file's ``handle`` if there is one."""
    times = {"atime": c.atime, "mtime": c.mtime}
    present = tuple(name for name, time in times.items() if time is Now.NOW)
    atime, mtime = (0 if isinstance(time, Now) else time for time in times.values())
    return p.SetAttributes(node, c.mode, c.uid, c.gid, c.size, atime, mtime, present, handle)


def requested_changes(request: p.SetAttributes) -> SetAttr:
    """Return the attributes that a request sets. Raises OSError: EINVAL for values that no file can have."""
    if request.size is not None:
        within(request.size, 0, _MAX_OFFSET)
    if request.mode is not None:
        within(request.mode, 0, 0o177777)
    times = {}
    for name, time in (("atime", request.atime), ("mtime", request.mtime)):
        if time is not None:
            within(time, -_MAX_SECONDS * 10**9, _MAX_SECONDS * 10**9)
        times[name] = Now.NOW if name in request.now else time
    return SetAttr(request.mode, request.uid, request.gid, request.size, times["atime"], times["mtime"])
