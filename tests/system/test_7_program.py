# SPDX-License-Identifier: Apache-2.0
"""A fleet in a program, as in a notebook."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from millpond import Fleet
from millpond.base.errors import ConfigError, LocalError, Refused, RemoteError
from millpond.host.cli.projects.new import Template, create

from .support import SLOW_MODEL, Emulation


def test_a_program_trains_follows_plots_and_loads(fleet: Emulation, tmp_path: Path) -> None:
    mine = Fleet(fleet.directory)
    assert {device.name for device in mine.devices()} == {"csd0", "csd1", "csd2"}
    path = fleet.write_job("program", factory="millpond.train.zoo.models:digits_cnn", rounds=2)
    job = mine.train(path, set={"train.batch": 16, "train.optimizer": {"name": "SGD", "nesterov": True}})
    rounds = list(job)
    assert [each.round for each in rounds] == [1, 2]
    info = job.wait()
    assert (info.state, info.score) == ("done", job.scores[-1]["host"]["accuracy"])
    assert mine.jobs()[-1].id == job.number and mine.job(job.number).rounds == rounds
    assert job.load_state_dict()["conv1.weight"].shape == (32, 1, 3, 3)
    job.plot().savefig(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_a_program_stops_a_job_and_hears_what_is_wrong(fleet: Emulation) -> None:
    mine = Fleet(fleet.directory)
    job = mine.train(fleet.write_job("program-stop", code=SLOW_MODEL, rounds=50))
    next(iter(job))
    with pytest.raises(LocalError, match="has no model yet"):
        _ = job.model
    job.stop()
    with pytest.raises(RemoteError, match="stopped"):
        job.wait()
    with pytest.raises(Refused, match="there is no job 999"):
        mine.job(999)
    with pytest.raises(ConfigError, match="did you mean 'rounds'"):
        mine.train(fleet.write_job("program-wrong"), set={"federated.round": 1})


def test_a_class_of_a_module_is_trained(
    fleet: Emulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    create(folder, Template.TEXT)
    (folder / "task.py").rename(folder / "program_task.py")
    subprocess.run([sys.executable, "data.py", "--fleet", fleet.directory], cwd=folder, check=True)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    task = importlib.import_module("program_task").Sentiment
    mine, keys = Fleet(fleet.directory), {"optimizer": "AdamW", "learning_rate": 5e-3, "epochs": 2}
    job = mine.train(task, data="private/text", test="test", rounds=2, **keys)
    assert [set(each.workers) for each in job] == [{"csd0", "csd1", "csd2"}] * 2
    assert job.info.name == "Sentiment" and set(job.scores[-1]["host"]) == {"accuracy", "loss"}
    model = task().model()
    model.load_state_dict(job.load_state_dict())
    model.load_state_dict(job.load_state_dict(best=True))
    wrong = mine.train(task, data="private/text", test="test", arguments={"size": 3})
    with pytest.raises(RemoteError, match="unexpected keyword argument 'size'"):
        wrong.wait()
