"""The hook of all tests that turns an unexpected warning in the log into a failure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

TESTS = """
import logging
import threading
import pytest

log = logging.getLogger("some.part")

def test_quiet():
    log.info("nothing of note")

def test_unexpected():
    log.warning("the %s is full", "flash")

def test_from_a_thread():
    thread = threading.Thread(target=log.error, args=("lost",))
    thread.start()
    thread.join()

@pytest.mark.expected_log("is full$")
@pytest.mark.expected_log("lost")
def test_expected():
    log.warning("the flash is full")
    log.error("lost")

@pytest.mark.expected_log("is full$")
def test_another():
    log.warning("the flash is empty")

@pytest.fixture
def noisy():
    log.warning("in a fixture")

def test_fixture(noisy):
    pass
"""


def test_unexpected_log_records_fail(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  expected_log(regex): allowed\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "6 passed, 4 errors" in done.stdout
    for name in ("test_unexpected", "test_from_a_thread", "test_another", "test_fixture"):
        assert f"ERROR test_it.py::{name}" in done.stdout
    assert "WARNING some.part: the flash is full" in done.stdout
    assert done.returncode == 1
