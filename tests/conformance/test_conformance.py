# SPDX-License-Identifier: Apache-2.0
"""The output of suites is parsed correctly, and a run without a suite tells how to get one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .tap import parse

TESTS = Path(__file__).parents[1]


def test_tests_are_counted_by_number() -> None:
    found = parse("1..4\nok 1\nnot ok 2 - tried 'open', expected 0, got EPERM\nok 3\nok 4\n")
    assert found.passed == {1, 3, 4}
    assert found.failed == {2: "tried 'open', expected 0, got EPERM"}
    assert found.tests == 4


def test_what_was_announced_and_did_not_run_has_failed() -> None:
    assert parse("1..3\nok 1\n", "it was stopped").failed == {2: "it was stopped", 3: "it was stopped"}
    assert parse("").failed == {1: "it did not run"}


def test_an_expected_failure_passes() -> None:
    found = parse("1..3\nnot ok 1 # TODO not here\nok 2 # SKIP no such thing\nok 3 # TODO fixed\n")
    assert found.passed == {1, 2, 3}


def test_a_number_that_failed_once_has_failed() -> None:
    assert parse("1..2\nok 1\nnot ok 1 - again\nok 2\n").passed == {2}


def test_without_a_suite_one_line_says_what_to_do(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    argv = [sys.executable, "-m", "conformance", "--pjdfstest", str(tmp_path), "--output", str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "PJDFSTEST=DIR" in done.stderr
    assert not list(tmp_path.iterdir())
