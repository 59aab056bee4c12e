# SPDX-License-Identifier: Apache-2.0
"""A federation by Flower: its messages and strategies over the seam, and two hosts for two rounds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from millpond.host.cli.federation import project
from millpond.host.cli.federation.processes import RUN

from .conftest import _switched_on
from .support import EXAMPLES, MILLPOND, Emulation, create

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".flower"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (ENVIRONMENT / "bin" / "flwr").exists(), reason="there is no .flower: make flower"
    ),
]


def test_the_seam_with_flower_s_own_messages_and_strategies() -> None:
    argv = (ENVIRONMENT / "bin" / "python", ROOT / "tests" / "host" / "flower_seam.py")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Emulation]:
    """A second host, with one device."""
    emulation = create(tmp_path, ("csd0",))
    with _switched_on(emulation):
        emulation.wait_ready()
        yield emulation


def test_two_hosts_train_one_model(ready: Emulation, other: Emulation) -> None:
    job, app = ready.base / "several.toml", other.base / "app"
    job.write_text((EXAMPLES / "digits.toml").read_text().replace("target", "#"))
    project.create(app, job, 1)
    fleets = [word for each in (ready, other) for word in ("--fleet", str(each.directory))]
    argv = (*MILLPOND, "federate", "run", str(app), *fleets, "--rounds", "2", "--flower", str(ENVIRONMENT))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
    logs = "\n".join(path.read_text()[-2000:] for path in (app / RUN).glob("*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    lines = [json.loads(line) for line in (app / RUN / "rounds.jsonl").read_text().splitlines()]
    trained = [line["replies"] for line in lines if "replies" in line]
    assert [len(replies) for replies in trained] == [2, 2]
    model = load_file(app / RUN / "model.safetensors")
    for fleet in (ready, other):
        with fleet.client() as client:
            info = client.jobs()[-1]
        own = load_file(info.model)
        assert info.state == "done" and info.round == 2
        assert all(np.array_equal(model[name].reshape(own[name].shape), own[name]) for name in own)
