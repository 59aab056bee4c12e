# SPDX-License-Identifier: Apache-2.0
"""Edge (files): finds an image with its manifest, and describes a sparse file that is to become one."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from millpond.base.errors import ConfigError, LocalError
from millpond.images.format import manifest as manifests
from millpond.images.format.manifest import BLOCK, MAX_RANGE, MAX_TEXT, ByteRange, Image, Manifest

_ZEROS = bytes(MAX_RANGE)


def find(given: Path) -> tuple[Path, Manifest]:
    """Find an image and its manifest, from the path of either or of the folder that holds both.

    Raises ConfigError for a wrong manifest, LocalError where one of the two is missing.
    """
    path = _manifest_of(given)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_TEXT + 1).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not JSON") from None
    manifest = manifests.loads(text, str(path))
    image = path.parent / manifest.image.file
    if given.suffix == ".img" and given.name != image.name:
        raise LocalError(f"{path} is the manifest of {image.name}, not of {given.name}")
    if not image.is_file():
        raise LocalError(f"{image}: no such file, but {path.name} tells of it: run 'make image' again")
    if image.stat().st_size != manifest.image.bytes:
        raise LocalError(f"{image} is not as long as {path.name} says: run 'make image' again")
    return image, manifest


def _manifest_of(given: Path) -> Path:
    if given.is_dir():
        found = sorted(given.glob("millpond-*.json"))
        if len(found) != 1:
            raise LocalError(f"{given} holds {len(found)} manifests (millpond-*.json) of images; name one")
        return found[0]
    if given.suffix not in (".img", ".json"):
        raise LocalError(f"{given}: neither an image (.img), its manifest (.json) nor the folder with both")
    given.stat()
    path = given.with_suffix(".json")
    if not path.is_file():
        raise LocalError(
            f"{path}: no such file: an image is flashed by its manifest, which 'make image' makes"
        )
    return path


def describe(path: Path, used: Iterable[tuple[int, int]] = ()) -> Image:
    """Describe the file ``path`` as a manifest does. ``used`` is where the bytes that count begin and end,
    in ascending order; without it, all but the file's holes. Some file systems make holes of zeros that
    were written.

    Raises OSError, and ConfigError for a file that cannot be an image.
    """
    ranges, whole, end = [], hashlib.sha256(), 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for offset, length in _blocks(used or _data(file.fileno(), size)):
            _update_with_zeros(whole, offset - end)
            file.seek(offset)
            data = file.read(length)
            whole.update(data)
            ranges.append(ByteRange(offset, length, hashlib.sha256(data).hexdigest()))
            end = offset + length
    _update_with_zeros(whole, size - end)
    image = Image(path.name, size, whole.hexdigest(), tuple(ranges))
    manifests.check_image(image, str(path))
    return image


def _update_with_zeros(digest: hashlib._Hash, count: int) -> None:
    while count > 0:
        digest.update(memoryview(_ZEROS)[:count])
        count -= len(_ZEROS)


def _blocks(used: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield offset and length of what is used, in whole blocks, cut at multiples of the longest range."""
    end = 0
    for start, stop in used:
        offset = max(start // BLOCK * BLOCK, end)
        end = max(-(-stop // BLOCK) * BLOCK, end)
        while offset < end:
            cut = min(end, (offset // MAX_RANGE + 1) * MAX_RANGE)
            yield offset, cut - offset
            offset = cut


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    stop = 0
    while stop < size:
        try:
            start = os.lseek(descriptor, stop, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                return
            raise
        stop = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, stop
