# SPDX-License-Identifier: Apache-2.0
"""Pure: which extended attributes files have, and how large they may be.

Only ``user.*`` names exist in the public part. A host must not set what the kernel of a device acts on, nor a
device what that of a host does: ``security.capability`` makes a program root, ``security.*`` else and
``system.posix_acl_*`` decide about access, ``trusted.*`` about overlays.
"""

from __future__ import annotations

import errno
from typing import Final

from millpond.fs.vfs.path_api import os_error

MAX_VALUE: Final = 1 << 16
"""The most bytes of a value (XATTR_SIZE_MAX)."""

MAX_LIST: Final = 1 << 16
"""The most bytes of a file's names, each with its NUL (XATTR_LIST_MAX)."""

_MAX_NAME = 255
_PREFIX = b"user."


def is_user_name(name: bytes) -> bool:
    """Return whether an extended attribute has a name that files of the public part can have."""
    return name.startswith(_PREFIX) and len(_PREFIX) < len(name) <= _MAX_NAME and b"\0" not in name


def user_name(name: bytes) -> bytes:
    """Return ``name`` if it is one of ``user.*``. Raises OSError: EOPNOTSUPP if it is in another namespace,
    ERANGE if it is too long, as a kernel says, and EINVAL if it is none.
    """
    if not name.startswith(_PREFIX):
        raise os_error(errno.EOPNOTSUPP)
    if len(name) > _MAX_NAME:
        raise os_error(errno.ERANGE)
    if not is_user_name(name):
        raise os_error(errno.EINVAL)
    return name
