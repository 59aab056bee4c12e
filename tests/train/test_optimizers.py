# SPDX-License-Identifier: Apache-2.0
"""Optimizers, rates and schedules by name or of a task; batches in parts, clipped, in bfloat16."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from millpond.base.errors import LocalError
from millpond.train.data.labelled_images import LabelledImages, of_arrays
from millpond.train.data.parquet import ParquetRows
from millpond.train.data.tar import TarSamples
from millpond.train.job.spec import ModelSpec, OptimizerSpec, SchedulerSpec, WorkSpec
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.optimizers import Schedule, make_optimizer
from millpond.train.local.prefetch import prefetched
from millpond.train.local.selection import SampleFolders
from millpond.train.protocol import Folder, Work
from millpond.train.server.lr_scaling import LearningRate
from millpond.train.server.server_optimizer import ServerOptimizer
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.task.task import Task

SAMPLES = 23
SEEN: list[torch.dtype] = []


class Seeing(nn.Linear):
    """Notes the types of its outputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        found = super().forward(inputs)
        SEEN.append(found.dtype)
        return found


class User:
    """A task of images."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), Seeing(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Own(User):
    """One with an optimizer and a schedule."""

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        weights, rest = parameters[:1], parameters[1:]
        return torch.optim.RMSprop([{"params": weights, "lr": 0.5}, {"params": rest}], lr=0.25)

    def scheduler(self, optimizer: torch.optim.Optimizer, total: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / total)


def rates(schedule: Schedule, optimizer: torch.optim.Optimizer, *epochs: int) -> list[list[float]]:
    found = []
    for epoch in epochs:
        schedule.set(optimizer, epoch)
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize(
    ("spec", "kind", "expected"),
    [
        (OptimizerSpec(), torch.optim.SGD, {"lr": 1.0, "momentum": 0}),
        (OptimizerSpec("sgd", 0.1, {"momentum": 0.9, "nesterov": True}), torch.optim.SGD, {"nesterov": True}),
        (OptimizerSpec("ADAMW", 0.1, {"betas": [0.5, 0.75]}), torch.optim.AdamW, {"betas": (0.5, 0.75)}),
        (OptimizerSpec("rmsprop", 0.2), torch.optim.RMSprop, {"lr": 0.2}),
        (OptimizerSpec("AdamW", None), torch.optim.AdamW, {"lr": 1e-3}),
    ],
)
def test_an_optimizer_by_its_name_in_any_case(
    spec: OptimizerSpec, kind: type[torch.optim.Optimizer], expected: dict[str, Any]
) -> None:
    model = User().model()
    model[1].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    made = make_optimizer(model, spec, Task(User()))
    assert type(made) is kind
    (group,) = made.param_groups
    assert len(group["params"]) == 3 and {name: group[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (OptimizerSpec("adm"), "train: optimizer: 'adm' is not one of ASGD, Ada"),
        (OptimizerSpec("lbfgs"), "train: optimizer: 'lbfgs' is not one of "),
        (OptimizerSpec("optimizer"), "train: optimizer: 'optimizer' is not one of "),
        (OptimizerSpec("adam", 0.1, {"momentum": 0.9}), "train: optimizer: Adam: got an unexpected keyword"),
        (OptimizerSpec("", 0.1, {"nestrov": True}), "train: optimizer: SGD: got an unexpected keyword"),
        (OptimizerSpec("adam", 0.1, {"betas": 3}), "train: optimizer: Adam: "),
        (
            OptimizerSpec("sgd", 0.1, {"momentum": -1.0}),
            "train: optimizer: SGD: Invalid momentum value: -1.0",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused_in_one_line(spec: OptimizerSpec, told: str) -> None:
    with pytest.raises(LocalError) as caught:
        make_optimizer(User().model(), spec)
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)


def test_a_task_has_its_own_unless_the_job_names_one() -> None:
    model, task = User().model(), Task(Own())
    own = make_optimizer(model, OptimizerSpec("", 7.0), task)
    assert isinstance(own, torch.optim.RMSprop) and [g["lr"] for g in own.param_groups] == [0.5, 0.25]
    assert isinstance(make_optimizer(model, OptimizerSpec("adam"), task), torch.optim.Adam)
    schedule = Schedule(own, SchedulerSpec(), 4, task)
    assert rates(schedule, own, 1, 3, 2) == [[0.5, 0.25], [0.25, 0.125], [0.375, 0.1875]]
    constant = Schedule(own, SchedulerSpec("constantlr", {"factor": 0.5, "total_iters": 2}), 4, task)
    assert len(rates(constant, own, 1)[0]) == 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CosineAnnealingLR", {"T_max": "total"}),
        ("onecyclelr", {"max_lr": 0.5, "total_steps": "total"}),
        ("StepLR", {"step_size": 3, "gamma": 0.5}),
    ],
)
def test_a_schedule_has_the_rates_of_torchs_own_loop(name: str, arguments: dict[str, Any]) -> None:
    total, model = 8, User().model()
    known = {key.lower(): found for key, found in vars(torch.optim.lr_scheduler).items()}
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = {key: total if value == "total" else value for key, value in arguments.items()}
    scheduler, expected = known[name.lower()](plain, **own), []
    for _ in range(total):
        expected.append([plain.param_groups[0]["lr"]])
        plain.step()
        scheduler.step()
    optimizer = make_optimizer(model, OptimizerSpec("sgd", 0.1, {"momentum": 0.9}))
    schedule = Schedule(optimizer, SchedulerSpec(name, arguments), total)
    assert rates(schedule, optimizer, *range(1, total + 1)) == expected
    assert len({rate for (rate,) in expected}) > 2
    fresh = make_optimizer(model, OptimizerSpec("sgd", 0.1, {"momentum": 0.9}))  # as one that resumes
    again = Schedule(fresh, SchedulerSpec(name, arguments), total)
    assert rates(again, fresh, 6, 2) == [expected[5], expected[1]]


def test_a_schedule_of_steps_is_the_papers_for_steps_of_one_size() -> None:
    epochs, steps = 3, 8
    spec = SchedulerSpec("PolynomialLR", {"total_iters": "total", "power": 0.5}, "step")
    optimizer = make_optimizer(User().model(), OptimizerSpec("sgd", 0.08))
    schedule, found = Schedule(optimizer, spec, epochs), []
    for step in range(epochs * steps):
        schedule.set(optimizer, 1 + step // steps, step % steps / steps)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([0.08 * (1 - i / (epochs * steps)) ** 0.5 for i in range(epochs * steps)])


@pytest.mark.parametrize(
    ("optimizer", "key"),
    [
        (OptimizerSpec("sgd", 0.1, {"momentum": 0.9}), "momentum"),
        (OptimizerSpec("adam", 0.1), "betas"),
    ],
)
def test_a_schedule_that_cycles_momentum_does_so(optimizer: OptimizerSpec, key: str) -> None:
    total, model = 8, User().model()
    plain = make_optimizer(model, optimizer)
    scheduler, expected = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.5, total_steps=total), []
    for _ in range(total):
        expected.append(plain.param_groups[0][key])
        plain.step()
        scheduler.step()
    own = make_optimizer(model, optimizer)
    schedule, found = Schedule(own, SchedulerSpec("onecyclelr", {"max_lr": 0.5, "total_steps": total}), 8), []
    for epoch in range(1, total + 1):
        schedule.set(own, epoch)
        found.append(own.param_groups[0][key])
    assert found == expected and len(set(expected)) > 2


class Choosy(torch.optim.SGD):
    """An optimizer that cannot be made of parameter groups alone."""

    def __init__(self, parameters: list[nn.Parameter], rate: float) -> None:
        super().__init__(parameters, lr=rate)


def test_any_optimizer_has_a_schedule() -> None:
    matrix = nn.Linear(3, 2, bias=False)
    muon = make_optimizer(matrix, OptimizerSpec("muon", 0.5))
    for optimizer in (muon, Choosy([*matrix.parameters()], 0.5)):
        assert rates(Schedule(optimizer, SchedulerSpec(), 3), optimizer, 2) == [[0.5]]
        halved = Schedule(optimizer, SchedulerSpec("StepLR", {"step_size": 1, "gamma": 0.5}), 3)
        assert rates(halved, optimizer, 2) == [[0.25]]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (SchedulerSpec("cosine"), "train: scheduler: 'cosine' is not one of "),
        (SchedulerSpec("LambdaLR"), "train: scheduler: 'LambdaLR' is not one of "),
        (SchedulerSpec("StepLR"), "train: scheduler: StepLR: missing a required argument: 'step_size'"),
        (SchedulerSpec("StepLR", {"size": 1}), "train: scheduler: StepLR: "),
        (SchedulerSpec("StepLR", {"step_size": "three"}), "train: scheduler: StepLR: "),
        (
            SchedulerSpec("OneCycleLR", {"max_lr": 1, "total_steps": 9}, "step"),
            "train: scheduler: OneCycleLR has rates for whole epochs alone",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_one_line(spec: SchedulerSpec, told: str) -> None:
    optimizer = make_optimizer(User().model(), OptimizerSpec())
    with pytest.raises(LocalError) as caught:
        Schedule(optimizer, spec, 4)
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)


def test_a_server_follows_the_schedule_and_clips_as_one_process_would() -> None:
    parameters, plain = FlatParameters(User().model()), User().model()
    spec, mean = OptimizerSpec("sgd", 0.1, {"momentum": 0.9}), np.random.default_rng(1)
    optimizer = make_optimizer(parameters.model, spec)
    schedule = Schedule(optimizer, SchedulerSpec("StepLR", {"step_size": 1, "gamma": 0.5}), 3)
    server = ServerOptimizer(parameters, optimizer, schedule=schedule, clip_norm=0.5)
    own = make_optimizer(plain, spec)
    for epoch in (1, 2, 3):
        parameters.sums[:] = mean.normal(size=len(parameters.sums))
        start = 0
        for parameter in plain.parameters():
            stop = start + parameter.numel()
            parameter.grad = torch.from_numpy(parameters.sums[start:stop].copy()).view(parameter.shape)
            start = stop
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        own.param_groups[0]["lr"] = 0.1 * 0.5 ** (epoch - 1)
        own.step()
        server.apply(1.0, epoch)
        expected = torch.cat([p.detach().flatten() for p in plain.parameters()]).numpy()
        assert np.allclose(parameters.state, expected, atol=1e-7)


def trained(user: User | None = None, rounds: int = 1, part: Any = None, **work: Any) -> np.ndarray:
    """Return the values of the last update of local training, or of gradients."""
    spec = WorkSpec("tests", ModelSpec("none:none"), optimizer=OptimizerSpec("sgd", 0.1), total=4)
    spec = replace(spec, **work)
    task, rng = Task(user or User()), np.random.default_rng(2)
    images = rng.normal(size=(SAMPLES, 2, 3)).astype(np.float32)
    part = part or of_arrays(images, rng.integers(0, 3, SAMPLES))
    folders = SampleFolders(task, 0, [Folder("private", "csd0")], [part])
    one = LocalTrainer(FlatParameters(task.model()), task, folders, spec)
    state = one.parameters.state.copy()
    for epoch in range(1, rounds + 1):
        update = one.run(Work(epoch, 5, 1 if rounds == 1 else epoch, (((0, SAMPLES),),)), state)
        assert update.metrics["loss"][1] == SAMPLES
    assert one.parameters.sums.any()
    return one.parameters.sums.copy()


@pytest.mark.parametrize("parts", [2, 3, 100])
@pytest.mark.parametrize("work", [{}, {"passes": 2, "batch": 8}, {"passes": 1, "steps": 3, "clip_norm": 0.1}])
def test_a_batch_in_parts_is_one_batch(work: dict[str, Any], parts: int) -> None:
    assert np.allclose(trained(accumulate=parts, **work), trained(**work), atol=1e-5)


def test_gradients_are_scaled_down_to_the_norm() -> None:
    once = {"passes": 1, "batch": SAMPLES}
    free, clipped = trained(**once), trained(**once, clip_norm=0.01)
    assert np.linalg.norm(clipped) == pytest.approx(0.1 * 0.01 * SAMPLES, rel=1e-3)
    assert np.allclose(clipped / np.linalg.norm(clipped), free / np.linalg.norm(free), atol=1e-3)
    assert np.array_equal(trained(**once, clip_norm=1e6), free)


def test_gradients_that_an_optimizer_leaves_out_do_not_pile_up() -> None:
    """The norm would grow from step to step, and the steps would be scaled down more and more."""

    class Head(User):
        def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters[-2:], lr=0.1)

    norms: list[float] = []

    class Noting(Head):
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
            first = next(model.parameters()).grad
            norms.append(0.0 if first is None else float(first.norm()))
            return cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    trained(Noting(), passes=2, batch=5, optimizer=OptimizerSpec())
    assert len(norms) > 4 and not any(norms)


@pytest.mark.parametrize("passes", [0, 1])
def test_autocast_computes_in_bfloat16_with_parameters_of_float32(passes: int) -> None:
    whole = trained(passes=passes, batch=8)
    SEEN.clear()
    short = trained(passes=passes, batch=8, precision="bfloat16")
    assert set(SEEN) == {torch.bfloat16}
    assert not np.array_equal(short, whole) and np.allclose(short, whole, atol=0.05 * np.abs(whole).max())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("work", [{}, {"accumulate": 4}, {"passes": 2, "batch": 4}])
def test_batches_that_are_read_ahead_have_the_same_bits(work: dict[str, Any], threads: int) -> None:
    assert trained(**work, prefetch=threads).tobytes() == trained(**work).tobytes()


class Seeking:
    """A data set of one place that all reads share, as that of a file."""

    def __init__(self) -> None:
        self._place, self.mixed, self.threads = -1, 0, set[str]()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._place = index
        self.threads.add(threading.current_thread().name)
        time.sleep(0.0005)
        self.mixed += self._place != index
        return torch.full((2, 3), float(self._place)), self._place % 3


@pytest.mark.parametrize("work", [{}, {"accumulate": 4}, {"passes": 2, "batch": 4}])
def test_one_thread_at_a_time_reads_a_data_set_that_does_not_say_otherwise(work: dict[str, Any]) -> None:
    part = Seeking()
    trained(part=part, prefetch=8, **work)
    assert part.mixed == 0 and len(part.threads) == 1 and "MainThread" not in part.threads


class Together(Seeking):
    """A data set whose first read takes until another thread reads, too."""

    thread_safe = True

    def __init__(self) -> None:
        super().__init__()
        self._others = threading.Event()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.threads.add(threading.current_thread().name)
        if len(self.threads) > 1:
            self._others.set()
        assert self._others.wait(30)
        return torch.full((2, 3), float(index)), index % 3


def test_several_threads_read_a_data_set_that_says_so() -> None:
    part = Together()
    trained(part=part, prefetch=8, passes=1, batch=4)
    assert len(part.threads) > 1


@pytest.mark.parametrize("kind", [LabelledImages, ParquetRows, TarSamples])
def test_the_data_sets_of_millpond_are_read_by_several_threads(kind: Any) -> None:
    part = kind.__new__(kind)
    assert Task(User()).is_thread_safe([part, part])
    assert not Task(User()).is_thread_safe([part, Seeking()])


def test_a_collate_hook_says_so_too() -> None:
    class Collates(User):
        def collate(self, samples: Any) -> Any:
            return samples

    class Safely(Collates):
        def collate(self, samples: Any) -> Any:
            return samples

        collate.thread_safe = True  # type: ignore[attr-defined]

    part = of_arrays(np.zeros((2, 2, 3), np.float32), np.zeros(2, np.int64))
    assert [Task(user()).is_thread_safe([part]) for user in (User, Collates, Safely)] == [True, False, True]


def test_local_training_follows_the_schedule_of_the_task() -> None:
    class Halving(User):
        def scheduler(self, optimizer: torch.optim.Optimizer, total: int) -> Any:
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    local = {"passes": 1, "batch": SAMPLES}
    first, third = trained(Halving(), **local), trained(Halving(), rounds=3, **local)
    assert np.allclose(third, first / 4, atol=1e-5)
    assert np.allclose(trained(rounds=3, **local), first, atol=1e-5)


def test_what_is_read_ahead_comes_in_order() -> None:
    ready = threading.Event()

    def read(key: int) -> int:
        if key == 0:
            assert ready.wait(10)  # until a later one has been read
        else:
            ready.set()
        return 2 * key

    assert list(prefetched(range(7), read, 2, 2)) == [(key, 2 * key) for key in range(7)]
    assert list(prefetched([], read, 2, 2)) == []


def test_no_more_is_read_ahead_than_was_asked_for() -> None:
    read: list[int] = []
    found = prefetched(range(100), lambda key: read.append(key), 3, 2)
    for number in range(1, 5):
        next(found)
        assert len(read) <= number + 3
    found.close()  # type: ignore[attr-defined]
    assert len(read) <= 8


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_an_error_of_reading_is_raised_where_the_batch_is_wanted(threads: int) -> None:
    def read(key: int) -> int:
        if key == 3:
            raise LocalError("a picture that cannot be read")
        return key

    got = []
    with pytest.raises(LocalError, match="cannot be read"):
        for key, _ in prefetched(range(9), read, threads, threads):
            got.append(key)
    assert got == [0, 1, 2]
    assert not [each for each in threading.enumerate() if each.name.startswith("prefetch")]


def test_firecaffes_rates() -> None:
    assert LearningRate("linear", 256).at(0, 1024, 0.01) == pytest.approx(0.04)
    assert LearningRate("linear", 32).at(0, 1024, 0.01) == pytest.approx(0.32)
    assert LearningRate("sqrt", 32).at(0, 1024, 0.01) == pytest.approx(0.0566, abs=1e-4)
    assert LearningRate("none", 32).at(0, 1024, 0.01) == 0.01


@given(some.sampled_from(["linear", "sqrt", "none"]), some.integers(0, 50), some.floats(1e-6, 10))
def test_the_base_batch_has_the_rate_as_given(scaling: str, step: int, base: float) -> None:
    assert LearningRate(scaling, 64, warmup=20).at(step, 64, base) == base  # type: ignore[arg-type]
    assert LearningRate(scaling, warmup=20).at(step, 999, base) == base  # type: ignore[arg-type]


def test_warm_up_rises_evenly_from_the_rate_as_given() -> None:
    rate = LearningRate("linear", 32, warmup=10)
    rates = [rate.at(step, 128, 0.1) for step in range(13)]
    assert rates[0] == 0.1 and rates[5] == pytest.approx(0.25)
    assert rates[10:] == [0.4, 0.4, 0.4]
    rises = [after - before for before, after in pairwise(rates[:11])]
    assert rises == pytest.approx([0.03] * 10)


def test_a_small_batch_never_has_more_than_its_own_rate() -> None:
    rate = LearningRate("linear", 32, warmup=10)
    assert [rate.at(step, 8, 0.1) for step in (0, 5, 10)] == [0.025] * 3


@given(some.integers(1, 1 << 16), some.integers(1, 1 << 16), some.integers(0, 30))
def test_more_samples_never_have_a_lower_rate(few: int, more: int, step: int) -> None:
    few, more = sorted((few, more))
    for scaling in ("linear", "sqrt"):
        rate = LearningRate(scaling, 100, warmup=20)  # type: ignore[arg-type]
        assert rate.at(step, few, 0.1) <= rate.at(step, more, 0.1)
