# SPDX-License-Identifier: Apache-2.0
"""A task in one process: trained alone, and as the devices of a simulated fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from millpond.base.errors import LocalError
from millpond.train import fit, simulate

COEFFICIENTS = torch.tensor([1.0, -2.0, 0.5])


class Line:
    """Linear regression. A folder's name ends with the number of its samples."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def dataset(self, folder: Path, split: str) -> TensorDataset:
        count = int(folder.name.rpartition("-")[2])
        x = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
        return TensorDataset(x, x @ COEFFICIENTS + 0.1)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        x, y = batch
        return ((model(x)[:, 0] - y) ** 2).sum(), len(y)

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
        x, y = batch
        return {"mae": ((model(x)[:, 0] - y).abs().sum(), len(y))}

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        return {"rmse": means["loss"] ** 0.5}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"data-{count}" for count in (100, 40, 25)]
    for folder in found:
        folder.mkdir()
    return found


def test_fit_trains_to_the_coefficients(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    fitted = fit(Line(), folders[0], folders[2], epochs=30, batch=10, learning_rate=0.05)
    assert isinstance(fitted.model, nn.Linear)
    torch.testing.assert_close(fitted.model.weight[0], COEFFICIENTS, atol=1e-3, rtol=0)
    assert set(fitted.scores[-1]) == {"mae", "loss", "rmse"} and fitted.scores[-1]["mae"] < 1e-3
    assert fitted.scores[-1]["rmse"] == pytest.approx(fitted.scores[-1]["loss"] ** 0.5)
    assert len(fitted.losses) == 30 and fitted.losses[-1] < fitted.losses[0]
    assert capsys.readouterr().out.splitlines()[0].startswith("epoch 1: training loss ")


def test_one_seed_gives_the_same_bits(folders: list[Path]) -> None:
    one, same, other = (fit(Line(), folders[0], seed=seed).model.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_a_simulated_round_is_the_mean_of_local_training_by_samples(folders: list[Path]) -> None:
    first = simulate(Line(), folders, rounds=1, batch=1000, learning_rate=0.1, momentum=0.0)
    torch.manual_seed(0)
    start = Line().model().state_dict()
    mean = np.zeros((1, 3))
    for folder in folders:
        model = nn.Linear(3, 1)
        model.load_state_dict(start)
        dataset = Line().dataset(folder, "train")
        loss, count = Line().loss(model, dataset.tensors)
        (loss / count).backward()
        mean += (start["weight"] - 0.1 * model.weight.grad).numpy() * len(dataset) / 165
    np.testing.assert_allclose(first.model.state_dict()["weight"].numpy(), mean, atol=1e-6)


def test_simulated_rounds_learn_and_have_a_server_of_their_own(folders: list[Path]) -> None:
    plain = simulate(Line(), folders, folders[0], rounds=10, batch=8)
    assert plain.scores[-1]["mae"] < 0.01
    slow = simulate(Line(), folders, folders[0], rounds=10, batch=8, strategy={"learning_rate": 0.1})
    assert slow.scores[-1]["mae"] > plain.scores[-1]["mae"]


def test_a_simulation_leaves_out_what_a_fleet_leaves_out(folders: list[Path], tmp_path: Path) -> None:
    told: list[str] = []
    few = [tmp_path / "data-7", tmp_path / "data-0"]
    for folder in few:
        folder.mkdir()
    with_them, without = (
        simulate(Line(), each, rounds=2, learning_rate=0.05, tell=told.append)
        for each in ([*folders, *few], folders)
    )
    assert with_them.losses == without.losses
    assert [line.partition(": ")[2] for line in told[:2]] == [
        "7 samples; a device has 8",
        "0 samples; a device has 8",
    ]
    assert str(few[0]) in told[0] and str(few[1]) in told[1]
    with pytest.raises(LocalError, match="no folder has the 8 samples"):
        simulate(Line(), few, rounds=1)
    with pytest.raises(LocalError, match="data-0: there are no samples"):
        fit(Line(), tmp_path / "data-0")


def test_a_simulation_refuses_the_updates_that_a_fleet_refuses(folders: list[Path]) -> None:
    class Steep(Line):
        def loss(
            self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
        ) -> tuple[torch.Tensor, int]:
            loss, count = super().loss(model, batch)
            return loss * 1e6, count

    with pytest.raises(LocalError, match=r"csd0 \(.*\): update refused: a value is beyond 65536 per sample"):
        simulate(Steep(), folders, rounds=1, batch=1000, learning_rate=1.0)
