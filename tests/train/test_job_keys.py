# SPDX-License-Identifier: Apache-2.0
"""A key of a job file is its definition, with its check and its meaning, and its use: nothing else knows of
it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from millpond.train.job import spec

from .job_reference import PAGE, in_place

FIRST = "    threads: Annotated"
ADDED = '    folds: Annotated[int, Key("parts that take turns", 1, 9)] = 1\n'
JOB = """
name = "x"
data = { private = "private/d", test = "." }
model = { factory = "net:Net" }
train = { folds = %d }
"""
READ = """
import sys
from pathlib import Path
import msgpack
from millpond.train import job
job.__path__.insert(0, sys.argv[1])
from millpond.base.errors import ConfigError
from millpond.base.schema import dump, load
from millpond.train.job import file, spec
read = lambda folds: file.read(Path(sys.argv[1], f"{folds}.toml"))[0]
print(load(spec.WorkSpec, msgpack.unpackb(msgpack.packb(dump(read(3).work))), "work").folds)
try:
    read(10)
except ConfigError as error:
    print(error)
sys.path.insert(0, sys.argv[2])
from train import job_reference
print(job_reference.job_keys())
"""


def test_a_key_of_a_worker_is_defined_in_one_place(tmp_path: Path) -> None:
    """One line is added: the file is read, the worker is told, a wrong value is refused, and it is shown."""
    text = Path(spec.__file__).read_text()
    (tmp_path / "spec.py").write_text(text.replace(FIRST, ADDED + FIRST))
    for folds in (3, 10):
        (tmp_path / f"{folds}.toml").write_text(JOB % folds)
    argv = [sys.executable, "-c", READ, str(tmp_path), str(Path(__file__).parents[1])]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    told, refused, *shown = done.stdout.splitlines()
    assert (told, refused) == ("3", "10.toml: train: folds: 10 is not between 1 and 9")
    assert f"{'folds = 1':<31}# parts that take turns" in shown


def test_the_page_shows_the_keys_as_they_are() -> None:
    text = PAGE.read_text()
    assert text == in_place(text), "python -m tests.train.job_reference writes them"
