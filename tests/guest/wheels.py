# SPDX-License-Identifier: Apache-2.0
"""Edge: the packages that ``make install`` gets from a registry, as one squashfs: the guest has none."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = ("agent",)
"""Without torch, which would be most of it: only workers need it."""


def requirements() -> list[str]:
    """What the package needs to be built, to run, and for the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed: list[str] = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in EXTRAS:
        needed += project["project"]["optional-dependencies"][extra]
    return sorted(set(needed))


def wheels_hash() -> str:
    """Changes with what is needed, and in which version."""
    content = ["squashfs", *requirements(), CONSTRAINTS.read_text()]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


def make_wheels(image: Path) -> None:
    """Write ``image``: wheels for Debian's Python 3.11. Raises CalledProcessError after pip has said why."""
    folder = image.with_suffix("")
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    chosen = ["--python-version", "3.11", "--only-binary", ":all:", "-c", str(CONSTRAINTS)]
    subprocess.run([*pip, *chosen, "-d", str(folder), *requirements()], check=True)
    squash = ["mksquashfs", str(folder), str(image), "-noappend", "-comp", "lz4", "-quiet", "-no-progress"]
    subprocess.run(squash, check=True, capture_output=True)
    shutil.rmtree(folder)
