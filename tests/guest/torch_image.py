# SPDX-License-Identifier: Apache-2.0
"""Edge: the virtual environment's torch as a squashfs: pip takes minutes to unpack a wheel in the guest."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

PLACE = "/usr/lib/torch"
"""Its place in the guest, as initrd-init mounts it: in a tree that all sandboxes of workers show."""
GUEST_PYTHON = (3, 11)
_PACKAGES = ("torch", "torchgen", "sympy", "mpmath", "typing_extensions")
"""What the import of torch imports, but for numpy, which the host daemon brings along."""
_UNUSED = ("include", "test")


def why_no_torch() -> str:
    """Why the guest can have no torch; empty if it can."""
    if sys.version_info[:2] != GUEST_PYTHON:
        return "the guest's Python is 3.11, and that of the virtual environment, whose torch it takes, is not"
    for name in _PACKAGES:
        if not importlib.util.find_spec(name):
            return f"{name} is not installed: make"
    if (_place("torch") / "lib/libtorch_cuda.so").exists():
        return "torch of the virtual environment is made for CUDA, which is too large for the guest"
    return ""


def make_torch_image(image: Path) -> None:
    """Write ``image``, 380 MB in 4 s. Raises CalledProcessError."""
    places = [_place(name) for name in _PACKAGES]
    unused = [str(_place("torch") / name) for name in _UNUSED]
    options = ["-comp", "lz4", "-noappend", "-quiet", "-no-progress", "-no-xattrs", "-all-root", "-e"]
    argv = ["mksquashfs", *map(str, places), str(image), *options, *unused]
    subprocess.run(argv, check=True, capture_output=True)


def _place(name: str) -> Path:
    """The package's folder, or the module's file. It is not imported."""
    found = importlib.util.find_spec(name)
    assert found and found.origin, name
    origin = Path(found.origin)
    return origin.parent if origin.name == "__init__.py" else origin
