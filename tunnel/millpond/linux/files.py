# SPDX-License-Identifier: Apache-2.0
"""Edge: make changes of a directory durable, keep secrets, and compute digests of files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make names that were created, renamed or removed in ``folder`` durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_folders(folder: Path) -> None:
    """Let every user enter and list ``folder`` and those in it, whatever the umask is. Raises OSError."""
    for path, _, _ in os.walk(folder):
        Path(path).chmod(0o755)


def write_secret(file: Path, data: bytes) -> None:
    """Write a file that its owner alone may read. It is whole and on disk, or not there. Raises OSError."""
    fresh = file.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    fresh.rename(file)
    sync_folder(file.parent)


def sha256_of(path: Path) -> str:
    """Compute the SHA-256 of a file's contents, in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
