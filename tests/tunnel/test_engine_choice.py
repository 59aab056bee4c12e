# SPDX-License-Identifier: Apache-2.0
"""The choice of a link's engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base import shared_library
from millpond.base.errors import LocalError
from millpond.tunnel.datapath import native
from millpond.tunnel.datapath.stats import PacketStats


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the C engine would be."""
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_datapath.so")
    shared_library.is_usable.cache_clear()
    yield tmp_path / "_datapath.so"
    shared_library.is_usable.cache_clear()


def test_without_a_library_python_runs(library: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert native.resolve("auto") == "python"
    assert not caplog.records


@pytest.mark.expected_log("the C engine cannot be used")
def test_a_library_for_another_processor_is_told_and_left_alone(
    library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library.write_bytes(b"\x7fELF of another kind")
    assert [native.resolve("auto") for _ in range(2)] == ["python", "python"]
    (record,) = caplog.records
    assert "the C engine cannot be used" in record.message
    with pytest.raises(LocalError, match="the C engine cannot be used"):
        native.loops("c", "host")


def test_counts_of_an_end_that_was_started_again_begin_anew() -> None:
    assert PacketStats(packets=7, bytes=90).since(PacketStats(packets=5, bytes=80)) == PacketStats(
        packets=2, bytes=10
    )
    assert PacketStats(packets=3, bytes=30).since(PacketStats(packets=5, bytes=80)) == PacketStats(
        packets=3, bytes=30
    )
