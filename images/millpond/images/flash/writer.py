# SPDX-License-Identifier: Apache-2.0
"""Edge (a medium): writes an image so that at no moment the target claims to be what it is not yet."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from millpond.base.errors import LocalError, RemoteError
from millpond.images.flash.block_device import BlockMedium
from millpond.images.flash.gpt_edges import GptEdges
from millpond.images.format.manifest import BLOCK, MAX_RANGE, Manifest

Phase = Literal["writing", "verifying"]
Watch = Callable[[Phase, int], None]
"""Told of so many more bytes."""
_SYNC_BYTES = 16 << 20  # what the kernel has in hand at most, or the progress would be a lie
_LEFT = "it is left without a partition table; the same command begins anew"
_UNKNOWN = "it could not be wiped, so what was on it may be damaged"


def amount(manifest: Manifest) -> int:
    """Return the bytes that are written, and read back."""
    return sum(used.bytes for used in manifest.image.ranges) + manifest.seed.bytes


def flash(image: Path, manifest: Manifest, medium: BlockMedium, seed: bytes, watch: Watch) -> int:
    """Write an image and a seed (b"" for none) to a medium, and verify both. Returns the bytes written.

    Raises LocalError if the image is not what its manifest says, RemoteError if the medium fails or does not
    hold what was written. However it ends, the target is whole or has no partition table.
    """
    if len(seed) > manifest.seed.bytes:
        raise LocalError(f"the seed has {len(seed)} bytes, the image has room for {manifest.seed.bytes}")
    with image.open("rb", buffering=0) as file:
        _Flashing(file, manifest, medium, watch).run(seed)
    return amount(manifest)


class _Flashing:
    """One run of the writer. Every write is noted with its digest and compared by that."""

    def __init__(self, file: BinaryIO, manifest: Manifest, medium: BlockMedium, watch: Watch) -> None:
        self._file, self._manifest, self._medium, self._watch = file, manifest, medium, watch
        self._held = GptEdges(manifest.image.bytes)
        self._written: list[tuple[int, int, bytes]] = []
        self._unsynced = 0
        self._at = 0

    def run(self, seed: bytes) -> None:
        """Write and verify in the order that makes a cut at any byte harmless: verify first, then make it
        count.
        """
        with self._trouble(_UNKNOWN):
            self._medium.wipe()
        self._write_body(seed)
        self._held.draw_identifiers(lambda: uuid.uuid4().bytes_le)
        self._verify()
        try:
            for pieces in (self._held.rest(), self._held.headers()):
                for data, offset in pieces:
                    self._write(memoryview(data), offset)
                self._verify()
            self._write(memoryview(self._held.first_sector()), 0)
            self._verify_first()
        except (RemoteError, KeyboardInterrupt):
            with contextlib.suppress(OSError):  # a medium that fails may fail at this, too
                self._medium.wipe()
            raise

    def _write_body(self, seed: bytes) -> None:
        place = self._manifest.seed
        for used in self._manifest.image.ranges:
            data = self._read(used.offset, used.bytes)
            if hashlib.sha256(data).hexdigest() != used.sha256:
                raise LocalError(
                    f"{self._file.name}: damaged at byte {used.offset}: fetch or build it again; "
                    f"{self._medium.path} is left without a partition table"
                )
            self._take(data, used.offset)
        whole = seed.ljust(place.bytes, b"\0")
        for start in range(0, place.bytes, MAX_RANGE):
            self._take(whole[start : start + MAX_RANGE], place.offset + start)

    def _take(self, data: bytes, offset: int) -> None:
        rest, at = self._held.keep(memoryview(data), offset)
        if rest:
            self._write(rest, at)
        self._watch("writing", len(data))

    def _read(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        parts = []
        while length and (part := self._file.read(length)):
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _write(self, data: memoryview, offset: int) -> None:
        self._at = offset
        with self._trouble():
            self._medium.write(data, offset)
            self._unsynced += len(data)
            if self._unsynced >= _SYNC_BYTES:
                self._medium.sync()
                self._unsynced = 0
        self._written.append((offset, len(data), hashlib.sha256(data).digest()))

    def _verify(self) -> None:
        """Read back all that was written since the last time."""
        with self._trouble():
            self._medium.settle()
            for offset, length, digest in self._written:
                self._at = offset
                self._compare(offset, length, digest)
                self._watch("verifying", length)
        self._written.clear()

    def _compare(self, offset: int, length: int, digest: bytes) -> None:
        begin, end = offset // BLOCK * BLOCK, -(-(offset + length) // BLOCK) * BLOCK
        found = self._medium.read(end - begin, begin)[offset - begin :][:length]
        if hashlib.sha256(found).digest() != digest:
            raise RemoteError(
                f"{self._medium.path} does not hold what was written at byte {offset}: it is worn out, or "
                f"smaller than it says; {_LEFT}"
            )

    def _verify_first(self) -> None:
        with self._trouble():
            self._medium.settle()
            data = self._held.first_blocks()
            self._compare(0, len(data), hashlib.sha256(data).digest())

    @contextlib.contextmanager
    def _trouble(self, left: str = _LEFT) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f"{self._medium.path}: {error.strerror} near byte {self._at}"
            raise RemoteError(f"{where}; {left}") from None
