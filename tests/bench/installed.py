# SPDX-License-Identifier: Apache-2.0
"""Edge (the package registry): peers that have an interpreter of their own."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

from bench.experiment import Unmeasured


def installed(name: str, *packages: str, figures: Iterable[str]) -> str:
    """Return the interpreter of a virtual environment that has a peer; it is made once. Raises Unmeasured,
    for all of ``figures``.

    It finds what this interpreter has installed, such as torch, behind what is installed in it.
    """
    folder = Path(".bench").resolve() / f"{name}-venv"
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    try:
        if not (folder / "installed").exists():
            venv.create(folder, clear=True)
            (own,) = folder.glob("lib/python*/site-packages")
            (own / "behind.pth").write_text(
                f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
            )
            subprocess.run(pip, check=True, capture_output=True)
            (folder / "installed").touch()
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unmeasured(f"{packages[-1]} is not installed: {error}", *figures) from None
    return python
