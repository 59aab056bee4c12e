# SPDX-License-Identifier: Apache-2.0
"""Edge (a C compiler): peers in C as libraries."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from bench.experiment import Unmeasured


def shared_library(source: Path, folder: Path, *options: str) -> Path:
    """Return the library of a source in C, built in ``folder``. Raises Unmeasured without a compiler."""
    if not shutil.which("cc"):
        raise Unmeasured("there is no C compiler")
    library = folder / f"{source.stem}.so"
    command = ["cc", "-O3", "-shared", "-fPIC", *options, "-o", str(library), str(source), "-lpthread"]
    subprocess.run(command, check=True)
    return library
