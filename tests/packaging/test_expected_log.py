# SPDX-License-Identifier: Apache-2.0
"""The hooks and the configuration of all tests: an unexpected warning fails its test, also under xdist."""

from __future__ import annotations

import pytest

from .suite import SHARED, run_suite

LOGS = """
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
WARNS = """
import warnings

def test_warns():
    warnings.warn("old")
"""
MARKED = """
import pytest

@pytest.mark.unheard_of
def test_marked():
    pass
"""
HANGS = """
import pytest
import threading

@pytest.mark.timeout(1)
def test_hangs():
    threading.Event().wait()

def test_next():
    pass
"""

SUITE = {"test_logs.py": LOGS, "test_warns.py": WARNS, "test_marked.py": MARKED, "test_hangs.py": HANGS}


@pytest.fixture(scope="module", params=[(), SHARED], ids=["one process", "two processes"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of all of them."""
    argv = ("--continue-on-collection-errors", *request.param)
    done = run_suite(tmp_path_factory.mktemp("suite"), SUITE, *argv)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_unexpected_log_records_fail(report: str) -> None:
    for name in ("test_unexpected", "test_from_a_thread", "test_another", "test_fixture"):
        assert f"ERROR tests/test_logs.py::{name} - Failed: unexpected in the log" in report
    assert "WARNING some.part: the flash is full" in report


def test_a_warning_is_an_error(report: str) -> None:
    assert "FAILED tests/test_warns.py::test_warns - UserWarning: old" in report


def test_an_unknown_mark_is_an_error(report: str) -> None:
    assert "ERROR tests/test_marked.py - Failed: 'unheard_of' not found in `markers`" in report


def test_a_test_that_hangs_fails(report: str) -> None:
    assert "FAILED tests/test_hangs.py::test_hangs - Failed: Timeout" in report


def test_all_others_pass(report: str) -> None:
    """Every record is reported once its test has passed, at the end of the fixture that listens."""
    assert "2 failed, 7 passed, " in report
