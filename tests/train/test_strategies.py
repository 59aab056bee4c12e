# SPDX-License-Identifier: Apache-2.0
"""Strategies: as plain torch has them, resumed to the same bits, and what is refused."""

from __future__ import annotations

import copy
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from millpond.base.errors import LocalError
from millpond.base.schema import load
from millpond.train import simulate
from millpond.train.server.server_optimizer import ServerOptimizer, optimizer_of
from millpond.train.state import layout
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.strategies import Combination, Strategy, catalogue
from millpond.train.strategies.fednova import accumulated
from millpond.train.worker import user_code

from ..effort import scaled
from ..job_files import written
from .strategy_reference import REFERENCES, Digits, accuracy, compare

SMALL = 3
OWN = """
import torch
from millpond.train.strategies import Combination, LocalRule, Strategy

class Sign(Strategy):
    combine = Combination("trimmed", 0.25)
    local = LocalRule(proximal=0.5)

    def __init__(self, rate=0.01):
        self.rate = rate

    def step(self, value, mean, kept):
        kept["trend"] = 0.5 * kept.get("trend", 0 * mean) + mean
        value -= self.rate * kept["trend"].sign()

class Counts(Sign):
    def step(self, value, mean, kept):
        kept["steps"] = kept.get("steps", 0) + 1

class Wide(Sign):
    def step(self, value, mean, kept):
        kept["wide"] = mean.double()

class Odd(Strategy):
    combine = "median"

class Misspelt(Strategy):
    combine = Combination("medain")

class Cut(Strategy):
    combine = Combination("median", 0.2)

class Nothing:
    pass
"""


@pytest.mark.parametrize("name", REFERENCES)
def test_a_strategy_is_what_plain_torch_computes(name: str, tmp_path: Path) -> None:
    for seed in range(scaled(1, 3)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found = compare(name, folder, seed)
        assert abs(found.ours - found.reference) <= 1.0
        assert found.difference < 0.01  # a ReLU near its kink makes much of a rounding
        assert found.ours > found.first + 20


def test_a_strategy_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "halved.py").write_text(
        "from dataclasses import dataclass\n"
        "from millpond.train.strategies.fedavg import FedAvg\n"
        "@dataclass(frozen=True, slots=True)\n"
        "class Halved(FedAvg):\n"
        "    learning_rate: float = 0.5\n"
    )
    code = (
        "import sys; from millpond.train import strategies; strategies.__path__.append(sys.argv[1])\n"
        "from millpond.train.strategies import catalogue; print(catalogue.check('halved', 'strategy'))"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "Halved(learning_rate=0.5)\n"


def test_a_combination_rule_is_one_file(tmp_path: Path) -> None:
    """Also for a strategy of the user's own, which names it."""
    (tmp_path / "least.py").write_text(
        "from millpond.aggregate.rules.rule import RowRule\n"
        "class LeastOfRows(RowRule):\n"
        "    def combined(self, columns):\n"
        "        return columns.min(axis=1)\n"
    )
    (tmp_path / "ours.py").write_text(OWN.replace('"trimmed", 0.25', '"least"'))
    code = (
        "import sys; from pathlib import Path; import numpy as np; from millpond.aggregate import rules\n"
        "rules.__path__.append(sys.argv[1])\n"
        "from millpond.aggregate.rules.catalogue import rule_of\n"
        "from millpond.train.worker import user_code\n"
        "made = user_code.strategy({'factory': 'ours:Sign'}, Path(sys.argv[1]))\n"
        "print(rule_of(made.combine.rule).combined(np.array([[3, 1, 2]])))"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[1]\n"


@pytest.mark.parametrize("name", [*catalogue.STRATEGIES, "own"])
def test_a_strategy_resumes_to_the_same_bits(name: str, own: Path) -> None:
    table = {"factory": "ours:Sign"} if name == "own" else {"name": name}
    if name == "fedopt":
        table["optimizer"] = "Adam"
    means = np.random.default_rng(1).normal(size=(8, SMALL * 4 + 4)).astype(np.float32)
    whole = server(table, own)
    for number, mean in enumerate(means):
        if number == 5:
            entries, kept = whole.momentum()
            state, again = whole.parameters.state.copy(), server(table, own)
            again.parameters.state[:] = state
            again.restore(entries, kept.copy())
        whole.parameters.sums[:] = mean
        whole.apply(1.0)
        if number >= 5:
            again.parameters.sums[:] = mean
            again.apply(1.0)
    assert again.parameters.state.tobytes() == whole.parameters.state.tobytes()
    stateless = {"fedavg", "fedprox", "fednova", "median", "trimmed", "apfl", "perfedavg"}
    assert (len(kept) > 0) == (name not in stateless)


def server(table: dict[str, Any], code_dir: Path) -> ServerOptimizer:
    torch.manual_seed(0)
    parameters = FlatParameters(nn.Linear(SMALL, 4))
    strategy = user_code.strategy(table, code_dir)
    return ServerOptimizer(parameters, optimizer_of(strategy, parameters.model))


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    folder = written({"ours.py": OWN}, tmp_path)
    yield folder
    user_code.forget(folder)


def test_one_of_the_users_own_declares_what_the_others_do(own: Path) -> None:
    made = user_code.strategy({"factory": "ours:Sign", "rate": 0.5}, own)
    assert made.combine == Combination("trimmed", 0.25) and made.local.proximal == 0.5
    value, mean = torch.zeros(2), torch.tensor([3.0, -0.1])
    made.step(value, mean, {})
    assert value.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"factory": "ours:Sing"}, "factory: module ours has no class 'Sing'"),
        ({"factory": "theirs:Sign"}, "factory: there is no module 'theirs'; list its file in files"),
        ({"factory": "ours:Sign", "rates": 1}, "ours:Sign: got an unexpected keyword argument 'rates'"),
        ({"factory": "ours:Nothing"}, "ours:Nothing is no millpond.train.strategies.Strategy"),
        ({"factory": "ours:Odd"}, "ours:Odd: combine is no millpond.train.strategies.Combination"),
        ({"factory": "ours:Misspelt"}, "combine: there is no rule 'medain'; did you mean 'median'?"),
        ({"factory": "ours:Cut"}, "combine: share: the rule 'median' has none"),
        ({"name": "fedopt", "optimizer": "Adamm"}, "optimizer: 'Adamm' is not one of ASGD, Ada"),
        ({"name": "fedopt", "optimizer": {"name": "Adam", "beta": 1}}, "optimizer: Adam: got an unexpected"),
        ({"factory": "ours:Counts"}, "keeps 'steps', a int; keep float32 tensors alone"),
        ({"factory": "ours:Wide"}, "keeps 'wide', a torch.float64; keep float32 tensors alone"),
    ],
)
def test_what_is_no_strategy_is_refused_in_one_line(table: dict[str, Any], told: str, own: Path) -> None:
    with pytest.raises(LocalError) as caught:
        made = server(table, own)
        made.parameters.sums[:] = 1.0
        made.apply(1.0)
    assert str(caught.value).startswith(f"federated: strategy: {told}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
    ],
)
@pytest.mark.parametrize("proximal", [0.0, 0.5])
def test_local_steps_are_weighed_as_torchs_sgd_weighs_gradients(
    steps: int, keys: dict[str, Any], proximal: float
) -> None:
    """The sum of the weights of the gradients, each found by a gradient of 1 in one step alone."""
    rate, total = 0.1, 0.0
    for chosen in range(steps):
        value = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([value], lr=rate, **keys)
        for step in range(steps):
            value.grad = float(step == chosen) + proximal * value.detach()
            optimizer.step()
        total -= value.item() / rate
    usual = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
    assert accumulated(steps, rate, proximal=proximal, **usual | keys) == pytest.approx(total)


def test_normalized_differences_leave_running_statistics_alone() -> None:
    """Their mean change counts samples, not local steps."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    found = []
    for steps in (1.0, 8.0):
        parameters = FlatParameters(copy.deepcopy(model))
        before = parameters.state.copy()
        parameters.model.train()
        with torch.no_grad():
            parameters.model(torch.arange(12.0).view(4, 3))
            parameters.model[1].weight += 1.0  # type: ignore[index, operator]
        largest, norm, _ = parameters.gather_differences(before, 16, steps)
        values = parameters.sums[: layout.parameters_end(parameters.tensors)]
        assert largest == pytest.approx(float(np.abs(values).max()))
        assert norm == pytest.approx(float(np.linalg.norm(values)), rel=1e-5)
        named = dict(zip((tensor.name for tensor in parameters.tensors), _parts(parameters), strict=True))
        found.append(named)
    plain, normalized = found
    assert plain["0.running_mean"].any() and plain["1.weight"].any()
    for name, values in plain.items():
        times = 1 if name.startswith(("0.run", "0.num")) else 8
        np.testing.assert_allclose(normalized[name] * times, values, rtol=1e-5)


def _parts(parameters: FlatParameters) -> list[np.ndarray]:
    sizes = [int(np.prod(tensor.shape, dtype=int)) for tensor in parameters.tensors]
    return np.split(parameters.sums.copy(), np.cumsum(sizes)[:-1])


def test_a_simulation_takes_an_object_of_a_class_of_ones_own(tmp_path: Path) -> None:
    class Half(Strategy):
        def step(self, value: Tensor, mean: Tensor, kept: dict[str, Tensor]) -> None:
            value -= mean / 2

    scores = []
    for strategy in (Half(), {"name": "fedavg", "learning_rate": 0.5}):
        task = Digits()
        for name in task.parts:
            (tmp_path / name).mkdir(exist_ok=True)
        folders = [tmp_path / str(number) for number in range(3)]
        fitted = simulate(task, folders, rounds=2, strategy=strategy, tell=lambda line: None)
        scores.append(accuracy(fitted.model, task.parts["test"]))
    assert scores[0] == scores[1]
    with pytest.raises(LocalError, match="give an object of the class itself"):
        simulate(Digits(), folders, strategy={"factory": "a:b"})
    with pytest.raises(LocalError, match="there is no strategy 'fedavgg'; did you mean 'fedavg'"):
        simulate(Digits(), folders, strategy="fedavgg")


def test_the_strategy_of_the_readme(tmp_path: Path) -> None:
    """As it is printed, in a module of the strategies: its keys are read, and its step is made."""
    text = (Path(__file__).parents[2] / "agent" / "README.md").read_text()
    (tmp_path / "fedsign.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    strategy = runpy.run_path(str(tmp_path / "fedsign.py"))["FedSign"]
    value = torch.tensor([1.0, 2.0])
    load(strategy, {"learning_rate": 0.5}, "strategy").step(value, torch.tensor([-3.0, 0.1]), {})
    assert value.tolist() == [1.5, 1.5]
