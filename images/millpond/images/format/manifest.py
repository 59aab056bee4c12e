# SPDX-License-Identifier: Apache-2.0
"""Pure: the manifest of a device's image: which bytes of it are used, and what it was made of."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from millpond.base.errors import ConfigError
from millpond.base.schema import dump, load

BLOCK = 4096
"""What offsets and lengths are multiples of."""
MAX_RANGE = 4 << 20
"""A range is read, checked and written at once."""
EDGE = 1 << 20
"""The partition table, and its backup, lie within the first and the last so many bytes of an image."""
MAX_IMAGE = 64 << 30
MAX_SEED = 16 << 20
MAX_TEXT = 16 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]{0,126}")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes that are used."""

    offset: int
    bytes: int
    sha256: str

    @property
    def end(self) -> int:
        """Return the offset behind the last byte."""
        return self.offset + self.bytes


@dataclass(frozen=True, slots=True)
class Image:
    """The file of an image. Bytes outside of ``ranges`` are holes and need not be written."""

    file: str
    bytes: int
    sha256: str
    ranges: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True)
class SeedPlace:
    """The hole in the image that takes the device's identity."""

    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ImageFile:
    """Another file that belongs to the image, such as its kernel."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackageRecord:
    """A package that went into the image, and its source."""

    name: str
    version: str
    source: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image and its purpose. Of two images of a board, the one with the greater ``serial`` is later."""

    name: str
    version: str
    serial: int
    board: str
    architecture: str
    image: Image
    seed: SeedPlace
    files: tuple[ImageFile, ...] = ()
    packages: tuple[PackageRecord, ...] = ()


def loads(text: str, where: str) -> Manifest:
    """Parse a manifest from JSON; ``where`` names it in errors. Raises ConfigError that names the key."""
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{where}: too long for a manifest")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    manifest = load(Manifest, content, where)
    check(manifest, where)
    return manifest


def dumps(manifest: Manifest) -> str:
    """Return the manifest as JSON that ``loads`` takes. Raises ConfigError for one that it would refuse."""
    check(manifest, "manifest")
    return json.dumps(dump(manifest), indent=1) + "\n"


def check(manifest: Manifest, where: str) -> None:
    """Raise ConfigError unless every name, digest, offset and length is possible."""
    if manifest.name != "millpond":
        raise ConfigError(f"{where}: name: this is no image of millpond")
    check_image(manifest.image, f"{where}: image")
    _check_seed(manifest, f"{where}: seed")
    for number, file in enumerate(manifest.files):
        at = f"{where}: files[{number}]"
        _check_name(file.file, at)
        _check_digest(file.sha256, at)
        if not 0 <= file.bytes <= MAX_IMAGE:
            raise ConfigError(f"{at}: bytes: {file.bytes} can not be")


def check_image(image: Image, where: str) -> None:
    """Raise ConfigError unless the ranges are aligned, bounded, ascending and inside the image."""
    _check_name(image.file, where)
    _check_digest(image.sha256, where)
    if not 2 * EDGE <= image.bytes <= MAX_IMAGE or image.bytes % BLOCK:
        raise ConfigError(f"{where}: bytes: {image.bytes} is no multiple of {BLOCK} from 2 MiB to 64 GiB")
    if not image.ranges or image.ranges[0].offset:
        raise ConfigError(f"{where}: ranges: the first must be at 0, where the partition table is")
    end = 0
    for number, used in enumerate(image.ranges):
        _check_range(used, f"{where}: ranges[{number}]")
        if not end <= used.offset <= used.end <= image.bytes:
            raise ConfigError(f"{where}: ranges[{number}]: overlaps the one before, or the image's end")
        end = used.end


def _check_range(used: ByteRange, where: str) -> None:
    _check_digest(used.sha256, where)
    if used.offset % BLOCK or used.bytes % BLOCK or not 0 < used.bytes <= MAX_RANGE:
        raise ConfigError(f"{where}: offset and bytes must be multiples of {BLOCK}, bytes 4 MiB at most")


def _check_seed(manifest: Manifest, where: str) -> None:
    seed, end = manifest.seed, manifest.seed.offset + manifest.seed.bytes
    if seed.offset % BLOCK or seed.bytes % BLOCK or not 0 < seed.bytes <= MAX_SEED:
        raise ConfigError(f"{where}: offset and bytes must be multiples of {BLOCK}, bytes 16 MiB at most")
    if not EDGE <= seed.offset <= end <= manifest.image.bytes:
        raise ConfigError(f"{where}: not inside the image, behind its first MiB")
    if any(used.offset < end and seed.offset < used.end for used in manifest.image.ranges):
        raise ConfigError(f"{where}: the image has bytes of its own there")


def _check_name(name: str, where: str) -> None:
    if not _FILE_NAME.fullmatch(name):
        raise ConfigError(f"{where}: file: {name!r:.40} can not be a file's name here")


def _check_digest(digest: str, where: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: sha256: {digest!r:.40} is none")
