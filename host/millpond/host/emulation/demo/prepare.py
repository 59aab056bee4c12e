# SPDX-License-Identifier: Apache-2.0
"""Entry: the demo: prepares a fleet with private data, and runs the demo's steps in an emulated machine."""

from __future__ import annotations

import os
import random
import shutil
import sys
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.base import toml
from millpond.base.errors import LocalError
from millpond.host.emulation import machine
from millpond.host.emulation.demo import data
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import Fleet
from millpond.host.remote.doctor.machine_facts import require_emulation
from millpond.linux.file_lock import locked
from millpond.train.job import file
from millpond.train.job.spec import Job

TRACER = "public"
JOB = "digits.toml"
_MARK = "demo.lock"
_PACKAGES = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}  # by pip's names


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """A demo's directory, and what its user has chosen: the seed of the data's division and of the training;
    a ``job`` in place of the demo's own; its most ``rounds``, 0 for as many as the job file says; whether the
    fleet stays on after the report.
    """

    directory: Path
    devices: int = 3
    seed: int = 7
    rounds: int = 0
    job: Path | None = None
    keep: bool = False

    @property
    def job_file(self) -> Path:
        """The file of the job that is trained."""
        return self.job or self.directory / JOB

    @property
    def is_plain(self) -> bool:
        """Whether the demo's own job trains as long as it says: the accuracy is promised."""
        return not self.job and not self.rounds

    def arguments(self) -> list[str]:
        """Return the command line of the part that runs inside the emulated machine."""
        job = ["--job", str(self.job)] if self.job else []
        keep = ["--keep"] if self.keep else []
        return [str(self.directory), str(self.seed), str(self.rounds), *job, *keep]

    def read_job(self) -> tuple[Job, dict[str, Path]]:
        """Return the job, scored by the demo's test data, and its files. Raises ConfigError."""
        settings: dict[str, Any] = {"seed": self.seed, "data.test": str(self.directory / "test")}
        if self.rounds:
            is_synchronous = "synchronous" in toml.document(self.job_file)
            settings["synchronous.epochs" if is_synchronous else "federated.rounds"] = self.rounds
        return file.read(self.job_file, settings)


def run(plan: DemoPlan) -> int:
    """Run the demo from nothing to the report. Returns an exit code."""
    if missing := [of_pip for name, of_pip in _PACKAGES.items() if find_spec(name) is None]:
        raise LocalError(f"the demo needs {', '.join(missing)}: pip install {' '.join(missing)}")
    require_emulation()
    _check_job(plan)
    os.umask(0o022)  # the devices' users must be able to read their files
    _check_ours(plan.directory)
    with locked(plan.directory / _MARK, f"a demo runs in {plan.directory}"):
        return _run(plan)


def _run(plan: DemoPlan) -> int:
    _clear(plan.directory)
    names = [f"csd{number}" for number in range(plan.devices)]
    _write_test(plan)
    plan.read_job()  # so that a mistake in it is told before a fleet is made
    fleet = provisioning.create(plan.directory / "fleet", "demo", names)
    _write_data(fleet, plan)
    command = [sys.executable, "-m", "millpond.host.main", "demo-inside", *plan.arguments()]
    return machine.emulate(fleet, command, prepares=True, stays=plan.keep)


def _check_job(plan: DemoPlan) -> None:
    """Raise LocalError for a job that the demo would delete, and OSError for one that is not there."""
    if plan.job:
        plan.job.stat()
        if plan.job.resolve().is_relative_to(plan.directory.resolve()):
            raise LocalError(f"{plan.job}: a demo empties {plan.directory}; copy the job to another folder")


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


def _write_test(plan: DemoPlan) -> None:
    """Write the test set on the host, and the demo's job beside it."""
    data.write(plan.directory / "test", data.divide(data.load(), plan.devices, plan.seed).test)
    shutil.copy(_example(JOB), plan.directory / JOB)


def _write_data(fleet: Fleet, plan: DemoPlan) -> None:
    """Write each device's private and public samples to its flash, with markers.

    Canaries are a text in the private data files, in a note beside them and in a file's name, and one private
    image, as its file holds it and as a worker computes with it. The tracer is a text in a public file: the
    control which shows that the search finds its markers.
    """
    marks = random.Random(plan.seed)  # noqa: S311 - marks, not secrets
    division = data.divide(data.load(), plan.devices, plan.seed)
    names = [device.name for device in fleet.config.device]
    for name, private, public in zip(names, division.private, division.public, strict=True):
        text, tracer = f"canary-{marks.getrandbits(96):024x}", f"tracer-{marks.getrandbits(96):024x}"
        flash = fleet.flash(name)
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
