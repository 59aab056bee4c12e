# SPDX-License-Identifier: Apache-2.0
"""Encodings: C and numpy alike, bounds of what they lose, error feedback, bytes that are not valid."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from millpond.aggregate.encoding.codec import Codec, NativeCodec, library_of
from millpond.aggregate.encoding.layout import Bounds, Encoding
from millpond.aggregate.encoding.numpy_codec import NumpyCodec
from millpond.aggregate.encoding.update_encoder import UpdateEncoder
from millpond.aggregate.rules.mean import ExactMean
from millpond.aggregate.rules.rule import LEAST_RANGE
from millpond.train.protocol import PART_VALUES

Vector = NDArray[np.float32]
LIBRARY = library_of("int8")
IS_BUILT = pytest.mark.skipif(not LIBRARY.exists(), reason="no C compiler built it")
CODECS = [NumpyCodec, pytest.param(NativeCodec, marks=IS_BUILT)]
BFLOAT16, INT8, TOP = Encoding("bfloat16"), Encoding("int8"), Encoding("top-k", 0.1)
ALL = [BFLOAT16, INT8, TOP, Encoding("top-k", 0.5)]
INT8_VALUES, TOP_VALUES = INT8.block, TOP.block
SIZES = st.sampled_from([1, 2, 9, 64, INT8_VALUES, INT8_VALUES + 3, TOP_VALUES + 70])


def drawn(count: int, seed: int, exponents: tuple[int, int]) -> Vector:
    rng = np.random.default_rng(seed)
    values = rng.uniform(-1, 1, count) * 2.0 ** rng.integers(*exponents, count)
    values[rng.random(count) < 0.1] = 0.5  # equal magnitudes
    values[rng.random(count) < 0.1] *= -0.0
    return values.astype(np.float32)


VECTORS = st.builds(
    drawn, SIZES, st.integers(0, 2**32), st.sampled_from([(-6, 6), (-149, -90), (-130, 127), (0, 1)])
)


def encoded(
    codec: Codec, encoding: Encoding, values: Vector, kept: Vector | None = None
) -> tuple[Bounds, bytearray, Vector]:
    """Return the bounds, the bytes, and what is left."""
    out, left = bytearray(encoding.size(len(values))), np.zeros(len(values), np.float32)
    kept = np.zeros(len(values), np.float32) if kept is None else kept.copy()
    feedback = (kept.data.cast("B"), left.data.cast("B")) if encoding.feeds_back else ()
    return codec.encode(encoding, values.copy().data.cast("B"), out, *feedback), out, left


def decoded(codec: Codec, encoding: Encoding, data: bytearray, count: int) -> Vector | None:
    out = np.full(count, np.nan, np.float32)
    return out if codec.decode(encoding, data, out.data.cast("B")) else None


def known(found: Vector | None) -> Vector:
    assert found is not None
    return found


@IS_BUILT
@pytest.mark.parametrize("encoding", ALL, ids=str)
@given(values=VECTORS, bad=st.one_of(st.none(), st.sampled_from([math.nan, math.inf, -math.inf, 3.4e38])))
def test_both_codecs_give_the_same_bits(encoding: Encoding, values: Vector, bad: float | None) -> None:
    kept = values[::-1] * np.float32(0.3)
    if bad is not None:
        values[len(values) // 2] = bad
    native, numpy = (encoded(codec(), encoding, values, kept) for codec in (NativeCodec, NumpyCodec))
    if math.isnan(numpy[0].largest):
        assert math.isnan(native[0].largest) and math.isnan(native[0].squares)
        return
    assert native[0] == numpy[0]
    assert native[1] == numpy[1]
    assert native[2].tobytes() == numpy[2].tobytes()
    found = [known(decoded(codec(), encoding, native[1], len(values))) for codec in (NativeCodec, NumpyCodec)]
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("encoding", ALL, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1500, 10_000])
def test_a_value_that_is_not_finite_has_no_bounds(
    codec: Callable[[], Codec], encoding: Encoding, bad: float, place: int
) -> None:
    values = np.ones(10_001, np.float32)
    assert math.isfinite(encoded(codec(), encoding, values)[0].largest)
    values[place] = bad
    assert all(map(math.isnan, encoded(codec(), encoding, values)[0]))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("encoding", ALL, ids=str)
@given(values=VECTORS)
def test_bounds_are_those_of_the_decoded_values(
    codec: Callable[[], Codec], encoding: Encoding, values: Vector
) -> None:
    bounds, data, left = encoded(codec(), encoding, values)
    found = known(decoded(codec(), encoding, data, len(values)))
    assert bounds.largest == np.abs(found).max()
    assert bounds.squares == pytest.approx(float((found.astype(np.float64) ** 2).sum()), rel=1e-12)
    if encoding.feeds_back:
        assert np.array_equal(left, values - found)


@pytest.mark.parametrize("codec", CODECS)
@given(values=VECTORS)
def test_what_is_lost_is_bounded(codec: Callable[[], Codec], values: Vector) -> None:
    def found(encoding: Encoding) -> Vector:
        return known(decoded(codec(), encoding, encoded(codec(), encoding, values)[1], len(values)))

    wide = np.abs(values.astype(np.float64))
    assert (np.abs(found(BFLOAT16) - values.astype(np.float64)) <= wide * 2.0**-8 + 2.0**-133).all()
    by_int8, by_top = found(INT8), found(TOP)
    for span, _ in INT8.pieces(len(values)):
        most = wide[span].max()
        lost = np.abs(by_int8[span] - values[span].astype(np.float64))
        # half a step, and the rounding of the scale, of a quotient up to 127 and of a product
        assert (lost <= (most / 254 * (1 + 5e-5) if most >= 2.0**-100 else most)).all()
    for span, _ in TOP.pieces(len(values)):
        sent = by_top[span] != 0
        assert np.array_equal(by_top[span][sent], values[span][sent])
        if sent.any():
            assert wide[span][~sent].max(initial=0) <= wide[span][sent].min()
        assert sent.sum() <= TOP.size(span.stop - span.start) // 6


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    values = np.array([1, -2, 2, -1, 2, 0, 1, 0, 0, 0], np.float32)
    for codec in (NumpyCodec(), *([NativeCodec()] if LIBRARY.exists() else [])):
        data = encoded(codec, Encoding("top-k", 0.4), values)[1]
        found = known(decoded(codec, Encoding("top-k", 0.4), data, 10))
        assert found.tolist() == [1, -2, 2, 0, 2, 0, 0, 0, 0, 0]


def test_every_range_of_a_sum_is_of_whole_blocks() -> None:
    for size in (1, 9_000, 100_000, 1_000_000, 2_029_642, 250_000_000):
        found = ExactMean().range_values(size)
        for encoding in (*ALL, Encoding()):
            assert not found % encoding.block and not PART_VALUES % found
            encoder = UpdateEncoder(encoding, 3 * LEAST_RANGE + 5) if encoding != Encoding() else None
            assert encoder is None or encoder.is_end(found)


@pytest.mark.parametrize("encoding", [*ALL, Encoding()], ids=str)
def test_parts_are_independent_and_their_sizes_add_up(encoding: Encoding) -> None:
    values = drawn(3 * TOP_VALUES + 777, 1, (-6, 6))
    assert encoding.size(len(values)) == 3 * encoding.size(TOP_VALUES) + encoding.size(777)
    assert encoding.size(0) == 0
    if encoding.name == "float32":
        return
    whole = encoded(NumpyCodec(), encoding, values)[1]
    parts = [
        encoded(NumpyCodec(), encoding, part)[1]
        for part in np.split(values, range(TOP_VALUES, 4 * TOP_VALUES, TOP_VALUES))
    ]
    assert bytes(whole) == b"".join(parts)


def test_sizes_are_what_they_promise() -> None:
    count = 10 * TOP_VALUES
    assert INT8.size(count) / (4 * count) == pytest.approx(0.251, abs=1e-3)
    assert BFLOAT16.size(count) == 2 * count
    assert Encoding("top-k", 0.01).size(count) / (4 * count) == pytest.approx(0.015, abs=1e-4)
    assert [Encoding("top-k", 0.01).size(n) // 6 for n in (0, 1, 100, 101)] == [0, 1, 1, 2]


def changed(data: bytearray, place: int, value: bytes) -> bytearray:
    out = bytearray(data)
    out[place : place + len(value)] = value
    return out


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scale", [math.nan, -math.nan, math.inf, -math.inf, -1.0, -0.0])
@pytest.mark.parametrize("block", [0, 1])
def test_a_scale_that_can_be_none_is_refused(codec: Callable[[], Codec], scale: float, block: int) -> None:
    count = INT8_VALUES + 10
    data = encoded(codec(), INT8, np.ones(count, np.float32))[1]
    assert decoded(codec(), INT8, data, count) is not None
    bad = changed(data, block * INT8.size(INT8_VALUES), np.float32(scale).tobytes())
    assert decoded(codec(), INT8, bad, count) is None


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("positions", [(3, 3), (4, 3), (18, 20), (0, 65535)], ids=str)
@pytest.mark.parametrize("block", [0, 1])
def test_positions_that_are_beyond_or_not_ascending_are_refused(
    codec: Callable[[], Codec], positions: tuple[int, int], block: int
) -> None:
    count = block * TOP_VALUES + 20
    data = encoded(codec(), TOP, np.ones(count, np.float32))[1]
    assert decoded(codec(), TOP, data, count) is not None
    bad = changed(data, len(data) - 4, np.array(positions, np.uint16).tobytes())
    assert decoded(codec(), TOP, bad, count) is None


@pytest.mark.parametrize("codec", CODECS)
def test_buffers_of_other_sizes_are_not_touched(codec: Callable[[], Codec]) -> None:
    with pytest.raises(ValueError, match="no sizes for 8 values in int8"):
        codec().decode(INT8, bytearray(11), bytearray(32))
    with pytest.raises(ValueError, match="no sizes for 8 values in int8"):
        codec().encode(INT8, bytearray(32), bytearray(12), bytearray(32), bytearray(28))
    with pytest.raises(ValueError, match="no sizes for 8 values in top-k"):
        codec().encode(TOP, bytearray(32), bytearray(6))


def sent_by(encoder: UpdateEncoder, values: Vector, stop: int | None = None) -> Vector:
    """Return the values of an update as they are decoded, after its first ``stop`` values were sent."""
    size = len(values)
    bounds = encoder.encode(values.data.cast("B"), memoryview)
    encoder.sent(size if stop is None else stop)
    found = known(decoded(NumpyCodec(), encoder.encoding, bytearray(encoder.data(0, size)), size))
    assert bounds == (np.abs(found).max(), pytest.approx(float(np.linalg.norm(found.astype(np.float64)))))
    return found


@pytest.mark.parametrize(("encoding", "rounds"), [(INT8, 50), (TOP, 400)], ids=str)
def test_with_feedback_the_mean_of_many_updates_is_theirs(encoding: Encoding, rounds: int) -> None:
    """Also of values that are small beside others: a single update would have none of them."""
    values = (np.random.default_rng(1).normal(size=3000) * 10.0 ** -np.arange(3000.0).clip(0, 3)).astype(
        np.float32
    )
    encoder, total, first = UpdateEncoder(encoding, len(values)), np.zeros(len(values)), None
    for _ in range(rounds):
        found = sent_by(encoder, values)
        first = found if first is None else first
        total += found
    assert first is not None
    lost = np.abs(total / rounds - values).max()
    assert lost < 0.05 * np.abs(first - values).max()


def test_the_same_bytes_can_be_sent_until_the_next_update() -> None:
    rng = np.random.default_rng(1)
    one, two = (rng.normal(size=TOP_VALUES + 50).astype(np.float32) for _ in range(2))
    encoder, other = UpdateEncoder(INT8, len(one)), UpdateEncoder(INT8, len(one))
    sent_by(encoder, one)
    data = bytes(encoder.data(0, len(one)))
    for stop in (TOP_VALUES, len(one), len(one)):
        encoder.sent(stop)
        assert bytes(encoder.data(0, len(one))) == data
    assert bytes(encoder.data(0, TOP_VALUES)) + bytes(encoder.data(TOP_VALUES, len(one))) == data
    assert [encoder.is_end(stop) for stop in (1, TOP_VALUES, TOP_VALUES + 1, len(one))] == [0, 1, 0, 1]
    sent_by(other, one)
    assert sent_by(encoder, two).tobytes() == sent_by(other, two).tobytes()
    alone = UpdateEncoder(INT8, len(two))
    assert sent_by(alone, two).tobytes() != sent_by(other, two).tobytes()


def test_an_update_whose_round_is_repeated_leaves_no_trace() -> None:
    """An update that was sent does not count where another one of its round was lost."""
    rng = np.random.default_rng(1)
    one, dropped, two = (rng.normal(size=3000).astype(np.float32) for _ in range(3))
    found = []
    for tasks in ([(1, one), (2, two)], [(1, one), (2, dropped), (2, dropped), (2, two)]):
        encoder = UpdateEncoder(INT8, 3000)
        for task, values in tasks:
            encoder.encode(values.data.cast("B"), memoryview, task)
            encoder.sent(3000)
        found.append(bytes(encoder.data(0, 3000)))
    assert found[0] == found[1]


def test_buffers_are_sent_as_they_are() -> None:
    values = np.random.default_rng(1).normal(size=3000).astype(np.float32)
    for encoding in ALL:
        encoder = UpdateEncoder(encoding, 3000, 2990)
        for _ in range(2):  # and without what was lost before
            encoder.encode(values.data.cast("B"), memoryview)
            encoder.sent(3000)
            assert bytes(encoder.data(0, 3000))[-40:] == values[2990:].tobytes()


@pytest.mark.parametrize("bad", [1.0, math.nan])
@pytest.mark.parametrize("sent", [False, True])
def test_an_update_that_was_not_sent_as_a_whole_leaves_no_trace(bad: float, sent: bool) -> None:
    rng = np.random.default_rng(1)
    one, dropped, two = (rng.normal(size=TOP_VALUES + 50).astype(np.float32) for _ in range(3))
    dropped[5] *= bad
    encoder, other = UpdateEncoder(INT8, len(one)), UpdateEncoder(INT8, len(one))
    for each in (encoder, other):
        sent_by(each, one)
    largest, _ = encoder.encode(dropped.data.cast("B"), memoryview)
    assert math.isnan(largest) == math.isnan(bad)
    if sent:
        encoder.sent(TOP_VALUES)
    assert sent_by(encoder, two).tobytes() == sent_by(other, two).tobytes()


def test_an_encoding_is_one_file_and_its_kernel(tmp_path: Path) -> None:
    """It has no kernel here: numpy does without."""
    (tmp_path / "sign_1.py").write_text(
        "from millpond.aggregate.encoding.kinds.kind import EncodingKind\n"
        "class Sign(EncodingKind):\n"
        "    feeds_back = True\n"
        "    def size(self, count):\n"
        "        return count\n"
        "    def encode(self, values, data):\n"
        "        data[:] = values > 0\n"
        "        decoded = data * values.dtype.type(2) - 1\n"
        "        values -= decoded\n"
        "        return decoded\n"
        "    def decode(self, data, values):\n"
        "        values[:] = data * values.dtype.type(2) - 1\n"
        "        return True\n"
    )
    code = (
        "import sys; from millpond.aggregate.encoding import kinds; kinds.__path__.append(sys.argv[1])\n"
        "import numpy as np; from millpond.aggregate.encoding.codec import codec\n"
        "from millpond.aggregate.encoding.update_encoder import UpdateEncoder\n"
        "from millpond.train.job.encodings import encoding_of\n"
        "sign = encoding_of('sign-1', 'job'); encoder = UpdateEncoder(sign, 3)\n"
        "for _ in range(2):\n"
        "    encoder.encode(np.array([0.5, -3, 2], np.float32).data.cast('B'), memoryview); encoder.sent(3)\n"
        "    found = np.empty(3, np.float32)\n"
        "    codec(sign).decode(sign, bytearray(encoder.data(0, 3)), found.data.cast('B'))\n"
        "    print(found.tolist())"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[1.0, -1.0, 1.0]\n[-1.0, -1.0, 1.0]\n"


@IS_BUILT
def test_an_agent_encodes_without_numpy() -> None:
    script = (
        "import sys; from millpond.aggregate.encoding.update_encoder import *; e = UpdateEncoder("
        "Encoding('int8'), 9); e.encode(memoryview(bytearray(36)), memoryview); print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
