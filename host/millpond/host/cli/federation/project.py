# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the folder of a Flower app that trains a job on several fleets."""

from __future__ import annotations

import shutil
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.host.cli.projects import templates
from millpond.train.job import file

JOB = "job.toml"
_NAMED = ("README.md", "pyproject.toml")


def create(folder: Path, job_file: Path, every: int) -> list[str]:
    """Write the app of a job into a new folder, with the job and its files; its test folder is a link there.
    A job that is not resident becomes so, with ``every`` rounds in an outer round. Returns the names of the
    files. Raises LocalError for a folder that is not empty, ConfigError for a job that is none.
    """
    job, files = file.read(job_file)
    try:
        templates.lay_out("federate", folder, _NAMED)
        for name, path in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / name)
        outer = "" if job.outer else f"\n[outer]\nevery = {every}\n"
        (folder / JOB).write_text(job_file.read_text().rstrip("\n") + "\n" + outer)
        _link_test(folder, job_file, Path(job.data.test) if job.data.test else None)
    except OSError as error:
        raise LocalError(f"{error.filename or folder}: {error.strerror or error}") from None
    file.read(folder / JOB)
    return sorted(path.name for path in folder.iterdir())


def _link_test(folder: Path, job_file: Path, test: Path | None) -> None:
    """Make the job's relative path of its test folder lead to it from the new folder, too."""
    if test is None or not test.is_relative_to(job_file.parent.resolve()):
        return
    link = folder / test.relative_to(job_file.parent.resolve())
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(test)
