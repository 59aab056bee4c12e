# SPDX-License-Identifier: Apache-2.0
"""A launched script's messages: files whose paths are compatible, and lines from arbitrary bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.base.errors import ConfigError, ProtocolError
from millpond.train.distributed.launch_messages import (
    LONGEST_LINE,
    MOST_AT_ONCE,
    MOST_CODE,
    Launch,
    Lines,
    SavedOrder,
    SavedPart,
    check_files,
    check_start,
    environment,
    script_digest,
)

READ = 1 << 15


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\r\n", codec="utf-8"))), st.data())
def test_lines_come_out_however_the_stream_is_cut(written: list[str], data: st.DataObject) -> None:
    stream = "".join(line + "\n" for line in written).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    lines, found = Lines(), list[str]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += lines.take(stream[start:end])
    assert [*found, *lines.end()] == written


def test_what_no_newline_ends_is_a_line_at_the_end() -> None:
    lines = Lines()
    assert lines.take(b"one\r\n50 %\r100 %\rtwo") == ("one", "50 %", "100 %")
    assert lines.end() == ("two",)
    assert lines.end() == ()


@pytest.mark.parametrize("byte", [b"x", b"\n", b"\xff", "ü".encode()])
def test_lines_are_bounded_and_so_is_what_goes_in_one_message(byte: bytes) -> None:
    lines = Lines()
    for _ in range(20):
        found = lines.take(byte * (READ // len(byte)))
        assert all(len(line) <= LONGEST_LINE for line in found)
        assert sum(len(line) + 1 for line in found) <= MOST_AT_ONCE
    assert sum(map(len, lines.end())) <= LONGEST_LINE


def test_files_that_cannot_lie_beside_each_other_are_refused() -> None:
    check_files("a.py", {"a.py": b"", "data/deep.npy": bytes(MOST_CODE - 17)})
    for name in ("", ".", "..", "../a.py", "/etc/passwd", "a\0b", "a/../b", "a//b", "a/", "x" * 300, "a\nb"):
        with pytest.raises(ConfigError, match="is no name of a file"):
            check_files("a.py", {"a.py": b"", name: b""})
    with pytest.raises(ConfigError, match="not among its files"):
        check_files("b.py", {"a.py": b""})
    check_files("b.py", {"a.py": b""}, installed=True)
    with pytest.raises(ConfigError, match="'data' cannot be a file and the folder of 'data/b'"):
        check_files("a.py", {"a.py": b"", "data": b"", "data/b": b""})
    with pytest.raises(ConfigError, match="4097 files; 4096 are possible"):
        check_files("0", {str(number): b"" for number in range(4097)})
    with pytest.raises(ConfigError, match="3 MiB are possible"):
        check_files("a.py", {"a.py": bytes(MOST_CODE + 1)})


def test_a_worker_without_a_network_has_no_address_and_a_wrong_start_is_refused() -> None:
    launch = Launch("a.py", (), {}, 2, 3, "10.77.0.5", 40001, processes=4, variables=(("A", "b=c"),))
    found = environment(launch, "mp0", 3)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"], found["A"]) == (
        "11",
        "12",
        "10.77.0.5",
        "b=c",
    )
    assert found["OMP_NUM_THREADS"] == "1"
    assert "MASTER_ADDR" not in environment(replace(launch, confined=True), "mp0")
    for processes, name in ((0, "A"), (257, "A"), (1, ""), (1, "A=B"), (1, "A\0")):
        with pytest.raises(ConfigError):
            check_start(processes, {name: "x"})


def parts(*found: tuple[str, int, int, int]) -> None:
    order = SavedOrder(100)
    for path, start, size, payload in found:
        order.take(SavedPart(path, start, size), payload)


def test_parts_of_saved_files_come_in_order_within_the_limit() -> None:
    parts(("a", 0, 60, 40), ("a", 40, 60, 20), ("b/c", 0, 0, 0), ("b/d", 0, 40, 40))
    for wrong in (
        (("../a", 0, 1, 1),),
        (("/a", 0, 1, 1),),
        (("a", 0, 101, 50),),
        (("a", 0, 60, 40), ("b", 0, 10, 10)),
        (("a", 0, 60, 40), ("a", 50, 60, 10)),
        (("a", 0, 60, 61),),
        (("a", 0, 60, 0),),
        (("a", 0, 60, 60), ("a", 0, 10, 10)),
        (("a", 0, 60, 60), ("b", 0, 41, 41)),
        (("a", 0, 1, 1), ("a/b", 0, 1, 1)),
        (("a/b", 0, 1, 1), ("a", 0, 1, 1)),
        (("a", 0, -1, 0),),
    ):
        with pytest.raises(ProtocolError):
            parts(*wrong)


def test_a_digest_is_of_names_and_contents_and_script_and_arguments_and_module() -> None:
    files = {"a.py": b"1", "b.py": b"2"}
    found = script_digest("a.py", files)
    assert found == script_digest("a.py", dict(reversed(files.items())))
    assert found != script_digest("a.py", files, ["--limit", "41"])
    assert found != script_digest("a.py", files, transforms="a.py")
    modules = [script_digest("a.py", files, ["b"], module) for module in ("", "a", "b")]
    assert len({found, *modules}) == 4
    others = [("b.py", files), ("a.py", files | {"b.py": b"3"}), ("a.py", {"a.py": b"1", "c.py": b"2"})]
    assert found not in [script_digest(*other) for other in others]
