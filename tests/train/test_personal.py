# SPDX-License-Identifier: Apache-2.0
"""Personalized training: as plain torch has it, kept by its own device alone, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from millpond.base.errors import ConfigError, LocalError, Refused
from millpond.linux.zygote.client import Zygote
from millpond.train import simulate
from millpond.train.api.simulate import LEAST_SAMPLES
from millpond.train.determinism import generators
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.personal import PersonalPart, loop_of
from millpond.train.local.selection import SampleFolders
from millpond.train.protocol import (
    DataTiming,
    Folder,
    GetModel,
    Model,
    PrepareServer,
    ServerReady,
    Update,
    Work,
)
from millpond.train.state import flat, layout
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.layout import Tensor
from millpond.train.state.personal_state import PersonalState
from millpond.train.strategies import LocalRule
from millpond.train.task.task import Task

from ..effort import scaled
from .personal_reference import PERSONALIZED, compare
from .strategy_reference import Digits
from .worker_process import (
    WORK,
    soon,
    started,
    state_of,
)

APFL, INNER = LocalRule(alpha=0.25, adaptive=True), LocalRule(inner_rate=0.1)
OPTIMIZER = OptimizerSpec("SGD", 0.05, {"momentum": 0.9})
TRAINING = WorkSpec("personal", ModelSpec("a:b"), optimizer=OPTIMIZER, passes=1, batch=16, held_out=0.25)
TENSORS = (Tensor("head", (2,), "float32"),)


@pytest.fixture(scope="module", autouse=True)
def deterministic() -> None:
    generators.be_deterministic(1)


@pytest.mark.parametrize("name", PERSONALIZED)
def test_personalized_training_is_what_plain_torch_computes(name: str, tmp_path: Path) -> None:
    for seed in range(scaled(1, 3)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found = compare(name, folder, seed)
        assert abs(found.ours - found.reference) <= 1.0
        assert found.difference < 0.01  # a ReLU near its kink makes much of a rounding
        assert found.ours > found.first + 20


class Normalized(Digits):
    """A task whose model has running statistics, and a frozen parameter."""

    def model(self) -> nn.Module:
        made = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
        made[0].bias.requires_grad_(False)  # type: ignore[union-attr]
        return made


def device(
    work: WorkSpec = TRAINING, local: tuple[str, ...] = (), folder: Path | None = None
) -> LocalTrainer:
    """The trainer of a device with 160 digits."""
    user, private = Normalized(), Folder("2", "csd2", group=LEAST_SAMPLES)
    task, part = Task(user), user.parts["2"]
    generators.plant(0)
    model = task.model()
    parameters = FlatParameters(model, local=flat.local_names(model, local))
    samples = SampleFolders(task, 0, [private], [part], work.held_out)
    return LocalTrainer(parameters, task, samples, work, "run", folder)


def answer(one: LocalTrainer, number: int, state: np.ndarray) -> tuple[bytes, Update]:
    """The values of a round's update, and its head without what was timed."""
    update = one.run(Work(number, number, number, (((0, 120),),)), state)
    return one.parameters.sums.tobytes(), replace(update, seconds=0.0, busy=0.0, peak=0, data=DataTiming())


def score(one: LocalTrainer, number: int, state: np.ndarray) -> dict[str, tuple[float, float]]:
    return one.run(Work(number, 0, number, (), held_out=True), state).metrics


def states(one: LocalTrainer) -> list[np.ndarray]:
    """The states of some rounds, as a host would send them."""
    first = one.parameters.state.copy()
    return [first * np.float32(1 - 0.05 * number) for number in range(4)]


@pytest.mark.parametrize("rule", [LocalRule(), APFL, INNER])
@pytest.mark.parametrize("local", [(), ("1.*",), ("3.*", "1.running_*")])
def test_training_goes_on_after_a_restart_and_a_round_can_be_repeated(
    rule: LocalRule, local: tuple[str, ...], tmp_path: Path
) -> None:
    work = replace(TRAINING, local=rule, accumulate=2)
    whole, broken = device(work, local), device(work, local, tmp_path)
    for number, state in enumerate(states(whole), 1):
        expected = answer(whole, number, state)
        assert answer(broken, number, state) == expected
        if number % 2:
            broken = device(work, local, tmp_path)  # the worker has died, and the round did not count
            assert answer(broken, number, state) == expected
        assert score(broken, number, state) == score(whole, number, state)
    assert bool(list(tmp_path.iterdir())) == bool(local or rule.alpha)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_personal_model_changes_nothing_of_what_is_sent(accumulate: int) -> None:
    """Nor does a score between two rounds."""
    plain, mixed = device(), device(replace(TRAINING, local=APFL))
    for number, state in enumerate(states(plain), 1):
        expected = answer(plain, number, state)
        assert answer(mixed, number, state) == expected
        assert score(mixed, number, state) != score(plain, number, state)


def test_an_inner_step_of_a_score_leaves_the_model_as_it_was() -> None:
    one, other = device(replace(TRAINING, local=INNER)), device(replace(TRAINING, local=INNER))
    state = states(one)[0]
    assert score(one, 0, state) == score(one, 0, state) != score(device(), 0, state)
    assert answer(one, 1, state) == answer(other, 1, state)


@pytest.mark.parametrize("rule", [INNER, replace(INNER, delta=0.1)])
@pytest.mark.parametrize("batch", [8, 16, 40])
def test_each_gradient_of_a_step_is_of_whole_groups(rule: LocalRule, batch: int) -> None:
    """With an inner rate of next to nothing an update tells of one part of each batch alone."""
    one = device(replace(TRAINING, local=rule, batch=batch))
    folders = one._samples
    folders.take(Work(0, 0, 1, (((0, 8),),)))
    first, count = folders._orders[0], folders.counts[0]
    ends = [*range(8, count - 8 + 1, 8), count]
    groups = [set(first[start:stop].tolist()) for start, stop in zip([0, *ends], ends, strict=False)]
    answer(one, 1, states(one)[0])
    read = folders._parts[0].read  # type: ignore[attr-defined]
    assert all(part == set().union(*(g for g in groups if g <= part)) for part in map(set, read))
    assert sum(map(len, read)) == count
    wide = [part for part in read if len(part) > 16]
    assert not wide if batch < 40 or rule.delta else wide


def test_local_layers_are_neither_sent_nor_overwritten() -> None:
    one = device(local=("1.*", "3.bias"))
    names = [tensor.name for tensor in one.parameters.tensors]
    assert names == ["0.weight", "3.weight"]
    model = one.parameters.model
    first = {name: value.clone() for name, value in model.state_dict().items()}
    state = states(one)[0]
    answer(one, 1, state)
    one.parameters.load(state)
    same = {name for name, value in model.state_dict().items() if torch.equal(value, first[name])}
    assert same == {"0.bias", *names} and one.parameters.sums.size == 64 * 16 + 16 * 10


def test_the_state_of_another_run_is_replaced_whatever_its_shape(tmp_path: Path) -> None:
    task = Task(Normalized())
    model = task.model()
    parameters = FlatParameters(model, local=["3.bias"])
    loop = loop_of(task, model, TRAINING)
    PersonalState((*TENSORS, *TENSORS), "before", tmp_path).keep(9, np.ones(4, np.float32))
    part = PersonalPart(parameters, loop, "now", tmp_path)
    before = model.get_parameter("3.bias").detach().clone()
    part.load(20)
    assert torch.equal(model.get_parameter("3.bias"), before)
    assert len(list(tmp_path.iterdir())) == 1
    part.keep(21)
    (path,) = tmp_path.glob("*.safetensors")
    assert path.name.endswith("-000000021.safetensors")


def test_a_run_whose_state_made_way_does_not_begin_anew_unnoticed(tmp_path: Path) -> None:
    """A job was stopped, another one of its name has run, and the first one is resumed."""
    PersonalState(TENSORS, "one", tmp_path).keep(3, np.ones(2, np.float32))
    PersonalState(TENSORS, "two", tmp_path).keep(1, np.zeros(2, np.float32))
    with pytest.raises(LocalError, match="has made way for that of another job of its name"):
        PersonalState(TENSORS, "one", tmp_path)
    assert PersonalState(TENSORS, "two", tmp_path).after(1) is not None


def test_the_last_two_exchanges_are_kept(tmp_path: Path) -> None:
    for again in (False, True):
        state = PersonalState(TENSORS, "run/../../x", tmp_path)
        if not again:
            for number in (1, 2, 5, 7):
                state.keep(number, np.full(2, number, np.float32))
            state.keep(8, np.array([1, np.nan], np.float32))
        found = [state.after(number) for number in (4, 5, 6, 7, 99)]
        assert [None if each is None else int(each[0]) for each in found] == [None, 5, 5, 7, 7]
    state.keep(6, np.zeros(2, np.float32))  # the host goes on from an older checkpoint
    assert state.after(99) is not None and state.after(99)[0] == 0 and len(list(tmp_path.iterdir())) == 2  # type: ignore[index]


def test_a_state_that_is_damaged_or_of_another_model_is_refused_by_its_own_run_alone(tmp_path: Path) -> None:
    state = PersonalState(TENSORS, "run", tmp_path)
    state.keep(1, np.zeros(2, np.float32))
    with pytest.raises(LocalError, match="is damaged or of another model: submit the job anew"):
        PersonalState((Tensor("head", (3,), "float32"),), "run", tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(LocalError, match="is damaged or of another model: submit the job anew"):
        PersonalState(TENSORS, "run", tmp_path)
    assert PersonalState(TENSORS, "another", tmp_path).after(9) is None
    with pytest.raises(LocalError, match="there is no room for it, or the disk has failed"):
        PersonalState(TENSORS, "another", path).keep(1, np.zeros(2, np.float32))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.more = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.words.weight
        self.more.requires_grad_(False)
        self.register_buffer("passing", torch.zeros(1), persistent=False)


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (["haed.*"], "'haed.*' is no parameter or buffer of the model; did you mean 'head*'?"),
        (
            ["words.*", "head.*", "x"],
            "'x' is no parameter or buffer of the model; known: words*, head*, more*",
        ),
        (["passing"], "'passing' is no parameter or buffer of the model; known: words*, head*, more*"),
        (["head.*"], "'head.weight' is the same parameter as 'words.weight': name both"),
        (["[wh]*"], "no parameter that may be trained is left to be averaged"),
    ],
)
def test_patterns_that_make_no_sense_are_refused_by_name(patterns: list[str], told: str) -> None:
    with pytest.raises(LocalError) as caught:
        flat.local_names(Tied(), patterns)
    assert str(caught.value) == f"federated: local: {told}"
    assert flat.local_names(Tied(), ["*.weight"]) == {"words.weight", "head.weight", "more.weight"}


@pytest.mark.parametrize(
    "rule",
    [
        {"alpha": 0.5, "inner_rate": 0.1},
        {"alpha": 1.5},
        {"adaptive": True},
        {"delta": 0.1},
        {"inner_rate": -1.0},
    ],
)
def test_rules_that_make_no_sense_are_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LocalRule(**rule)


def test_a_simulation_scores_local_layers_on_devices_alone(tmp_path: Path) -> None:
    task = Normalized()
    for name in task.parts:
        (tmp_path / name).mkdir()
    folders = [tmp_path / str(number) for number in range(3)]
    keys: dict[str, Any] = {"local": ["1.*"], "rounds": 2, "tell": lambda line: None}
    fitted = simulate(task, folders, held_out=0.25, batch=16, **keys)
    assert [set(figures) for figures in fitted.devices] == [{"accuracy", "loss"}] * 2
    assert not fitted.model.get_buffer("1.running_mean").any() and fitted.scores == [{}, {}]
    with pytest.raises(LocalError, match="test: local layers have trained values on devices alone"):
        simulate(task, folders, tmp_path / "test", **keys)


LOCAL = replace(WORK, model=ModelSpec("nets:two", ("nets.py",)), passes=1, batch=8, local_layers=("3.*",))


def test_a_worker_that_was_killed_goes_on_with_its_local_layers(
    root: Path, tmp_path: Path, zygote: Zygote
) -> None:
    """Their values are in no update, and the parameter server has the first ones."""
    kept = tmp_path / "state"
    kept.mkdir(mode=0o777)
    with started(zygote, root, tmp_path / "server.log") as server:
        ready = server.call(PrepareServer(LOCAL), ServerReady)
        assert isinstance(ready, ServerReady)
        assert [tensor.name for tensor in ready.tensors] == ["1.weight", "1.bias"]
        server.channel.send(GetModel(), soon())
        found = server.channel.expect(Model, soon(), payload=4 * 592)
        whole = server.channel.receive_payload(4 * found.size, soon())
        first = np.frombuffer(whole, np.float32)[520:]
    updates = []
    for number, restart in ((1, False), (2, True), (2, False)):
        with started(zygote, root, tmp_path / f"{len(updates)}.log", kept) as worker:
            worker.prepare(LOCAL, frozen=ready.checksum, run="7")
            worker.state[:] = state_of(number, len(worker.state))
            update = worker.call(Work(number, 5, 1, (((0, 30),), ((0, 20),))), Update)
            assert isinstance(update, Update) and len(worker.values) == layout.size(ready.tensors) == 520
            updates.append((update.norm, worker.values.tobytes()))
            if restart:
                worker.process.kill()
    assert updates[1] == updates[2] != updates[0]
    newest = max(kept.iterdir())
    assert newest.name.endswith("-000000002.safetensors")
    found_state = PersonalState(
        (Tensor("3.weight", (8, 8), "float32"), Tensor("3.bias", (8,), "float32")), "7", kept
    ).after(2)
    assert found_state is not None and not np.array_equal(found_state, first)


def test_a_worker_without_a_place_for_its_own_layers_says_so(
    root: Path, tmp_path: Path, zygote: Zygote
) -> None:
    for work in (LOCAL, replace(LOCAL, local_layers=(), local=APFL)):
        with (
            started(zygote, root, tmp_path / "log") as worker,
            pytest.raises(Refused, match="there is no room"),
        ):
            worker.prepare(work)
    with started(zygote, root, tmp_path / "server.log") as server:
        code, text = server.refused(PrepareServer(replace(LOCAL, local_layers=("head.*",))))
        assert (code, text) == (
            "model",
            "federated: local: 'head.*' is no parameter or buffer of the model; known: 1*, 3*",
        )
