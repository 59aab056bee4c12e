# SPDX-License-Identifier: Apache-2.0
"""Fleets and jobs in a program: tasks as objects of modules, on a daemon whose jobs train nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from millpond import Fleet
from millpond.base.errors import ConfigError, LocalError, RemoteError
from millpond.host.program.fleet import FleetProgram
from millpond.host.program.task_source import source_of

from .daemon_rig import Rig
from .stored import jobs_of

MODULE = """\
class Sentiment:
    def __init__(self, width=8):
        self.width = width

    def model(self):
        raise NotImplementedError

    class Inner:
        pass


class Plain:
    def model(self):
        raise NotImplementedError


named = Sentiment(16)


def build():
    return Plain()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user's own, in a package."""
    folder = tmp_path / "code"
    (folder / "own" / "deep").mkdir(parents=True)
    (folder / "own" / "__init__.py").touch()
    (folder / "own" / "deep" / "mytask.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("own.deep.mytask")
    for name in [name for name in sys.modules if name.partition(".")[0] == "own"]:
        del sys.modules[name]


@pytest.fixture
def fleet(rig: Rig) -> Fleet:
    return Fleet(str(rig.directory))


def test_a_task_is_sent_with_the_files_of_its_module(module: ModuleType, tmp_path: Path) -> None:
    files = ("own/deep/mytask.py", "own/__init__.py")
    expected = {
        "Sentiment": module.Sentiment,
        "named": module.named,
        "Plain": module.Plain(),
        "build": module.build,
    }
    for name, task in expected.items():
        source = source_of(task)
        assert (source.factory, source.files) == (f"own.deep.mytask:{name}", files)
        assert source.folder == tmp_path / "code"
    assert source_of(module).factory == "own.deep.mytask"
    assert source_of(sys.modules["own"]).files == ("own/__init__.py",)


def test_a_task_that_no_worker_could_make_is_refused(module: ModuleType) -> None:
    class Own:
        pass

    main = type("Main", (), {"__module__": "__main__"})
    for task, complaint in {
        module.Sentiment(3): "attributes that a worker does not know",
        module.Sentiment.Inner: "not at the top of own.deep.mytask",
        Own: "not at the top of",
        main: "defined in __main__: write it to a file of its own",
        sys: "has no file that workers could get",
    }.items():
        with pytest.raises(LocalError, match=complaint):
            source_of(task)


def test_a_job_of_a_task_has_the_keys_that_were_given(
    fleet: Fleet, rig: Rig, module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test").mkdir()
    monkeypatch.chdir(tmp_path)
    job = fleet.train(
        module.Sentiment,
        data="private/text",
        test="test",
        rounds=3,
        arguments={"width": 4},
        learning_rate=0.1,
        optimizer={"name": "AdamW", "weight_decay": 0.1},
        set={"train.batch": 7, "devices": ["csd0"]},
    )
    (row,) = jobs_of(rig.store)
    sent = row.job
    assert (job.number, sent.name, sent.total, sent.devices) == (1, "Sentiment", 3, ("csd0",))
    assert (sent.data.private, sent.data.test) == ("private/text", str(tmp_path / "test"))
    assert (sent.train.learning_rate, sent.train.batch) == (0.1, 7)
    assert sent.train.optimizer == {"name": "AdamW", "weight_decay": 0.1}
    assert sent.task is not None and sent.task.arguments == {"width": 4}
    assert set(row.files) == {"own/deep/mytask.py", "own/__init__.py"}
    steps = fleet.train(module, data="private/text", synchronous={"epochs": 2}, name="steps")
    sent = jobs_of(rig.store)[1].job
    assert (steps.info.name, steps.info.unit, sent.total) == ("steps", "epoch", 2)
    assert sent.evaluate.on == ("devices",)


def test_what_makes_no_job_is_refused(fleet: Fleet, rig: Rig, module: ModuleType) -> None:
    path = rig.write_job("own")
    mixed: list[dict[str, Any]] = [{"rounds": 3}, {"learning_rate": 0.1}, {"synchronous": {}}, {"seed": 1}]
    for keys in mixed:
        with pytest.raises(LocalError, match="is a job file: its keys are changed by set"):
            fleet.train(path, **keys)
    with pytest.raises(ConfigError, match=r"own.toml with set: train: unknown key 'bach'; did you mean"):
        fleet.train(path, set={"train.bach": 3})
    with pytest.raises(ConfigError, match="job: train: unknown key 'bach'; did you mean 'batch'"):
        fleet.train(module.Sentiment, data="private/text", bach=3)
    with pytest.raises(
        ConfigError, match="private: it is missing; a job without private data has a public folder"
    ):
        fleet.train(module.Sentiment)
    with pytest.raises(ConfigError, match=r"set name\.of: 'name' is not a table"):
        fleet.train(path, set={"name.of": 1})
    with pytest.raises(RemoteError, match="there is no job 7"):
        fleet.job(7)
    with pytest.raises(ConfigError, match="holds no fleet"):
        Fleet(rig.directory / "nowhere")
    assert not jobs_of(rig.store)


def test_without_a_path_the_fleet_is_that_of_commands(
    fleet: Fleet, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_FLEET", str(rig.directory))
    assert (Fleet().directory, repr(Fleet())) == (fleet.directory, f"<fleet in {fleet.directory}>")
    number = Fleet().train(rig.write_job("gone")).number
    gone = FleetProgram(rig.directory).job(number)
    (rig.directory / "host.sock").unlink()
    assert repr(gone) == f"<job {number}>"
    with pytest.raises(LocalError, match="no host daemon runs"):
        fleet.devices()
