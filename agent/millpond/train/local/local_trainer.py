# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, psutil): a worker's part of an exchange: gradients, or the difference of local training."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from millpond.train import error_texts
from millpond.train.data.errors import DataError
from millpond.train.determinism import generators
from millpond.train.job.spec import WorkSpec
from millpond.train.local.evaluation import evaluate
from millpond.train.local.mini_epochs import MiniEpochReader, Scored
from millpond.train.local.optimizers import Schedule, make_optimizer, set_mode
from millpond.train.local.pace import ExchangePace
from millpond.train.local.personal import PersonalPart, loop_of
from millpond.train.local.selection import SampleFolders, Selection
from millpond.train.protocol import DataTiming, StreamTiming, Update, Work
from millpond.train.repeats import weights_of
from millpond.train.state.flat import Vector
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.strategies.fednova import accumulated
from millpond.train.task.made_up import Synthetic
from millpond.train.task.sums import LOSS, Sums
from millpond.train.task.task import Task

_CHECKED = 16
"""Exchanges between two checks that the model has not changed its parameters itself."""
_Measured = tuple[float, float, float, float]
"""An update's weight, the largest value of its parameters and their norm, the largest change of buffers."""
_NOTHING: _Measured = (0.0, 0.0, 0.0, 0.0)


class LocalTrainer:
    """Trains the model of ``parameters`` on a worker's samples as ``work`` says, one exchange at a time. What
    it trains for itself alone in a ``run`` lies in ``folder``, or in memory without one. Mini-epochs take
    ``fast`` bytes of memory at most. ``tell`` is called with the percentage of an exchange that is done.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        task: Task,
        samples: SampleFolders,
        work: WorkSpec,
        run: str = "",
        folder: Path | None = None,
        fast: int = 1 << 30,
        tell: Callable[[int], None] | None = None,
    ) -> None:
        self._fast = fast
        self.parameters, self._task, self._samples, self._work = parameters, task, samples, work
        self._loop = loop_of(task, parameters.model, work)
        if tell:
            self._loop.pace = ExchangePace(tell)
        personal = parameters.local or self._loop.tensors
        self._personal = PersonalPart(parameters, self._loop, run, folder) if personal else None
        self._schedule: Schedule | None = None
        self._exchanges = self._whole = 0
        self._measured = False
        self._local_steps = 1.0  # of the last exchange
        self._stream: StreamTiming | None = None
        self._unused: tuple[int, ...] = ()
        self._process = psutil.Process()
        _forget_peak()

    def run(self, request: Work, state: Vector) -> Update:
        """Train from ``state``; the values of the update are then in ``parameters.sums``. Raises DataError
        for samples that are not there, and any exception of the task.

        Whole numbers of made-up samples are 0, which may be a class or a word, but no length of a sequence:
        if the task fails with that, they are 1.
        """
        try:
            found = self._run(request, state)
        except Exception:
            if not request.synthetic or self._measured or self._whole:
                raise
            self._whole = 1
            found = self._run(request, state)
        self._measured = self._measured or request.synthetic > 0
        return found

    def _run(self, request: Work, state: Vector) -> Update:
        started, used = time.perf_counter(), self._used()
        self._loop.meter.begin()
        self._stream, self._unused = None, ()
        generators.plant(request.draws or request.seed)
        self.parameters.load(state)
        if self._personal:
            self._personal.load(request.exchange - (not request.held_out))
        count, sums, measured = self._evaluate() if request.held_out else self._answer(request, state)
        weight, largest, norm, shift = measured
        seconds = time.perf_counter() - started
        busy = math.nan if seconds <= 0 else 1 - (self._used() - used) / seconds / torch.get_num_threads()
        busy = min(max(busy, 0.0), 1.0)
        data = DataTiming() if request.held_out else self._loop.meter.timing(seconds, self._stream)
        if not (request.held_out or request.synthetic):
            self._samples.observe(count, seconds * (1 - data.waited / 100))
        return Update(
            request.exchange,
            count,
            weight,
            largest,
            norm,
            seconds,
            busy,
            _peak(),
            sums,
            local_steps=self._local_steps,
            data=data,
            shift=shift,
            unused=() if request.synthetic else self._unused,
        )

    def _evaluate(self) -> tuple[int, Sums, _Measured]:
        if not any(self._samples.held):
            return 0, {}, _NOTHING
        samples = self._samples.held_out()
        with self._loop.scored(self._samples.everything) as model:
            return len(samples), evaluate(model, self._task, samples, self._work), _NOTHING

    def _answer(self, request: Work, state: Vector) -> tuple[int, Sums, _Measured]:
        """Return the number of samples, the loss, and what was measured of the update."""
        made_up = request.synthetic
        chosen = self._samples.synthetic(made_up, self._whole) if made_up else self._samples.take(request)
        self._stream = chosen.stream
        passes = 0 if made_up else 1 if self._work.repeat.name else max(1, self._work.passes)
        self._loop.pace.begin(passes * len(chosen))
        self.parameters.model.train()
        privacy = self._work.privacy
        if privacy and privacy.unit == "group" and isinstance(chosen, Selection):
            loss, count, found = self._train_groups(chosen, request, state)
            weight = float(len(chosen))
        elif self._work.passes:
            loss, count = self._train(chosen, request)
            weight = float(len(chosen))
            found = self.parameters.gather_differences(state, len(chosen), self._local_steps)
            if self._personal and not made_up:
                self._personal.keep(request.exchange)
        else:
            loss, count = self._differentiate(chosen, state)
            weight = count
            found = self.parameters.gather_gradients(weight)
            self._unused = self.parameters.unused
        if made_up:  # its values are of no use, and may not be finite
            return made_up, {LOSS: (0.0, 1.0)}, (1.0, 0.0, 0.0, 0.0)
        return len(chosen), {LOSS: (loss, count)}, (weight, *found)

    def _differentiate(self, chosen: Selection | Synthetic, state: Vector) -> tuple[float, float]:
        """Compute the sums of gradients over the samples. Returns the summed loss and its count."""
        self.parameters.clear()
        loss, count = self._loop.backward(chosen)
        if self._exchanges % _CHECKED == 0:  # a look at the whole model
            self.parameters.check_unchanged(state)
        self._exchanges += 1
        self.parameters.check_bound()
        return loss, count

    def _train_groups(
        self, chosen: Selection, request: Work, state: Vector
    ) -> tuple[float, float, tuple[float, float, float]]:
        """Train on each group alone, from the same state, and add up the differences, each scaled down to the
        norm ``clip`` and times the least samples of a group: so no group adds more than that to the sum. A
        difference that is not finite counts as none. Returns the summed loss, its count, and what was
        measured of the sum, which is in ``parameters.sums``.
        """
        sums, group = self.parameters.sums, self._samples.group
        total, loss, count = np.zeros(len(sums)), 0.0, 0.0
        most = self._work.clip * (1 - len(chosen.groups) * 2.0**-22)  # the sum is rounded to float32
        for samples in chosen.each_group():
            self.parameters.load(state)
            one, counted = self._train(samples, request)
            loss, count = loss + one, count + counted
            norm = self.parameters.gather_differences(state, 1)[1]
            if math.isfinite(norm):
                total += sums * np.float64(group * min(1.0, most / norm if norm else 1.0))
        sums[:] = total
        return loss, count, (float(np.abs(total).max()), float(np.linalg.norm(total)), 0.0)

    def _train(self, chosen: Selection | Synthetic, request: Work) -> tuple[float, float]:
        """Train locally. Returns the summed loss of one pass and its count, the means over all passes. The
        optimizer is new each time: momentum that a worker kept would pull it away from the average.
        """
        work, means = self._work, _Means()
        shuffle = torch.Generator().manual_seed(request.seed)
        optimizer = self._optimizer(self.parameters.model, request.epoch)
        self._loop.begin(lambda model: self._optimizer(model, request.epoch))
        before = self._loop.steps
        for part, repeat in self._repetitions(chosen, shuffle, optimizer, means):
            # A rule decides how often mini-epochs are repeated: only the first time is known.
            self._loop.pace.counts = repeat == 1 or not work.repeat.name
            means.add(repeat, *self._loop.run(optimizer, part, shuffle))
        self._loop.end(optimizer)
        if work.local.normalized:
            self._local_steps = local_steps(optimizer, self._loop.steps - before, work.local.proximal)
        self.parameters.check_bound()
        return means.total()

    def _repetitions(
        self,
        chosen: Selection | Synthetic,
        shuffle: torch.Generator,
        optimizer: torch.optim.Optimizer,
        means: _Means,
    ) -> Iterable[tuple[Selection | Synthetic, int]]:
        """Return what is trained on one after the other, all at once or in mini-epochs, each with the number
        of its repetition.
        """
        work, meter = self._work, self._loop.meter
        if not work.mini_epoch or isinstance(chosen, Synthetic):
            return ((chosen, repeat + 1) for repeat in range(work.passes))
        rule = work.repeat.rule(work.passes)
        _, of_training, of_held_out = weights_of(rule)

        def score(mini_epoch: Selection) -> Scored:
            set_mode(optimizer, training=False)
            found = means.last, self._error(mini_epoch, of_training), self._error(None, of_held_out)
            set_mode(optimizer, training=True)
            self.parameters.model.train()
            return found

        return MiniEpochReader(work.mini_epoch, self._fast, rule, meter).repetitions(chosen, shuffle, score)

    def _error(self, samples: Selection | None, weight: float) -> float | None:
        """Return 1 - accuracy over some samples, or those that are held out; None without a ``weight``, and
        where no sample is held out, as on a host, 0.
        """
        if not weight:
            return None
        if samples is None and not any(self._samples.held):
            return 0.0
        samples = samples or self._samples.held_out()
        sums = evaluate(self.parameters.model, self._task, samples, self._work)
        if "accuracy" not in sums:
            raise DataError(error_texts.NO_ACCURACY())
        right, count = sums["accuracy"]
        return 1 - right / count

    def _optimizer(self, model: torch.nn.Module, epoch: int) -> torch.optim.Optimizer:
        work = self._work
        made = make_optimizer(model, work.optimizer, self._task)
        self._schedule = self._schedule or Schedule(made, work.scheduler, work.total, self._task)
        self._schedule.set(made, epoch)
        set_mode(made, training=True)
        return made

    def _used(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


class _Means:
    """The summed loss of one pass and its count, means over the repetitions of each part of it; ``last`` is
    the mean loss of the last repetition.
    """

    def __init__(self) -> None:
        self._before, self._own, self._repeat = (0.0, 0.0), (0.0, 0.0), 1
        self.last = 0.0

    def add(self, repeat: int, loss: float, count: float) -> None:
        """Add a repetition; the first one begins a part."""
        if repeat == 1:
            self._before, self._own = self.total(), (0.0, 0.0)
        self._own, self._repeat = (self._own[0] + loss, self._own[1] + count), repeat
        self.last = loss / count if count else 0.0

    def total(self) -> tuple[float, float]:
        """Return the sums over all parts."""
        loss, count = self._own
        return self._before[0] + loss / self._repeat, self._before[1] + count / self._repeat


def local_steps(optimizer: torch.optim.Optimizer, steps: int, proximal: float) -> float:
    """Return by how much the difference of so many steps is divided where it is normalized, see
    ``strategies.fednova``. The steps of other optimizers than SGD are not linear in the gradients: they are
    counted. Of several parameter groups it is the first one's.
    """
    group = optimizer.param_groups[0]
    if not isinstance(optimizer, torch.optim.SGD) or not steps:
        return float(steps or 1)
    keys = ("momentum", "dampening", "nesterov")
    found: dict[str, Any] = {key: group[key] for key in keys}
    return accumulated(steps, float(group["lr"]), proximal=proximal, **found)


def _forget_peak() -> None:
    """Reset the high-water mark of memory: loading the samples may have taken more than steps do."""
    with contextlib.suppress(OSError):  # then the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Return the high-water mark of memory in bytes since ``_forget_peak``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
