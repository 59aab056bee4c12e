# SPDX-License-Identifier: Apache-2.0
"""The text of a job file, and the files that it names."""

from __future__ import annotations

from pathlib import Path

from millpond.train.job import file
from millpond.train.job.spec import Job

GOOD = """
name = "digits"
[data]
private = "private/digits"
test = "test"
[model]
factory = "mymodel:build"
files = ["./mymodel.py", "parts/head.py"]
arguments = { width = 32, layers = [1, 2] }
"""
OF_DEVICE = GOOD.replace('private = "private/digits"', 'public = "csd0:public/digits"')


def job_folder(top: Path) -> Path:
    """Make a folder with the files that GOOD names, and a file beside it."""
    (top / "job/test").mkdir(parents=True)
    (top / "job/parts").mkdir()
    (top / "job/mymodel.py").write_text("# mine")
    (top / "job/parts/head.py").write_text("# head")
    (top / "secret.py").write_text("# not mine")
    return top / "job"


def read(folder: Path, text: str) -> tuple[Job, dict[str, Path]]:
    (folder / "job.toml").write_text(text)
    return file.read(folder / "job.toml")


def edited(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)
