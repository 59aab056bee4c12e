# SPDX-License-Identifier: Apache-2.0
"""Files of jobs, for tests."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from millpond.train.job.files import JobFile


def written(files: Mapping[str, str | bytes], folder: Path) -> Path:
    """Write files by name below ``folder``, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(_bytes(content))
    return folder


def described(files: Mapping[str, str | bytes]) -> dict[str, JobFile]:
    """Return what is known of files without their contents."""
    found = {name: _bytes(content) for name, content in files.items()}
    return {name: JobFile(hashlib.sha256(data).hexdigest(), len(data)) for name, data in found.items()}


def packed(files: Mapping[str, str | bytes], **attributes: int) -> bytes:
    """Return a wheel of these files, all with the attributes of entries in a zip archive that are given."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            for key, value in attributes.items():
                setattr(entry, key, value)
            archive.writestr(entry, _bytes(content))
    return out.getvalue()


def no_contents(file: JobFile) -> Path:
    """Return no path: nobody may ask for one."""
    raise AssertionError(f"{file} was asked for")


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
