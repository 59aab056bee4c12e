# SPDX-License-Identifier: Apache-2.0
"""Edge: the device's Python packages: locked with their hashes, made smaller, and compiled."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.build import recipe
from millpond.images.build.run import run

LOCK = recipe.RECIPE / "python.lock"
VERSION = "3.11"
PLATFORMS = (
    "manylinux_2_28_aarch64",
    "manylinux_2_27_aarch64",
    "manylinux_2_17_aarch64",
    "manylinux2014_aarch64",
)
PLACE = "/usr/lib/millpond/packages"
"""On the device; a .pth file there tells Python of it."""
_UNUSED = (
    "bin",
    "numpy/distutils",
    "numpy/f2py",
    "numpy/*/tests",
    "numpy/tests",
    "numpy/_core/lib",
    "pyroute2/**/tests",
    "psutil/tests",
    "mpmath/tests",
    "sympy/**/benchmarks",
    "sympy/**/tests",
    "sympy/parsing/latex",
    "sympy/parsing/autolev",
    "share",
    "torch/bin/protoc*",
    "torch/include",
    "torch/lib/*.a",
    "torch/share",
    "torch/test",
    "**/*.pyi",
    "**/*.pxd",
    "**/*.h",
    "**/*.hpp",
)
"""What nothing imports; of torch, torchgen and torch.testing must stay."""
_PIP = (
    *("--quiet", "--disable-pip-version-check", "--no-warn-script-location", "--root-user-action=ignore"),
    *("--no-deps", "--require-hashes", "--only-binary=:all:", "--no-compile"),
    *("--implementation=cp", f"--python-version={VERSION}"),
    *(word for platform in PLATFORMS for word in ("--platform", platform)),
)


def install(folder: Path, cache: Path) -> None:
    """Install the locked packages below ``folder``. Raises LocalError."""
    places = [f"--cache-dir={cache}", f"--target={folder}", f"--requirement={LOCK}"]
    hint = "'make image-lock' takes what the registry has today"
    run(sys.executable, "-m", "pip", "install", *_PIP, *places, hint=hint)


def locked() -> list[tuple[str, str]]:
    """Return the names and versions of the lock."""
    lines = [line.split()[0] for line in LOCK.read_text().splitlines() if "==" in line]
    return [(name, version) for name, _, version in (line.partition("==") for line in lines)]


def prune(folder: Path) -> None:
    """Take away what nothing imports, and the names of functions that only a debugger reads."""
    for pattern in _UNUSED:
        for path in sorted(folder.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
    for library in sorted(folder.rglob("*.so*")):
        if not library.is_symlink():
            strip(library)


def strip(library: Path) -> None:
    """Take the symbols away that only a debugger reads, where what is left can still be loaded.

    Wheels bring libraries whose heads were moved; strip puts the segments of some where no loader takes them.
    """
    smaller = library.with_name(f"{library.name}.stripped")
    run("aarch64-linux-gnu-strip", "--strip-unneeded", "-o", smaller, library)
    if loadable(run("aarch64-linux-gnu-readelf", "--segments", "--wide", smaller).decode()):
        smaller.replace(library)
    else:
        smaller.unlink()


def loadable(segments: str) -> bool:
    """Return whether a loader takes the segments that readelf lists: offset and address agree in a page."""
    loads = [line.split() for line in segments.splitlines() if line.split()[:1] == ["LOAD"]]
    return bool(loads) and all((int(one[1], 16) - int(one[2], 16)) % int(one[-1], 16) == 0 for one in loads)


def compile_all(folder: Path, place: str) -> None:
    """Compile byte-code beside the sources, as if they lay at ``place``. It is unchecked, since the root is
    read-only, and has no error columns, which take memory.

    Raises LocalError without a Python of the device's version.
    """
    options = ["-q", "-j0", "--invalidation-mode=unchecked-hash", "-s", str(folder), "-p", place]
    run(interpreter(), "-X", "no_debug_ranges", "-m", "compileall", *options, folder)


def interpreter() -> str:
    """Return a Python interpreter of the device's version. Raises LocalError."""
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    if found := shutil.which(f"python{VERSION}"):
        return found
    raise LocalError(f"the image's byte-code is made by Python {VERSION}: sudo apt install python{VERSION}")


def lock() -> int:
    """Write the lock anew, with what the registry has today; how many packages. Raises LocalError."""
    wanted = recipe.read("packages.toml")
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"]
    command += ["--python-platform=aarch64-manylinux_2_28", f"--python-version={VERSION}", "-"]
    command += [word for name in wanted["python_without"] for word in ("--no-emit-package", name)]
    text = run(*command, given="\n".join(wanted["python"]).encode(), hint="pip install uv").decode()
    LOCK.write_text("# made by 'make image-lock'\n" + text)
    return text.count("==")
