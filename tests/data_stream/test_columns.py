# SPDX-License-Identifier: Apache-2.0
"""ReceivedSamples as columns: every tree comes out as it went in, and bad heads are refused."""

from __future__ import annotations

import contextlib
import math
import tracemalloc
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.utils.data import default_collate

from millpond.base.errors import LocalError, MillpondError, ProtocolError
from millpond.train.data.columns import Packed, ReceivedSamples, joined, pack, pack_batch, unpack

leaves = (
    some.none()
    | some.booleans()
    | some.integers(-(2**63), 2**63 - 1)
    | some.floats(allow_nan=False)
    | some.text(max_size=5)
    | some.binary(max_size=5)
    | some.lists(some.integers(0, 9), max_size=4).map(torch.tensor)
    | some.lists(some.integers(0, 9), max_size=4).map(lambda found: np.array(found, np.int16))
    | some.integers(0, 9).map(np.float32)
    | some.sampled_from([torch.zeros(2, 0), torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(True)])
)
trees = some.recursive(
    leaves,
    lambda inner: (
        some.lists(inner, max_size=3)
        | some.dictionaries(some.text(max_size=3), inner, max_size=3)
        | some.tuples(inner, inner)
    ),
    max_leaves=6,
)


def sent(packed: Packed) -> ReceivedSamples:
    payload = bytearray(b"".join(packed.pieces))
    assert len(payload) == packed.size
    return unpack(packed.head, memoryview(payload))


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(some.lists(trees, max_size=6))
def test_every_tree_comes_out_as_it_went_in(samples: list[Any]) -> None:
    assert all(same(each, found) for each, found in zip(samples, sent(pack(samples)), strict=True))


@given(trees, some.integers(1, 5))
def test_samples_of_one_structure_are_one_part(tree: Any, count: int) -> None:
    found = sent(pack([tree] * count))
    assert len(found) == count
    assert all(same(tree, each) for each in found)
    assert len(found.parts) == 1


def test_bytes_and_texts_stay_in_the_payload() -> None:
    samples = [{"jpg": bytes([number]) * 20_000, "txt": f"número {number}"} for number in range(100)]
    packed = pack(samples)
    payload = memoryview(bytearray(b"".join(packed.pieces)))
    tracemalloc.start()
    found = unpack(packed.head, payload)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list(found) == samples and peak < packed.size / 20


def test_bytes_that_are_no_text_are_refused_as_they_come() -> None:
    head = msgpack.packb([[2, ["str", "", None, [1, 2], 0, 3]]])
    with pytest.raises(ProtocolError, match="cannot be read"):
        unpack(head, memoryview(bytearray("éx".encode())))


def test_a_batch_is_what_collate_makes() -> None:
    samples = [{"x": torch.rand(2, 3), "n": (number, float(number), f"{number}")} for number in range(7)]
    found = sent(pack(samples))
    batch, wanted = joined(list(found.batches(2, 6))), default_collate(samples[2:6])
    assert torch.equal(batch["x"], wanted["x"])
    assert torch.equal(batch["n"][0], wanted["n"][0]) and torch.equal(batch["n"][1], wanted["n"][1])
    assert list(batch["n"][2]) == list(wanted["n"][2])
    both = joined([*found.batches(0, 3), *found.batches(3, 7)])
    assert torch.equal(both["x"], default_collate(samples)["x"])


def test_a_batch_of_the_data_set_is_sent_without_copies_of_samples() -> None:
    images, labels = torch.rand(5, 1, 4, 4), torch.arange(5)
    packed = pack_batch((images, labels), 5)
    assert packed.pieces[0].nbytes == images.numel() * 4
    found = sent(packed)
    image, label = list(found)[3]
    assert torch.equal(image, images[3]) and label == 3
    with pytest.raises(LocalError, match="a batch of 4 samples holds a tensor of shape"):
        pack_batch((images, labels), 4)


class Named(NamedTuple):
    x: int


@pytest.mark.parametrize("sample", [object(), {1: 2}, [{"a": object()}], Named(1), 2**70, {"a": 1 + 2j}])
def test_what_is_no_tree_of_tensors_is_refused(sample: Any) -> None:
    with pytest.raises(LocalError, match="a sample cannot be streamed: it"):
        pack([sample])


def test_bad_heads_are_refused() -> None:
    payload = memoryview(bytearray(16))
    bad: list[Any] = [
        [[1, ["tensor", "float32", [5], None, 0, 16]]],
        [[1, ["tensor", "float32", [4], None, 8, 16]]],
        [[1, ["tensor", "none", [4], None, 0, 16]]],
        [[1, ["int", "float32", [0], None, 0, 0]]],
        [[1, ["int", "int64", None, [[]], 0, 8]]],
        [[-1, ["int", "", [], None, 0, 8]]],
        [[2, ["array", "|O", [], None, 0, 16]]],
        [[2, ["bytes", "", None, [20, -4], 0, 16]]],
        [[2, ["tensor", "uint8", None, [[-4], [20]], 0, 16]]],
        [[2, ["plain", [1]]]],
        [[2, ["dict", ["a"], []]]],
        [[2, ["str", "", None, [2, 14], -1, 16]]],
        [[2, ["bytes", "", None, [0.5, 15.5], 0, 16]]],
        7,
    ]
    for each in bad:
        with pytest.raises(ProtocolError, match="cannot be read"):
            unpack(msgpack.packb(each), payload)


KINDS = some.sampled_from(["dict", "tuple", "list", "plain", "tensor", "array", "int", "str", "bytes", "x"])
NUMBERS = some.integers(-2, 20) | some.sampled_from([1 << 63, math.inf, 0.5, True])
TYPES = some.sampled_from(["float32", "<i4", "i4,(", "O", "<U3", "", 7])
LEAVES = some.tuples(KINDS, TYPES, some.lists(NUMBERS, max_size=2), some.none(), NUMBERS, NUMBERS)
NODES = some.recursive(
    LEAVES, lambda each: some.tuples(KINDS, some.lists(TYPES, max_size=2), some.lists(each))
)


@given(some.lists(some.tuples(NUMBERS, NODES), max_size=2), some.binary(max_size=40))
def test_heads_of_the_right_shape_raise_no_other_error(head: list[Any], payload: bytes) -> None:
    with contextlib.suppress(MillpondError):
        list(unpack(msgpack.packb(head), memoryview(bytearray(payload))))


@given(some.binary(max_size=40), some.binary(max_size=40))
def test_random_heads_raise_no_other_error(head: bytes, payload: bytes) -> None:
    with contextlib.suppress(MillpondError):
        list(unpack(head, memoryview(bytearray(payload))))
