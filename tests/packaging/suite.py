# SPDX-License-Identifier: Apache-2.0
"""Edge: pytest as a child process, on given test modules with this project's configuration and hooks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = ("conftest.py", "effort.py", "schedule.py")
SHARED = ("-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder")


def run_suite(root: Path, modules: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Write ``modules``, by their paths below ``tests``, and run pytest on them."""
    write_suite(root, modules)
    argv = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=root)


def write_suite(root: Path, modules: dict[str, str]) -> None:
    """Write ``modules``, by their paths below ``tests``, beside this project's configuration and hooks."""
    shutil.copy(ROOT / "pyproject.toml", root)
    tests = root / "tests"
    tests.mkdir()
    for name in OWN:
        shutil.copy(ROOT / "tests" / name, tests)
    for name, text in modules.items():
        (tests / name).parent.mkdir(parents=True, exist_ok=True)
        (tests / name).write_text(text)
