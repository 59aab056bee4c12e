# SPDX-License-Identifier: Apache-2.0
"""Entry: builds the guest that tests boot in QEMU: a Debian of the processor x86_64, made in seconds.

``-m guest.build FOLDER`` leaves ``vmlinuz``, ``initrd``, ``root.squashfs`` and ``wheels.squashfs`` there, or
does nothing where they are already there from the same recipe. Nothing of millpond is inside: see
repository.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .wheels import make_wheels, wheels_hash

HERE = Path(__file__).parent
RECIPE = ("build.py", "customize.py", "initrd-init", "services.py")
SUITE = "bookworm"
PACKAGES = (
    "linux-image-cloud-amd64",
    "base-files bash busybox-static coreutils dash findutils grep hostname libc-bin mount procps sed",
    "e2fsprogs iproute2 iputils-ping kmod nvme-cli pciutils util-linux",
    "python3",
    "diffutils libstdc++6 make python3-venv systemd",
)


def recipe_hash() -> str:
    """Changes with anything that the build depends on, but for Debian's own updates."""
    digest = hashlib.sha256()
    for name in RECIPE:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()


def is_built(folder: Path) -> bool:
    """Whether ``folder`` holds the guest of this recipe."""
    return _is(folder / "recipe", recipe_hash())


def has_wheels(folder: Path) -> bool:
    """Whether ``folder`` holds what ``make install`` needs in the guest."""
    return _is(folder / "wheels", wheels_hash())


def _is(stamp: Path, text: str) -> bool:
    return stamp.exists() and stamp.read_text() == text


def build(folder: Path) -> None:
    """Make the guest in ``folder``. Raises CalledProcessError after the tool has said why."""
    if not is_built(folder):
        print(f"millpond: building the guest for tests in {folder}", flush=True)
        _renew(folder, "recipe", recipe_hash(), _make_guest)
    if not has_wheels(folder):  # last: a guest without them serves most tests
        print(f"millpond: getting packages for the guest in {folder}", flush=True)
        _renew(folder, "wheels", wheels_hash(), lambda work: make_wheels(work / "wheels.squashfs"))


def _renew(folder: Path, stamp: str, text: str, make: Callable[[Path], None]) -> None:
    """What ``make`` leaves in a folder of its own comes to ``folder``, and then its stamp."""
    work = folder / "new"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    make(work)
    (folder / stamp).unlink(missing_ok=True)
    for made in work.iterdir():
        made.replace(folder / made.name)
    work.rmdir()
    (folder / stamp).write_text(text)


def _make_guest(work: Path) -> None:
    _make_root(work / "root.squashfs")
    _copy_boot(work)


def _make_root(image: Path) -> None:
    """Packages are only unpacked: none of their scripts runs, customize.py does the little that is needed."""
    names = ",".join(" ".join(PACKAGES).split())
    hook = f'/usr/bin/env PYTHONPATH={shlex.quote(str(HERE.parent))} python3 -m guest.customize "$1"'
    bootstrap = ["mmdebstrap", "--quiet", "--variant=extract", "--architectures=amd64", f"--include={names}"]
    bootstrap += [f"--extract-hook={hook}", "--format=tar", SUITE, "-"]
    squash = ["mksquashfs", "-", str(image), "-tar", "-comp", "lz4", "-quiet", "-no-progress"]
    with subprocess.Popen(bootstrap, stdout=subprocess.PIPE) as source:
        squashed = subprocess.run(squash, stdin=source.stdout, capture_output=True, check=False)
    if squashed.returncode:
        sys.stderr.buffer.write(squashed.stderr)
    for argv, code in ((bootstrap, source.returncode), (squash, squashed.returncode)):
        if code:
            raise subprocess.CalledProcessError(code, argv[0])


def _copy_boot(work: Path) -> None:
    tree = work / "tree"
    argv = ["unsquashfs", "-quiet", "-no-progress", "-d", str(tree), str(work / "root.squashfs"), "boot"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    for name in ("vmlinuz", "initrd"):
        (tree / "boot" / name).replace(work / name)
    shutil.rmtree(tree)


def main() -> int:
    """Exit code 0, or 1 if a tool failed."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may start at once
        try:
            build(folder)
        except subprocess.CalledProcessError as error:
            print(f"millpond: the guest was not built: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
