# SPDX-License-Identifier: Apache-2.0
"""Entry: the demo: prepares a fleet with private data, and runs the demo's steps in an emulated machine."""

from __future__ import annotations

import os
import random
import shutil
import sys
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millpond.base.errors import LocalError
from millpond.host.emulation import machine
from millpond.host.emulation.demo import data
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import Fleet
from millpond.linux.file_lock import locked

DEVICES = ("csd0", "csd1", "csd2")
TRACER = "public"
_MARK = "demo.lock"


def run(directory: Path, seed: int) -> int:
    """Run the demo from nothing to the report. Returns an exit code."""
    machine.check_prerequisites()
    directory = directory.absolute()
    os.umask(0o022)  # the devices' users must be able to read their files
    _check_ours(directory)
    with locked(directory / _MARK, f"a demo runs in {directory}"):
        return _run(directory, seed)


def _run(directory: Path, seed: int) -> int:
    _clear(directory)
    fleet = provisioning.create(directory / "fleet", "demo", DEVICES)
    _write_data(fleet, directory, seed)
    shutil.copy(_example("digits.toml"), directory / "digits.toml")
    command = [sys.executable, "-m", "millpond.host.main", "demo-inside", str(directory), str(seed)]
    return machine.emulate(fleet, command, prepares=True)


def _check_ours(directory: Path) -> None:
    """Raise LocalError if the directory holds files that are not an earlier demo's."""
    if directory.exists() and any(directory.iterdir()) and not (directory / _MARK).exists():
        raise LocalError(f"{directory} holds something that is not a demo; choose another place with --in")
    directory.mkdir(parents=True, exist_ok=True)


def _clear(directory: Path) -> None:
    """Remove an earlier run's files, also of one that was killed; its processes have died with it."""
    for path in directory.iterdir():
        if path.name != _MARK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _example(name: str) -> Path:
    """Return an example job's path: inside the package once installed, beside it in a checkout."""
    package = Path(str(resources.files("millpond.train")))
    installed = package / "examples" / name
    return installed if installed.exists() else package.parents[1] / "examples" / name


def _write_data(fleet: Fleet, directory: Path, seed: int) -> None:
    """Write the test set on the host, and each device's private and public samples to its flash, with
    markers.

    Canaries are a text in the private data files, in a note beside them and in a file's name, and one private
    image, as its file holds it and as a worker computes with it. The tracer is a text in a public file: the
    control which shows that the search finds its markers.
    """
    marks = random.Random(seed)  # noqa: S311 - marks, not secrets
    division = data.divide(data.load(), len(DEVICES), seed)
    data.write(directory / "test", division.test)
    for name, private, public in zip(DEVICES, division.private, division.public, strict=True):
        text, tracer = f"canary-{marks.getrandbits(96):024x}", f"tracer-{marks.getrandbits(96):024x}"
        flash = fleet.device_directory(name) / "flash"
        data.write(flash / "private" / "digits", private, text)
        (flash / "private" / f"patient-{text}.txt").write_text(f"This must never leave {name}: {text}\n")
        (flash / "private").chmod(0o700)
        data.write(flash / "public" / "digits", public)
        (flash / "public" / "README.txt").write_text(f"Anyone may read this: {tracer}\n")
        canaries = {"text": text, **_image_canaries(private.images[0])}
        provisioning.write_agent_config(fleet, name, {"canaries": canaries, "tracers": {TRACER: tracer}})


def _image_canaries(image: NDArray[np.uint8]) -> dict[str, str]:
    """Return an image's bytes as its file has them, and as the float32 values that a worker trains on."""
    scaled = image.astype(np.float32) / 255
    return {"image": f"hex:{image.tobytes().hex()}", "image-float32": f"hex:{scaled.tobytes().hex()}"}
