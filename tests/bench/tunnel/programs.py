# SPDX-License-Identifier: Apache-2.0
"""Edge: the benchmark's own programs in C, compiled for this run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parents[1]


class CompilationFailed(Exception):
    """There is no compiler, or it refused."""


def compile_program(name: str, directory: Path) -> Path:
    """The program from ``name.c`` beside the benchmarks, in ``directory``. Raises CompilationFailed."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise CompilationFailed("no C compiler is installed: sudo apt install gcc libc6-dev")
    program = directory / name
    argv = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(SOURCES / f"{name}.c")]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise CompilationFailed(f"{name}.c: {done.stderr.strip()}")
    return program
