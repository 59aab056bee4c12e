# SPDX-License-Identifier: Apache-2.0
"""What masked sums are made of: whole numbers, masks, keys, and shares of secrets."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from millpond.aggregate import kernels
from millpond.aggregate.exact import ExactSum, OutOfBounds, scale_of, shift_of
from millpond.aggregate.kernels import NativeKernels, NumpyKernels
from millpond.aggregate.masking import fixed_point, keys, shamir, stream
from millpond.aggregate.masking.member import threshold_of


def test_keys_are_derived_by_hkdf() -> None:
    secret, about = os.urandom(32), keys.digest("millpond mask", b"session")
    assert keys.derived(secret, "mask", b"session") == HKDF(SHA256(), 32, None, about).derive(secret)


def test_shares_give_the_secret_back_and_fewer_another() -> None:
    for count in (2, 3, 8, 36):
        threshold, secret = threshold_of(count), os.urandom(32)
        shares = dict(enumerate(shamir.split(secret, count, threshold, os.urandom), 1))
        chosen = random.Random(count).sample(sorted(shares), threshold)
        assert shamir.join({place: shares[place] for place in chosen}) == secret
        with pytest.raises(ValueError, match="no secret"):
            shamir.join({place: shares[place] for place in chosen[1:]})


@pytest.mark.parametrize(
    ("value", "bound", "figure"), [(2.0, 1.0, 0.0), (np.nan, 1.0, 0.0), (0.5, 1.0, np.nan), (0.5, 1e9, 0.0)]
)
def test_values_and_figures_that_a_sum_cannot_have_are_refused(
    value: float, bound: float, figure: float
) -> None:
    with pytest.raises(OutOfBounds):
        fixed_point.Quantiser(64, scale_of(1.0, 4), 1.0, bound, 4).write(
            np.array([value], np.float32), np.empty(1, np.uint64)
        )
        fixed_point.whole_figure(figure)


@pytest.mark.parametrize("kind", [NativeKernels, NumpyKernels])
@pytest.mark.parametrize("bits", [32, 64])
def test_values_become_the_whole_numbers_that_exact_sums_round_to(
    kind: type[NativeKernels | NumpyKernels], bits: int
) -> None:
    if kind is NativeKernels and not kernels.LIBRARY.exists():
        pytest.skip("no C compiler has built the kernels")
    values = np.random.default_rng(1).normal(size=1003).astype(np.float32)
    scale = scale_of(8.0, 3, fixed_point.bits_of_sum(bits))
    words = stream.MaskedVector(1003, bits).values
    assert kind().round_values(words, values, 0.3, shift_of(scale), 8.0)
    total = ExactSum(1003)
    total.begin(scale)
    total.add(values, 0.3)
    signed = words.astype(np.int32 if bits == 32 else np.int64).astype(np.float64)
    assert (signed / scale == total.totals(1003)).all()
    means, expected = np.empty(1003, np.float32), np.empty(1003, np.float32)
    kind().divide_words(means, words, 1 / scale, 7.0)
    total.divide(7.0, expected)
    assert (means == expected).all()
    for odd in (np.nan, np.inf, 9.0):
        values[500] = odd
        assert not kind().round_values(words, values, 0.3, shift_of(scale), 8.0)


@pytest.mark.parametrize("bits", [32, 64])
def test_masks_in_c_are_those_of_openssl(bits: int) -> None:
    if not stream._is_native():
        pytest.skip("this processor has no vector AES, or no compiler has built the masks")
    masks = [keys.Mask(os.urandom(32), subtract=bool(n % 3)) for n in range(70)]
    ours, theirs = stream.NativeStream(masks), stream.OpensslStream(masks)
    for size in (4, 16384, 8192, 1001):
        words, expected = stream.MaskedVector(size, bits), stream.MaskedVector(size, bits)
        ours.add(words.values)
        theirs.add(expected.values)
        assert words.values.any() and (words.data == expected.data).all(), size
