# SPDX-License-Identifier: Apache-2.0
"""Entry: runs the tests in two passes, each of which ends with pytest's own closing line.

``run.py [--coverage] [--rerun] quick|full|bench [ARGUMENT...]`` runs first, in four processes, the tests that
may share the machine, as ``schedule.py`` divides them, and then, in one, those that are marked ``serial``,
also where the first pass failed. The arguments are pytest's. The exit code is 0 only if neither pass failed.
The processes that tests start load the product's byte-code, which is compiled before.

With ``--rerun``, a third pass runs the failed tests once more, in one process. A test that passes then is
named in a line ``flaky: NAME``, and the run has passed if that holds for all. More failures than
``MOST_FLAKY`` are not run again: they fail the run in any case.
"""

from __future__ import annotations

import compileall
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from millpond.linux.syscalls import killed_with_parent

ROOT = Path(__file__).parents[1]
SOURCES = ("agent", "fs", "host", "images", "tunnel", "tests")
SHARED = ("-n", "4", "--dist", "loadgroup", "--no-loadscope-reorder", "-m", "not serial")
ALONE = ("-m", "serial")
RULES = "tests/rules"
"""``make check`` runs them; here they do so only if they are named."""
AGAIN = ("--last-failed", "--last-failed-no-failures=none")
NO_BYTE_CODE = "PYTHONDONTWRITEBYTECODE"
MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "ARGS", "EFFORT", "RERUN")
FAILURES = Path(".pytest_cache/v/cache/lastfailed")  # pytest keeps it over the passes
TESTS_FAILED = 1  # pytest's exit code
NO_TESTS = 5  # pytest's exit code where none was selected
MOST_FLAKY = 3


def main() -> int:
    arguments = sys.argv[1:]
    argv = [str(Path(sys.executable).with_name("pytest"))]
    if arguments[:1] == ["--coverage"]:
        argv = [str(Path(sys.executable).with_name("coverage")), "run", *argv]
        del arguments[0]
    rerun = arguments[:1] == ["--rerun"]
    effort, *arguments = arguments[rerun:]
    argv.append(f"--effort={effort}")
    argv += ["--durations=40"] if effort != "quick" else []
    argv += [] if any(RULES in each for each in arguments) else [f"--ignore={RULES}"]
    interrupts: list[int] = []  # the terminal sends Ctrl-C to pytest, too, which ends by itself
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    codes = []
    for folder in SOURCES:  # who has another uid in a sandbox could not write it
        compileall.compile_dir(ROOT / folder, quiet=2)
    if rerun:
        FAILURES.unlink(missing_ok=True)
    for chosen in (SHARED, ALONE):
        if not interrupts:
            codes.append(_run([*argv, *chosen, *arguments]))
    code = overall(codes)
    if rerun and code == TESTS_FAILED and not interrupts:
        code = _run_again([*argv, *AGAIN, *arguments])
    return 130 if interrupts else code


def overall(codes: list[int]) -> int:
    """Return the exit code of the passes together: that one of them had no tests is no failure."""
    return max((code for code in codes if code != NO_TESTS), default=NO_TESTS)


def _run_again(argv: list[str]) -> int:
    """Run the failed tests once more, name the flaky ones, and return the exit code of the whole run."""
    failed = _failures()
    if not 0 < len(failed) <= MOST_FLAKY:
        return TESTS_FAILED
    code = _run(argv)
    still_failed = _failures()
    for name in sorted(failed - still_failed):
        print(f"flaky: {name}", flush=True)
    return code or (TESTS_FAILED if still_failed else 0)


def _failures() -> set[str]:
    """Return the tests that failed in the passes so far, and have not passed since."""
    return set(json.loads(FAILURES.read_text())) if FAILURES.exists() else set()


def _run(argv: list[str]) -> int:
    # The makes that tests start do not get the variables of the command line of ``make test``.
    env = {name: value for name, value in os.environ.items() if name not in (*MAKE, NO_BYTE_CODE)}
    code = subprocess.Popen(argv, env=env, preexec_fn=killed_with_parent()).wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
