# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): masks: the keystream of AES-128 in counter mode (NIST SP 800-38A) as integers,
added to values modulo a power of two: in C where a compiler built it and the processor has vector AES
instructions, else by OpenSSL's cipher. Both give the same words.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from millpond.aggregate.kernels import Words
from millpond.aggregate.masking.keys import Mask
from millpond.aggregate.masking.words import PART_BYTES, WordVector
from millpond.base import shared_library

LIBRARY = Path(__file__).with_name("_masks.so")
_VERSION, _MOST_MASKS = 1, 64
_KEY_BYTES, _NONCE_BYTES, _COUNTED = 16, 8, 16
_ZEROS = bytes(PART_BYTES)


class MaskedVector(WordVector):
    """A vector of words to which masks are added."""

    def add_masks(self, masks: Sequence[Mask]) -> None:
        """Add masks: their first words to the figures."""
        stream = mask_stream(masks)
        stream.add(self.figures)
        _add_by_parts(stream, self.values)


class MaskStream(Protocol):
    """Masks that are added to the parts of one vector, one part after the other."""

    def add(self, part: Words) -> None:
        """Add the masks to the next part: at most PART_BYTES and, but for the last, whole blocks of AES."""


class OpensslStream:
    """Masks by OpenSSL's cipher."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        first = bytes(_COUNTED - _NONCE_BYTES)
        self._streams = [
            (
                Cipher(
                    AES(each.seed[:_KEY_BYTES]), CTR(each.seed[_KEY_BYTES:][:_NONCE_BYTES] + first)
                ).encryptor(),
                np.subtract if each.subtract else np.add,
            )
            for each in masks
        ]
        self._memory = np.empty(PART_BYTES, np.uint8)

    def add(self, part: Words) -> None:
        mask, zeros = self._memory[: part.nbytes], memoryview(_ZEROS)[: part.nbytes]
        for stream, change in self._streams:
            stream.update_into(zeros, mask.data)
            change(part, mask.view(part.dtype), out=part)


class NativeStream:
    """Masks in C. Raises LocalError without the library."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        self._add = shared_library.load(LIBRARY, _VERSION).add_masks
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._add.argtypes = (
            pointer,
            size,
            number,
            ctypes.c_uint64,
            ctypes.c_char_p,
            ctypes.c_char_p,
            number,
        )
        self._add.restype, self._block = None, 0
        groups = [masks[start : start + _MOST_MASKS] for start in range(0, len(masks), _MOST_MASKS)]
        self._groups = [
            (b"".join(each.seed for each in group), bytes(each.subtract for each in group), len(group))
            for group in groups
        ]

    def add(self, part: Words) -> None:
        for group in self._groups:
            self._add(part.ctypes.data, part.nbytes, part.itemsize == 8, self._block, *group)
        self._block += part.nbytes // _COUNTED


@functools.cache
def _is_native() -> bool:
    return shared_library.is_usable(LIBRARY, _VERSION) and bool(
        shared_library.load(LIBRARY, _VERSION).is_supported()
    )


def mask_stream(masks: Sequence[Mask]) -> MaskStream:
    """Return what adds masks, in C where that can be."""
    return NativeStream(masks) if _is_native() else OpensslStream(masks)


def mask_add(words: Words, masks: Sequence[Mask]) -> None:
    """Add masks to ``words``."""
    _add_by_parts(mask_stream(masks), words)


def _add_by_parts(stream: MaskStream, words: Words) -> None:
    step = PART_BYTES // words.itemsize
    for start in range(0, len(words), step):
        stream.add(words[start : start + step])
