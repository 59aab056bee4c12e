"""Which engine runs where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.tunnel import engine
from millpond.tunnel.counts import Counts
from millpond.wire.errors import LocalError


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the C engine would be."""
    monkeypatch.setattr(engine, "LIBRARY", tmp_path / "_engine.so")
    engine._works.cache_clear()
    yield tmp_path / "_engine.so"
    engine._works.cache_clear()


def test_without_a_library_python_runs(library: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert engine.resolve("auto") == "python"
    assert not caplog.records


@pytest.mark.expected_log("the C engine cannot be used")
def test_a_library_for_another_processor_is_told_and_left_alone(
    library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library.write_bytes(b"\x7fELF of another kind")
    assert [engine.resolve("auto") for _ in range(2)] == ["python", "python"]
    (record,) = caplog.records
    assert "the C engine cannot be used" in record.message
    with pytest.raises(LocalError, match="the C engine cannot be used"):
        engine.loops("c", "host")


def test_counts_of_an_end_that_was_started_again_begin_anew() -> None:
    assert Counts(packets=7, bytes=90).since(Counts(packets=5, bytes=80)) == Counts(packets=2, bytes=10)
    assert Counts(packets=3, bytes=30).since(Counts(packets=5, bytes=80)) == Counts(packets=3, bytes=30)
