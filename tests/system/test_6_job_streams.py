# SPDX-License-Identifier: Apache-2.0
"""Synchronous jobs that train on the public data of one device, streamed to all other workers."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest

from millpond.host.records.jobs import Round

from ..waiting import eventually
from .launching import closed
from .support import Emulation
from .test_6_launch_streams import services
from .test_6_synchronous import DEVICES, job_file, lines, lose, wait_for_line, worker_of

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no 'ip' to ask what is forwarded"),
]
ALL = {"host", *DEVICES}


def streamed(fleet: Emulation, name: str, synchronous: str, *, slow: bool = False, public: str = "") -> Path:
    """A job with the public digits of csd0 alone."""
    path = job_file(fleet, name, synchronous, slow=slow)
    text = path.read_text().replace('private = "private/digits"\n', "")
    path.write_text(text.replace("public/digits", public or "csd0:public/digits"))
    return path


def samples(fleet: Emulation, device: str = "csd0", part: str = "public") -> int:
    folder = fleet.fleet.device_directory(device) / "flash" / part / "digits"
    return len(np.load(folder / "labels.npy"))


def is_whole(rounds: list[Round], fleet: Emulation) -> bool:
    return all(each.samples == samples(fleet) and not each.missing for each in rounds)


def ended(fleet: Emulation) -> bool:
    return not services(fleet) and closed(fleet)


def test_all_devices_train_on_the_streamed_data_of_one_and_twice_come_to_the_same_bits(
    ready: Emulation,
) -> None:
    models = []
    for number in range(2):
        with ready.client() as client:
            before = client.ledgers()
        how = 'epochs = 3\npolicy = "fixed"\npatience = 0\nglobal_batch = 48'
        job = ready.submit(streamed(ready, f"streamed{number}", how))
        info, rounds = ready.wait_for_end(job)
        assert info.state == "done", f"{info}\n{ready.logs()}"
        models.append((ready.fleet.job_directory(job) / "model.safetensors").read_bytes())
        with ready.client() as client:
            after = client.ledgers()
        eventually(lambda: ended(ready), "no data service, and nothing is forwarded", 30, 0.1)
        sent = {name: after[name].sent["volume"] - before[name].sent["volume"] for name in DEVICES}
        pixels = 64 * samples(ready)
        assert pixels < sent["csd0"] < 5 * 3 * pixels, sent
        assert 0 < sent["csd1"] < 3 * pixels and 0 < sent["csd2"] < 3 * pixels, sent
        assert len(rounds) == 3 and is_whole(rounds, ready), rounds
        assert set(rounds[-1].workers) == ALL, rounds
    assert models[0][-4096:] == models[1][-4096:]  # behind the header, which names the job


@pytest.mark.expected_log("csd|host|data service|stream")
def test_killed_workers_and_a_killed_data_service_lose_no_sample(ready: Emulation) -> None:
    endless = "epochs = 1000\nsteps = 40\n[evaluate]\ntarget = 0.12"
    with ready.pace() as pace:
        number = ready.submit(streamed(ready, "lossy", endless, slow=True))
        wait_for_line(ready, number, "plan: a step")
        lose(ready, number, csd1=worker_of(ready, "csd1").kill)
        behind = len(lines(ready, number))
        for process in services(ready):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with the one before
                process.kill()
        for name in ("csd1", "csd2"):
            wait_for_line(ready, number, f"{name} joins; plan:", behind=behind)
        pace.hurry()
        ready.wait_for_rounds(number, len(ready.progress(number)[1]) + 1)
        pace.finish()
        info, rounds = ready.wait_for_end(number)
    assert info.state == "done", info
    assert is_whole(rounds, ready) and set(rounds[-1].workers) == ALL, rounds
    eventually(lambda: ended(ready), "no data service, and nothing is forwarded", 30, 0.1)


@pytest.mark.parametrize("how", ["[synchronous]\nepochs = 1", "[federated]\nrounds = 1"])
def test_devices_with_private_data_get_no_stream(ready: Emulation, how: str) -> None:
    """The device that has the public samples and the host read them in place."""
    path = job_file(ready, f"both-{how[1:4]}", "epochs = 1")
    text = (
        path.read_text()
        .replace("public/digits", "csd0:public/digits")
        .replace("[synchronous]\nepochs = 1", how)
    )
    path.write_text(text)
    with ready.client() as client:
        before = client.ledgers()
    info, rounds = ready.wait_for_end(ready.submit(path))
    assert info.state == "done", f"{info}\n{ready.logs()}"
    private = sum(samples(ready, name, "private") for name in DEVICES)
    assert [each.samples for each in rounds] == [private + samples(ready)], rounds
    with ready.client() as client:
        after = client.ledgers()
    sent = [after[name].sent["volume"] - before[name].sent["volume"] for name in ("csd1", "csd2")]
    assert max(sent) < 16 * samples(ready)  # of 64 bytes each; mounts of other tests tell that they live


def test_streams_that_a_job_cannot_have_are_refused_by_name(ready: Emulation) -> None:
    refused = {
        "csd9:public/digits": "data.public: 'csd9' is no device of this job",
        "csd0:public/missing": "missing data: there is no folder public/missing",
    }
    for number, (public, text) in enumerate(refused.items()):
        job = streamed(ready, f"refused{number}", "epochs = 1", public=public)
        result = ready.millpond("train", job)
        assert result.code and text in result.out + result.err, result
