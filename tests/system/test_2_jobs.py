# SPDX-License-Identifier: Apache-2.0
"""Jobs from files: they learn, repeat bit by bit, and bad data or code is reported and not passed on."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from millpond.aggregate.encoding.layout import Encoding
from millpond.host.api import daemon

from ..waiting import eventually
from .support import Emulation, Result, millpond

pytestmark = pytest.mark.timeout(240)

RAISING = """\
import os
from torch import nn


class Raising(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images):
        if self.training and os.uname().nodename.startswith("csd"):  # not where the host tries it
            raise ValueError(f"a patient's pixels: {images.sum()}")
        return self.layers(images)


def build():
    return Raising()
"""
LINEAR = """\
from torch import nn


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def trained(result: Result, fleet: Emulation) -> Path:
    """The model of a job that is done."""
    assert result.code == 0, f"{result}\n{fleet.logs()}"
    last = result.out.splitlines()[-1]
    assert " is done: accuracy " in last
    return Path(last.rpartition("; ")[2])


def accuracy(result: Result) -> float:
    return float(result.out.splitlines()[-1].partition("accuracy ")[2].split()[0])


def test_digits_twice_come_to_the_same_bits(fleet: Emulation) -> None:
    results = [fleet.millpond("train", fleet.base / "digits.toml") for _ in range(2)]
    models = [trained(result, fleet) for result in results]
    assert models[0] != models[1]
    assert accuracy(results[0]) == accuracy(results[1]) >= 0.95
    assert models[0].read_bytes() == models[1].read_bytes()
    state = load_file(models[0])
    assert all(np.isfinite(tensor).all() for tensor in state.values())
    assert "conv1.weight" in state
    rounds = [line for line in results[0].out.splitlines() if line.strip()[:1].isdigit()]
    assert rounds
    assert "\x1b" not in results[0].out


def test_updates_of_eight_bits_cross_in_a_quarter_of_the_bytes(fleet: Emulation) -> None:
    settings = [f"train.encoding={encoding}" for encoding in ("float32", "int8")]
    sizes = []
    for setting in settings:
        with fleet.client() as client:
            before = client.ledgers()
            chosen = ("--set", "federated.rounds=4", "--set", setting)
            model = load_file(trained(fleet.millpond("train", fleet.base / "digits.toml", *chosen), fleet))
            after = client.ledgers()
        sizes.append({d: after[d].sent["parameters"] - before[d].sent["parameters"] for d in after})
    values = sum(tensor.size for tensor in model.values())
    assert sizes == [dict.fromkeys(sizes[0], 4 * Encoding(name).size(values)) for name in ("float32", "int8")]
    assert sizes[1]["csd0"] / sizes[0]["csd0"] < 0.26
    wanted = [size["csd0"] for size in sizes]
    eventually(lambda: audited(fleet, "csd0")[-2:] == wanted, "the audit log tells it", 20, 0.5)


def audited(fleet: Emulation, device: str) -> list[int]:
    """Verify a device's audit log, and return the bytes of parameters of each job in it."""
    told = fleet.millpond("audit", device, "--verify", "--format", "json")
    assert told.code == 0, told
    rows = [row["answers"] for row in json.loads(told.out)["summary"]["rows"]]
    jobs = [row for row in rows if row["role"] == "job"]
    assert all(row["peer"].startswith("host (") and row["code"] and row["policy"] for row in jobs)
    return [row["sent"].get("parameters", 0) for row in jobs]


def test_a_job_in_mini_epochs_that_a_rule_repeats_learns_as_well(fleet: Emulation) -> None:
    chosen = ("train.mini_epoch=64", "train.epochs=3", "train.repeat=bands", "evaluate.target=0.95")
    settings = [part for setting in chosen for part in ("--set", setting)]
    result = fleet.millpond("train", fleet.base / "digits.toml", *settings)
    assert trained(result, fleet).exists() and accuracy(result) >= 0.95
    number = Path(result.out.splitlines()[-1].rpartition("; ")[2]).parent.name
    told = millpond("data", "explain", number, "--fleet", fleet.directory, "--format", "json")
    repeats = [own["mini_epochs"]["repeats"] for own in json.loads(told.out)["workers"].values()]
    assert repeats and all(1 <= times <= 3 for times in repeats), told
    refused = fleet.millpond("train", fleet.base / "digits.toml", "--set", "train.mini_epoch=8")
    assert refused.code == 2 and "train: mini_epoch: 8 is not at least train.batch" in refused.err


def test_test_data_that_the_daemon_does_not_see_are_sent_to_it(
    fleet: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fleet.write_job("handed", code=LINEAR, rounds=1)
    seen, _ = fleet.wait_for_end(fleet.submit(path))
    look = daemon.LookForFolder
    monkeypatch.setattr(daemon, "LookForFolder", lambda path, device, inode: look(path, device, inode + 1))
    sent, _ = fleet.wait_for_end(fleet.submit(path))
    assert (seen.state, sent.state) == ("done", "done"), f"{sent}\n{fleet.logs()}"
    with fleet.client() as client:
        folders = [Path(client.job(info.id).job.data.test) for info in (seen, sent)]
        client.save_model(sent.id, own := fleet.base / "own.safetensors")
    assert folders[0].samefile(fleet.base / "test")
    assert folders[1].parent == fleet.fleet.test_data / str(os.geteuid())
    assert Path(seen.model).read_bytes() == Path(sent.model).read_bytes() == own.read_bytes()
    assert seen.score == sent.score is not None


def test_an_ended_job_goes_on_where_it_was(fleet: Emulation) -> None:
    job_file = fleet.write_job("ended", rounds=16)
    with fleet.pace() as pace, fleet.client() as client:
        number = fleet.submit(job_file)
        fleet.wait_for_rounds(number, 2)
        assert fleet.millpond("resume", str(number)).code == 2
        client.stop(number)
        info, rounds = fleet.wait_for_end(number)
        assert info.state == "stopped" and 2 <= len(rounds) < 16
        pace.hurry()
        result = fleet.millpond("resume", str(number))
        assert result.code == 0, result
        log = (fleet.fleet.job_directory(number) / "job.log").read_text()
        assert f"resumed after round {len(rounds)}" in log
        assert "say up to how many rounds" in fleet.millpond("resume", str(number)).err
        further = fleet.millpond("resume", str(number), "--rounds", "18")
        straight = fleet.millpond("train", fleet.write_job("straight", rounds=18))
    models = [load_file(trained(each, fleet)) for each in (further, straight)]
    assert all((models[0][name] == models[1][name]).all() for name in models[1])
    assert [result.round for result in fleet.progress(number)[1]] == list(range(1, 19))


def test_a_model_of_the_users_own(fleet: Emulation) -> None:
    result = fleet.millpond("train", fleet.base / "mymodel.toml")
    state = load_file(trained(result, fleet))
    assert accuracy(result) >= 0.95
    assert state["1.num_batches_tracked"].dtype.kind == "i"


def test_a_model_that_raises_tells_where_and_keeps_its_message(fleet: Emulation) -> None:
    job = fleet.write_job("raising", code=RAISING)
    result = fleet.millpond("train", job)
    lines = result.err.splitlines()
    assert result.code == 3, result
    assert len(lines) == 1
    assert "ValueError" in lines[0]
    assert "model.py:12" in lines[0]
    told = (
        result.out
        + result.err
        + fleet.millpond("logs", "csd0").out
        + (fleet.directory / "host.log").read_text()
    )
    assert "patient" not in told
    advice = re.search(r"'millpond logs (--device csd\d \d+)'", lines[0])
    assert advice, lines[0]
    own = fleet.millpond("logs", *advice[1].split())
    assert own.code == 0 and "ValueError: a patient's pixels" in own.out, own
    number = advice[1].split()[-1]
    found = fleet.millpond("logs", number, "--device", "csd1", "-n", "1", "--format", "json")
    assert [line[:30] for line in json.loads(found.out)["lines"]] == ["ValueError: a patient's pixels"], found


def test_a_job_on_some_devices_with_changed_keys(fleet: Emulation) -> None:
    job = fleet.write_job("some", rounds=10_000, target=0.12)
    with fleet.pace() as pace:
        pace.hurry()
        result = fleet.millpond("train", job, "--devices", "csd2,csd0", "--set", "federated.rounds=2")
        trained(result, fleet)
        with fleet.client() as client:
            found = client.job(client.jobs()[-1].id)
        others = {"csd0", "csd2"}
        assert len(found.rounds) == 2 and all(set(each.workers) == others for each in found.rounds)
        assert all(each.tunnel.keys() == others and not each.missing for each in found.rounds)
        beside = fleet.submit(job), fleet.submit(job)
        text = fleet.millpond("jobs").out.splitlines()[-1].rstrip()
        assert text.split()[2] == "queued" and text.endswith(f"waits for job {beside[0]}"), text
        pace.finish()
        assert [fleet.wait_for_end(number)[0].state for number in beside] == ["done", "done"]


def test_bad_samples_stay_out_of_every_round(fleet: Emulation) -> None:
    reasons = {"csd1": "not finite", "csd2": "update refused"}
    job = fleet.write_job("bad", private="private/bad", code=LINEAR, quorum=0.1)
    info, rounds = fleet.wait_for_end(fleet.submit(job))
    assert (info.state, len(rounds)) == ("done", 3), info.error
    for result in rounds:
        assert set(result.workers) == {"csd0"}
        assert result.missing.keys() == reasons.keys()
        for device, reason in reasons.items():
            assert device not in result.missing[device]
            assert reason in result.missing[device]
    assert all(np.isfinite(tensor).all() for tensor in load_file(info.model).values())
