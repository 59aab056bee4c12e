# SPDX-License-Identifier: Apache-2.0
"""A private launch on a fleet: it trains where the data lies, and the device's policy holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ..privacy.gan import EXAMPLE, difference, quality, trained
from .support import Emulation

pytestmark = pytest.mark.timeout(240)

EPOCHS = 4
READING = """\
import os, socket
from pathlib import Path
if os.environ["RANK"] != "0":
    print(sorted(os.listdir("/volume/private")), sorted(os.listdir("/volume/private/digits")))
try:
    socket.create_connection(("10.77.0.1", 7700), 3)
except OSError as error:
    print(type(error).__name__)
"""
FEW = """\
import torch, millpond.train
with millpond.train.group(torch.nn.Linear(1, 1)) as group:
    group.report("loss", 1.0, 1 if group.rank == 2 else 8)
"""


def images(folder: Path) -> np.ndarray:
    """All of a folder."""
    found: np.ndarray = np.load(folder / "images.npy")
    return found


def test_a_gan_ends_as_in_one_process_that_has_all_data(fleet: Emulation) -> None:
    flash = [fleet.fleet.device_directory(f"csd{n}") / "flash" for n in range(3)]
    parts = [images(flash[0] / "public/digits"), *(images(path / "private/digits") for path in flash)]
    with fleet.client() as client:
        before = client.ledgers()
    options = ["--private", "--data", "private/digits", "--output", fleet.base / "gan"]
    result = fleet.millpond("launch", *options, "--", EXAMPLE, "--epochs", str(EPOCHS))
    assert result.code == 0, f"{result}\n{fleet.logs()}"
    found, alone = torch.load(fleet.base / "gan/host/gan.pt"), trained(parts, EPOCHS)
    assert difference(found, alone) < 1e-5 < 1e-2 < difference(found, trained(parts, 1))
    test = fleet.base / "test"
    scores = [quality(state, images(test), np.load(test / "labels.npy")) for state in (found, alone)]
    assert abs(scores[0] - scores[1]) < 1
    lines = result.out.splitlines()
    assert len([line for line in lines if line.startswith("[all] critic_loss ")]) == EPOCHS
    assert not [line for line in lines if line.startswith("[csd")]
    with fleet.client() as client:
        after = client.ledgers()
    values = sum(tensor.numel() for model in alone.values() for tensor in model.values())
    for name, part in zip(("csd0", "csd1", "csd2"), parts[1:], strict=True):
        sent = {kind: after[name].sent[kind] - before[name].sent[kind] for kind in before[name].sent}
        steps = sent["parameters"] / (4 * values)
        assert steps == int(steps) and len(part) * EPOCHS / steps > 8, sent
        assert sent["launched"] < 1000 and sent["metrics"] < sent["parameters"] / 20, sent


def test_a_script_reads_the_folders_it_names_and_has_no_network(fleet: Emulation) -> None:
    script = fleet.base / "reading.py"
    script.write_text(READING)
    result = fleet.millpond("launch", "--private", "--data", "private/digits", "--", script)
    assert (result.code, result.out) == (0, "[host] OSError\n"), result
    for name in ("csd0", "csd1", "csd2"):
        log = fleet.fleet.device_directory(name) / "flash/private/.millpond-logs/launch-reading.py.log"
        assert log.read_text() == "['digits'] ['images.npy', 'labels.npy']\nOSError\n"


def test_too_few_samples_are_refused_by_name(fleet: Emulation) -> None:
    script = fleet.base / "few.py"
    script.write_text(FEW)
    result = fleet.millpond("launch", "--private", "--", script)
    assert result.code == 3, result
    assert result.err.splitlines()[-1] == (
        "millpond: csd1 (rank 2): policy.least_samples: an exchange of 1 samples; it must cover 8 or more;"
        " the others were ended"
    )
