# SPDX-License-Identifier: Apache-2.0
"""Pure: masks: the keystream of ChaCha20 (RFC 8439) as integers, added to values modulo 2**64."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

Words = NDArray[np.uint64]
_BLOCK = 1 << 15  # values, which stay in a processor's cache with their mask
_ZEROS = bytes(8 * _BLOCK)


def mask_add(words: Words, seed: bytes, *, subtract: bool = False) -> None:
    """Add the mask of a ``seed`` of 32 bytes, which is used for one mask alone, to ``words``, or subtract
    it.
    """
    stream = Cipher(ChaCha20(seed, bytes(16)), None).encryptor()
    mask = np.empty(_BLOCK, np.uint64)
    change = np.subtract if subtract else np.add
    for start in range(0, len(words), _BLOCK):
        part = words[start : start + _BLOCK]
        zeros = memoryview(_ZEROS)[: part.nbytes]
        stream.update_into(zeros, mask.data.cast("B"))
        change(part, mask[: len(part)].astype("<u8", copy=False), out=part)
