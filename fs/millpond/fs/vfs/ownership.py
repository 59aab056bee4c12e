# SPDX-License-Identifier: Apache-2.0
"""Pure: the owners of a volume's files as a mount shows them, and back (as ``idmap=user``, ``uid=`` and
``gid=`` of sshfs).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace

from millpond.fs.vfs.inode_api import SetAttr
from millpond.fs.vfs.path_api import Attributes, Owner, os_error


class OwnerMap:
    """Files that belong to the server show as ``own``, the user that mounts; others as they are. With ``uid``
    all show as this user's, with ``gid`` as this group's, whoever's they are.

    ``of_server`` returns the owner of what the server makes; None if it is not known yet, or if the server
    gives new files to their makers, whose numbers then mean the same on both sides.
    """

    def __init__(
        self,
        of_server: Callable[[], Owner | None] = lambda: None,
        own: Owner | None = None,
        uid: int | None = None,
        gid: int | None = None,
    ) -> None:
        self._of_server, self._own, self._uid, self._gid = of_server, own, uid, gid

    def shown(self, found: Attributes) -> Attributes:
        """Return attributes with the owner that the mount shows."""
        uid, gid = self.ids(found.uid, found.gid)
        return found if (uid, gid) == (found.uid, found.gid) else replace(found, uid=uid, gid=gid)

    def ids(self, uid: int, gid: int) -> tuple[int, int]:
        """Return the user and the group that the mount shows for those of a file."""
        server, own = self._of_server(), self._own
        if server and own:
            uid = own.uid if uid == server.uid else uid
            gid = own.gid if gid == server.gid else gid
        return _either(self._uid, uid), _either(self._gid, gid)

    def stored(self, changes: SetAttr) -> SetAttr:
        """Return changes with the owner that the volume stores. Raises OSError: EPERM for another owner than
        the one that all files show.
        """
        if changes.uid is None and changes.gid is None:
            return changes
        server, own = self._of_server() or Owner(-1, -1), self._own or Owner(-1, -1)
        uid = _stored(changes.uid, self._uid, own.uid, server.uid)
        gid = _stored(changes.gid, self._gid, own.gid, server.gid)
        return replace(changes, uid=uid, gid=gid)


def _either(number: int | None, other: int) -> int:
    return other if number is None else number


def _stored(wanted: int | None, everybody: int | None, own: int, server: int) -> int | None:
    if everybody is not None and wanted is not None:
        if wanted != everybody:
            raise os_error(errno.EPERM)
        return None  # it is so already, as far as the mount shows
    return server if wanted == own and server >= 0 else wanted
