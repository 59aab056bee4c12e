# SPDX-License-Identifier: Apache-2.0
"""Edge (RAUC): packs an image as a signed bundle, which a device installs into the slot that does not run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.host.fleet.authority import Authority, signer
from millpond.host.fleet.directory import Fleet
from millpond.images.format.manifest import Manifest
from millpond.linux.files import sha256_of

_FOLDER = "tmp"
"""The prefix of the folders in which bundles are made."""

_IMAGES = {"rootfs": "root.squashfs", "esp": "esp.vfat"}
"""Images in the order of writing: the firmware finds the new slot only when all of it is there."""

_SETTINGS = "[system]\ncompatible=millpond\nbootloader=noop\n[keyring]\ncheck-purpose=codesign\n"
"""RAUC verifies its bundle as a device will; without check-purpose it wants a certificate for mail."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle's file, its SHA-256 and the manifest of its image. No other update removes the file as long as
    this process has the descriptor ``held``.
    """

    path: Path
    sha256: str
    manifest: Manifest
    held: int = field(default=-1, compare=False, repr=False)


def make(
    fleet: Fleet, image: Path, manifest: Manifest, tell: Callable[[str], None] = lambda _line: None
) -> Bundle:
    """Return the bundle of an image for the devices of ``fleet``, made once and kept; ``tell`` is called with
    a line before one is made, which takes a while. Raises LocalError.
    """
    target = _place(fleet, manifest)
    target.parent.mkdir(exist_ok=True)
    with (fleet.directory / "updates.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another update makes its bundle
        for left in target.parent.glob(f"{_FOLDER}*"):  # by one that was killed
            shutil.rmtree(left)
        if not target.exists():
            tell(f"packing the image of millpond {manifest.version} as a signed bundle")
            _make(fleet, image, manifest, target)
        held = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_SH)
        _forget_others(target, manifest.board)
    return Bundle(target, sha256_of(target), manifest, held)


def _make(fleet: Fleet, image: Path, manifest: Manifest, target: Path) -> None:
    certificate, key = signer(Authority.load(fleet.ca, fleet.identity.authority), fleet.ca)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_FOLDER) as folder:
        made = Path(folder, "made.raucb")
        _bundle(_content(Path(folder), image.parent, manifest), made, certificate, key, fleet)
        with made.open("rb") as file:
            os.fsync(file.fileno())  # a file at ``target`` is taken for whole
        made.replace(target)


def _place(fleet: Fleet, manifest: Manifest) -> Path:
    digest = hashlib.sha256("".join(file.sha256 for file in manifest.files).encode()).hexdigest()
    return fleet.directory / "updates" / f"{manifest.board}-{manifest.serial}-{digest[:16]}.raucb"


def _forget_others(kept: Path, board: str) -> None:
    """Remove the board's other bundles, but for those that another update holds."""
    for path in kept.parent.glob(f"{board}-*.raucb"):
        if path != kept:
            with path.open("r+b") as file, contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _content(folder: Path, images: Path, manifest: Manifest) -> Path:
    """Make the folder that RAUC packs: its manifest and the two file systems, each checked against our
    manifest.
    """
    content = folder / "content"
    content.mkdir()
    lines = [
        "[update]",
        f"compatible=millpond-{manifest.board}",
        f"version={manifest.version}+{manifest.serial}",
    ]
    lines += ["", "[bundle]", "format=verity"]
    digests = {file.file: file.sha256 for file in manifest.files}
    for slot, name in _IMAGES.items():
        source, target = images / name, content / f"{slot}.img"
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
        if sha256_of(target) != digests.get(name):
            raise LocalError(f"{source} is not what its manifest says: run 'make image' again")
        lines += ["", f"[image.{slot}]", f"filename={target.name}"]
    (content / "manifest.raucm").write_text("\n".join(lines) + "\n")
    return content


def _bundle(content: Path, target: Path, certificate: Path, key: Path, fleet: Fleet) -> None:
    authority, settings = fleet.identity.authority, target.with_suffix(".conf")
    settings.write_text(_SETTINGS)
    # The root file system is compressed already: these options are for the kernel beside it.
    squash = "-comp zstd -Xcompression-level 12 -b 1M"
    argv = ["rauc", f"--conf={settings}", "bundle", f"--cert={certificate}", f"--key={key}"]
    argv += [f"--signing-keyring={authority}", f"--mksquashfs-args={squash}", str(content), str(target)]
    for tool, package in (("rauc", "rauc"), ("mksquashfs", "squashfs-tools")):
        if not shutil.which(tool):
            raise LocalError(f"an update needs {tool} on this host: sudo apt install {package}")
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LocalError(f"rauc cannot make the bundle: {said[-1][-500:]}")
