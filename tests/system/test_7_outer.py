# SPDX-License-Identifier: Apache-2.0
"""A resident job on a fleet: outer rounds are the rounds of a job that runs by itself, also over a kill."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from millpond.aggregate.kernels import Vector
from millpond.base.errors import MillpondError
from millpond.host.api.outer import OuterAnswer
from millpond.host.client.outer_client import OuterClient
from millpond.train.job import file
from millpond.train.state import layout

from ..waiting import eventually
from .support import EXAMPLES, Emulation

pytestmark = pytest.mark.timeout(300)


def submitted(fleet: Emulation, name: str, *settings: str) -> int:
    """Submit the example of a federated job, without its target."""
    path = fleet.base / f"{name}.toml"
    path.write_text((EXAMPLES / "digits.toml").read_text().replace("target", "#"))
    job, files = file.read(path, [f"name={name}", "federated.rounds=4", *settings])
    with fleet.client() as client:
        return client.submit(job, files)


def ordered(fleet: Emulation, number: int, key: str, state: Vector) -> tuple[OuterAnswer, Vector]:
    """Order an outer round until it is answered."""

    def answered() -> tuple[OuterAnswer, Vector] | None:
        try:
            with OuterClient(fleet.directory) as client:
                return client.outer_round(number, "train", key, state)
        except MillpondError:
            return None

    return eventually(answered, f"outer round {key}", 120, 0.2)


def test_outer_rounds_are_those_of_a_job_that_runs_by_itself(ready: Emulation) -> None:
    alone = submitted(ready, "alone")
    number = submitted(ready, "resident", "outer.every=2")
    with OuterClient(ready.directory) as client:
        model, state = client.outer_model(number)
    end = layout.parameters_end(model.tensors)
    for key in ("1", "2"):
        if key == "2":
            before = ready.daemon()
            before.kill()
            before.wait(30)
        answer, changed = ordered(ready, number, key, state)
        assert answer.rounds == 2 and answer.samples == 2 * 1437
        state = np.concatenate([state[:end] + changed[:end], changed[end:]])
    with OuterClient(ready.directory) as client, pytest.raises(MillpondError):
        client.outer_round(number, "end", "end", state)
    eventually(lambda: ready.progress(number)[0].state == "done", "the end of the job", 60, 0.1)
    eventually(lambda: ready.progress(alone)[0].state == "done", "the end of the other job", 60, 0.1)
    models = [
        load_file(ready.directory / "jobs" / str(each) / "model.safetensors") for each in (alone, number)
    ]
    for name, tensor in models[0].items():
        np.testing.assert_allclose(models[1][name], tensor, atol=1e-6)
