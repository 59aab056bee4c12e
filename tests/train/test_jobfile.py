# SPDX-License-Identifier: Apache-2.0
"""Job files: their fields, defaults and errors."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from millpond.base.errors import ConfigError
from millpond.base.schema import dump, load
from millpond.train.job import file
from millpond.train.job.spec import Job, SynchronousSpec

EXAMPLES = Path(__file__).parents[2] / "agent" / "examples"
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job/test").mkdir(parents=True)
    (tmp_path / "job/parts").mkdir()
    (tmp_path / "job/mymodel.py").write_text("# mine")
    (tmp_path / "job/parts/head.py").write_text("# head")
    (tmp_path / "secret.py").write_text("# not mine")
    return tmp_path / "job"


def read(folder: Path, text: str) -> tuple[Job, dict[str, str]]:
    (folder / "job.toml").write_text(text)
    return file.read(folder / "job.toml")


def test_a_job_and_its_code(folder: Path) -> None:
    job, code = read(folder, GOOD)
    assert (job.name, job.data.test) == ("digits", str(folder / "test"))
    assert code == {"mymodel.py": "# mine", "parts/head.py": "# head"}
    assert load(Job, msgpack.unpackb(msgpack.packb(dump(job))), "job") == job


def test_a_synchronous_job_is_one_that_has_the_table(folder: Path) -> None:
    assert read(folder, GOOD)[0].synchronous is None
    assert read(folder, GOOD + "[synchronous]")[0].synchronous == SynchronousSpec()
    text = 'epochs = 0\npolicy = "stannis"\npatience = 0\nglobal_batch = 48\nscaling = "sqrt"\nhost = false'
    job, _ = read(folder, f"{GOOD}[synchronous]\n{text}")
    assert job.synchronous == SynchronousSpec(0, None, "stannis", 0, 48, scaling="sqrt", host=False)
    assert load(Job, msgpack.unpackb(msgpack.packb(dump(job))), "job") == job


@pytest.mark.parametrize("name", ["digits", "mymodel"])
def test_the_examples_are_jobs(tmp_path: Path, name: str) -> None:
    for path in EXAMPLES.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "test").mkdir()
    job, code = file.read(tmp_path / f"{name}.toml")
    assert (job.name, sorted(code)) == (name, ["mymodel.py"] if name == "mymodel" else [])


def edited(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


ERRORS = [
    (GOOD + "[federated]\nround = 3", "job.toml: federated: unknown key 'round'; did you mean 'rounds'?"),
    (GOOD + "[train]\nbatch = 0", "job.toml: train: batch: 0 is not greater than 0"),
    (GOOD + "[train]\nbatch = 'x'", "job.toml: train: batch: expected a whole number, got text ('x')"),
    (edited("[model]", "[model"), "job.toml: Expected ']'"),
    (edited('"test"', '"tset"'), "job.toml: data: test: missing data: there is no folder "),
    (edited("./mymodel.py", "mymodl.py"), "job.toml: model: files: mymodl.py: no such file"),
    (edited("./mymodel.py", "parts"), "job.toml: model: files: parts: no such file"),
    (edited("./mymodel.py", "../secret.py"), "job.toml: model: files: ../secret.py: must be below"),
    (edited("./mymodel.py", "/etc/hosts"), "job.toml: model: files: /etc/hosts: must be below"),
    (edited("./mymodel.py", "link.py"), "job.toml: model: files: link.py: leads out of"),
    (edited("./mymodel.py", "latin.py"), "job.toml: model: files: latin.py: not a text file in UTF-8"),
    (edited("./mymodel.py", "large.py"), "job.toml: model: files: parts/head.py: the model's files are over"),
    (edited("[1, 2]", "[1, 2026-01-02]"), "job.toml: model: arguments.layers[1]: a date cannot be"),
]
SYNCHRONOUS = [
    ("epoch = 3", "unknown key 'epoch'; did you mean 'epochs'?"),
    ("epochs = -1", "epochs: -1 is not between 0 and 1000000000"),
    ("epochs = 1.5", "epochs: expected a whole number"),
    ("target = 1.01", "target: 1.01 is not between 0 and 1"),
    ("target = nan", "target: nan is not between 0 and 1"),
    ('policy = "balanced"', "policy: "),
    ("patience = 0.9", "patience: 0.9 is neither 0 nor at least 1"),
    ("patience = -1", "patience: -1.0 is neither 0 nor at least 1"),
    ("patience = nan", "patience: nan is neither 0 nor at least 1"),
    ("global_batch = 1", "global_batch: 1 is not between 2 and 1048576"),
    ("global_batch = 2_000_000", "global_batch: 2000000 is not between 2 and 1048576"),
    ("steps = 0", "steps: 0 is not between 1 and 1000000000"),
    ('scaling = "square"', "scaling: "),
    ("warmup = -2", "warmup: -2 is not between 0 and 1000000000"),
    ("checkpoint = 0", "checkpoint: 0.0 is not between 0.1 and 1000000000"),
    ("checkpoint = nan", "checkpoint: nan is not between 0.1 and 1000000000"),
    ("host = 1", "host: expected "),
]
ERRORS += [(f"{GOOD}[synchronous]\n{text}", f"job.toml: synchronous: {error}") for text, error in SYNCHRONOUS]


@pytest.mark.parametrize(("text", "error"), ERRORS)
def test_what_is_wrong_is_said_and_where(folder: Path, text: str, error: str) -> None:
    (folder / "link.py").symlink_to(folder.parent / "secret.py")
    (folder / "latin.py").write_bytes(b"# \xe4\xff")
    (folder / "large.py").write_bytes(b"#" * file.CODE_LIMIT)
    with pytest.raises(ConfigError) as caught:
        read(folder, text)
    assert str(caught.value).startswith(error)


def test_a_job_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.toml: No such file"):
        file.read(tmp_path / "job.toml")


def test_a_job_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"job\.toml: 'utf-8' codec"):
        file.read(tmp_path / "job.toml")
