# SPDX-License-Identifier: Apache-2.0
"""`make test`: its two passes, and how the first one divides the tests among its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from .. import run
from .suite import ROOT, SHARED, run_suite, write_suite

TRACED = """
import os
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(3))
def test_it(number):
    module = Path(__file__).relative_to(Path.cwd() / "tests")
    with Path("trace").open("a") as trace:
        print(os.environ["PYTEST_XDIST_WORKER"], module, file=trace)
"""
TOGETHER = f'{TRACED}\npytestmark = pytest.mark.xdist_group("together")\n'
REPEATS = """
import pytest
from .effort import scaled

def test_always():
    print("repetitions:", scaled(1, 10))

@pytest.mark.full
def test_marathon():
    pass
"""
ALONE_AND_TOGETHER = {
    "images/test_a.py": TRACED,
    "images/test_b.py": TRACED,
    "system/test_heavy.py": TRACED,
    "fs/test_4_heavy.py": TRACED,
    "host/test_c.py": TOGETHER,
    "wire/test_d.py": TOGETHER,
    "test_repeats.py": REPEATS,
}
PYTEST = """#!/bin/sh
echo "$*" >>log
[ -z "$PYTHONDONTWRITEBYTECODE" ] || exit 99
case "$*" in *"not serial"*) exit {} ;; *) exit {} ;; esac
"""
FLAKY = """
from pathlib import Path
import pytest

def passes_from_the_second_time_on(name):
    tried = Path(name)
    if not tried.exists():
        tried.touch()
        pytest.fail("the first time")

def test_call():
    passes_from_the_second_time_on("call")

@pytest.fixture
def setup():
    passes_from_the_second_time_on("setup")

@pytest.mark.serial
def test_setup(setup):
    pass

@pytest.fixture
def teardown():
    yield
    passes_from_the_second_time_on("teardown")

def test_teardown(teardown):
    pass

def test_passes():
    pass
"""
BROKEN = """
def test_broken():
    raise AssertionError
"""


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], str]:
    """The modules that each process has run, in their order, and what pytest said."""
    root = tmp_path_factory.mktemp("suite")
    done = run_suite(root, ALONE_AND_TOGETHER, *SHARED, "--effort", "full")
    assert done.returncode == 0, done.stdout + done.stderr
    modules = defaultdict(list)
    for line in (root / "trace").read_text().splitlines():
        process, module = line.split()
        modules[process].append(module)
    return modules, done.stdout


def test_a_module_or_a_group_stays_in_one_process(divided: tuple[dict[str, list[str]], str]) -> None:
    first, second = (set(modules) for modules in divided[0].values())
    assert first | second == set(ALONE_AND_TOGETHER) - {"test_repeats.py"}
    assert not first & second
    assert {"host/test_c.py", "wire/test_d.py"} <= first or {"host/test_c.py", "wire/test_d.py"} <= second


def test_the_heaviest_begin(divided: tuple[dict[str, list[str]], str]) -> None:
    begun = {modules[0] for modules in divided[0].values()}
    assert begun == {"system/test_heavy.py", "fs/test_4_heavy.py"}


def test_ids_are_those_that_pytest_takes(divided: tuple[dict[str, list[str]], str]) -> None:
    assert "PASSED tests/images/test_a.py::test_it[0]\n" in divided[1]


def test_every_process_has_the_effort_of_the_run(
    divided: tuple[dict[str, list[str]], str], tmp_path: Path
) -> None:
    assert "repetitions: 10" in divided[1] and "20 passed" in divided[1]
    quick = run_suite(tmp_path, {"test_repeats.py": REPEATS}, *SHARED)
    assert "repetitions: 1\n" in quick.stdout and "1 passed" in quick.stdout


def passes(root: Path, shared: int, alone: int, *arguments: str) -> tuple[int, list[str]]:
    """The exit code of run.py, and pytest's arguments in each pass, where pytest ends so."""
    (root / "python").symlink_to(sys.executable)
    (root / "pytest").write_text(PYTEST.format(shared, alone))
    (root / "pytest").chmod(0o755)
    argv = [root / "python", ROOT / "tests/run.py", "quick", *arguments]
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # would have every process compile the product anew
    code = subprocess.run(argv, cwd=root, env=environment, check=False).returncode
    return code, (root / "log").read_text().splitlines()


@pytest.mark.parametrize(
    ("shared", "alone", "expected"),
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (2, 0, 2), (0, 5, 0), (5, 0, 0), (5, 5, 5), (5, 1, 1), (1, 5, 1)],
)
def test_either_pass_may_fail_the_run(tmp_path: Path, shared: int, alone: int, expected: int) -> None:
    code, calls = passes(tmp_path, shared, alone, "tests/fs", "-k", "lease")
    assert code == expected
    assert [call.split(" tests/fs")[0].rpartition("-m ")[2] for call in calls] == ["not serial", "serial"]
    assert all(call.startswith("--effort=quick ") and call.endswith("tests/fs -k lease") for call in calls)


def test_the_serial_pass_imports_the_modules_of_its_tests_alone(tmp_path: Path) -> None:
    modules = {"test_serial.py": FLAKY, "test_other.py": "raise RuntimeError"}
    done = run_suite(tmp_path, modules, "-m", "serial")
    assert "RuntimeError" not in done.stdout and "1 error" in done.stdout, done.stdout


@pytest.mark.parametrize("named", ["tests/rules", "tests/rules/test_waits.py"])
def test_rules_run_where_they_are_named(tmp_path: Path, named: str) -> None:
    for folder, arguments, left_out in (("all", (), True), ("named", (named,), False)):
        (tmp_path / folder).mkdir()
        _, calls = passes(tmp_path / folder, 0, 0, *arguments)
        assert [" --ignore=tests/rules " in call for call in calls] == [left_out, left_out], calls


def test_a_killed_pass_fails_the_run() -> None:
    assert run.overall([0, 137]) == 137


def rerun(root: Path, modules: dict[str, str]) -> tuple[int, str]:
    """The exit code and the output of run.py, which runs ``modules`` and once more what fails."""
    write_suite(root, modules)
    argv = [sys.executable, ROOT / "tests/run.py", "--rerun", "quick"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(argv, cwd=root, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_what_passes_the_second_time_is_named_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / ".pytest_cache/v/cache").mkdir(parents=True)
    (tmp_path / ".pytest_cache/v/cache/lastfailed").write_text('{"tests/test_of_an_earlier_run.py": true}')
    code, output = rerun(tmp_path, {"test_flaky.py": FLAKY})
    flaky = [line for line in output.splitlines() if line.startswith("flaky: ")]
    names = ("test_call", "test_setup", "test_teardown")
    assert code == 0 and flaky == [f"flaky: tests/test_flaky.py::{name}" for name in names], output
    assert "3 passed" in output.splitlines()[-4]


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    code, output = rerun(tmp_path, {"test_broken.py": BROKEN})
    assert code == 1 and "flaky: " not in output and output.count("1 failed") == 2, output


def test_more_failures_than_may_be_flaky_are_not_run_again(tmp_path: Path) -> None:
    code, output = rerun(tmp_path, {"test_flaky.py": FLAKY, "test_broken.py": BROKEN})
    assert code == 1 and "flaky: " not in output and "passed" not in output.splitlines()[-1], output


def dry(target: str, *arguments: str, **environment: str) -> str:
    argv = ["make", "-n", "-C", ROOT, target, *arguments]
    outer = {name: value for name, value in os.environ.items() if "MAKE" not in name}  # the make of this run
    return subprocess.run(argv, capture_output=True, text=True, env=outer | environment).stdout


def test_make_takes_arguments_from_its_command_line_alone() -> None:
    assert "run.py quick tests/fs -k lease\n" in dry("test", "ARGS=tests/fs -k lease", ARGS="-x")
    assert "run.py full \n" in dry("test-all", ARGS="-x", EFFORT="quick")
    assert "run.py --rerun full \n" in dry("test-all", "RERUN=--rerun")
    assert "run.py full \n" in dry("test-all", RERUN="--rerun")
    assert "run.py bench tests/bench \n" in dry("test-bench")
    assert "run.py --coverage quick ;" in dry("coverage", ARGS="-x", EFFORT="full")
    assert "run.py --coverage full ;" in dry("coverage", "EFFORT=full")
