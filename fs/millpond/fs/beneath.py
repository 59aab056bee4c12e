"""Edge: descriptors of directories below a root, reached never leaving it nor following a link."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator, Sequence

from millpond.fs.volume import components, failure

_SYS_OPENAT2 = 437  # the same on every processor
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 3800  # bytes of path per system call, below PATH_MAX of 4096

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_HOW = _OpenHow(_DIRECTORY, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)


@contextlib.contextmanager
def parent_of(root: int, path: str) -> Iterator[tuple[int, str]]:
    """The directory that holds ``path``, valid in the with block, and the last name; ``.`` for the root.

    Raises OSError: EINVAL for a path that is not plain, ELOOP or ENOTDIR if a component is a symbolic link.
    """
    names = components(path)
    if len(names) < 2:  # nothing to walk through
        yield root, names[0] if names else "."
        return
    descriptor = _walk(root, names[:-1])
    try:
        yield descriptor, names[-1]
    finally:
        os.close(descriptor)


def _walk(root: int, names: Sequence[str]) -> int:
    current = root
    for piece in _pieces(names):
        try:
            following = _open_beneath(current, piece)
        finally:
            if current != root:
                os.close(current)
        current = following
    return current


def _pieces(names: Sequence[str]) -> Iterator[str]:
    """The path in pieces short enough for the kernel."""
    piece, size = [names[0]], len(os.fsencode(names[0]))
    for name in names[1:]:
        length = len(os.fsencode(name)) + 1
        if size + length > _PIECE:
            yield "/".join(piece)
            piece, size = [], 0
        piece.append(name)
        size += length
    yield "/".join(piece)


def _open_beneath(directory: int, path: str) -> int:
    result: int = _libc.syscall(
        ctypes.c_long(_SYS_OPENAT2),
        ctypes.c_int(directory),
        os.fsencode(path),
        ctypes.byref(_HOW),
        ctypes.c_size_t(ctypes.sizeof(_HOW)),
    )
    if result >= 0:
        return result
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EPERM):  # before Linux 5.6, or a filter that does not know it
        return _open_step_by_step(directory, path)
    raise failure(code, path)


def _open_step_by_step(directory: int, path: str) -> int:
    current = directory
    for name in path.split("/"):
        try:
            following = os.open(name, _DIRECTORY, dir_fd=current)
        finally:
            if current != directory:
                os.close(current)
        current = following
    return current
