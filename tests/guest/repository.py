# SPDX-License-Identifier: Apache-2.0
"""Edge: the working tree, and those of the virtual environment's packages that it needs, as one squashfs."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("agent", "fs", "host", "images", "tunnel", "tests")
FILES = ("Makefile", "README.md", "constraints.txt", "hatch_build.py", "pyproject.toml")
PACKAGES = ("msgpack", "psutil", "pyroute2")
PYTHONPATH = ":".join(f"/millpond/{folder}" for folder in (*FOLDERS[:-1], "packages"))


def make_image(image: Path, work: Path) -> None:
    """Write ``image``: folders and files as they are now, and ``packages``. Raises CalledProcessError."""
    packages = work / "packages"
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        assert found and found.origin, name
        shutil.copytree(Path(found.origin).parent, packages / name)
    sources = [str(ROOT / folder) for folder in (*FOLDERS, *FILES)]
    argv = ["mksquashfs", *sources, str(packages), str(image), "-comp", "lz4", "-quiet", "-no-progress"]
    subprocess.run([*argv, "-no-xattrs", "-all-root"], check=True, capture_output=True)
    shutil.rmtree(packages)
