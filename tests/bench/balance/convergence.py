# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): compares the accuracy of balanced training with interruptions to that of one process."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import mean

import numpy as np

from bench.balance import processes
from bench.experiment import Experiment, Run
from bench.rows import Row, summary
from millpond.aggregate.kernels import Vector
from millpond.base.deadline import Deadline
from millpond.host.emulation.demo import data
from millpond.host.workers.worker import ModelState, Worker
from millpond.train.job.spec import SynchronousSpec, TrainingSpec
from millpond.train.protocol import Ready, Update, Work

WORKERS, EPOCHS, BATCH = 3, 10, 36
_SLOWER = (1.0, 4.0, 1.0, 1.0, 2.0, 1.0)
"""How many times as long the workers take, one after the other, for PERIOD seconds each."""
PERIOD, FIXED, EACH = 1.0, 0.02, 0.0035
TRAINING = TrainingSpec("sgd", 0.05, 0.9, batch=BATCH)


class Interrupted:
    """A real worker that takes at least FIXED seconds and EACH for a sample, and longer while interrupted."""

    def __init__(self, rank: int, worker: Worker) -> None:
        self.name, self.rank, self.worker = worker.name, rank, worker
        self.began = time.monotonic()

    @property
    def holds(self) -> bool:
        """See Worker."""
        return self.worker.holds

    @holds.setter
    def holds(self, holds: bool) -> None:
        self.worker.holds = holds

    @property
    def percent(self) -> int:
        """See Worker."""
        return self.worker.percent

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        """See Worker."""
        began = time.monotonic()
        update = self.worker.train(request, state, deadline)
        took = time.monotonic() - began
        slower = _SLOWER[(int((began - self.began) / PERIOD) + 2 * self.rank) % len(_SLOWER)]
        least = FIXED + EACH * update.samples
        time.sleep(max(0.0, max(took, least) * slower - took))
        return update

    def prepare(self, deadline: Deadline) -> Ready:
        """See Worker."""
        return self.worker.prepare(deadline)

    def fetch(self, stop: int, deadline: Deadline) -> None:
        """See Worker."""
        self.worker.fetch(stop, deadline)

    def read(self, out: Vector, deadline: Deadline) -> None:
        """See Worker."""
        self.worker.read(out, deadline)

    def close(self) -> None:
        """See Worker."""
        self.worker.close()


def measure(run: Run) -> list[Row]:
    """Rows ``convergence_loss_points``, and how often workers were late and re-tuned."""
    seeds_ = range(1, 2 if run.quick else 6)
    epochs = 2 if run.quick else EPOCHS
    alone, together, retuned, carried = [], [], [], []
    for seed in seeds_:
        with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
            work = _work(Path(folder), seed)
            alone.append(100 * _alone(work, epochs))
            score, plans, late = _together(work, Path(folder), epochs)
            together.append(100 * score)
            retuned.append(plans)
            carried.append(late)
        run.say(f"convergence: seed {seed}: {together[-1]:.2f} % together, {alone[-1]:.2f} % alone")
    note = (
        f"{WORKERS} real processes of one machine that take {FIXED} s and {EACH} s per sample at least; "
        f"pauses make each 2 or 4 times as slow for {PERIOD} s at a time; private samples in uneven "
        "(Dirichlet) shares, public ones read by all"
    )
    what = (
        f"digits and the CNN, {epochs} epochs, accuracy of one process ({mean(alone):.2f} %) minus that of "
        f"{WORKERS} balanced and interrupted ones ({mean(together):.2f} %), mean over {len(alone)} seeds"
    )
    difference = mean(alone) - mean(together)
    row = summary("convergence_loss_points", what, [difference], "points", peer="one process", emulation=note)
    more = summary("convergence_retuned", "new plans in a run", retuned, "", emulation=note)
    late_row = summary("convergence_carried", "percent of samples a step late", carried, "%", emulation=note)
    return [row, more, late_row]


EXPERIMENT = Experiment("convergence", "Accuracy: balanced with interruptions against one process", measure)


def _work(folder: Path, seed: int) -> processes.Work:
    division = data.divide(data.load(), WORKERS, seed)
    for rank, private in enumerate(division.private):
        data.write(folder / f"private{rank}", private)
    public = data.DigitSamples(
        np.concatenate([part.images for part in division.public]),
        np.concatenate([part.labels for part in division.public]),
    )
    data.write(folder / "public", public)
    data.write(folder / "test", division.test)
    folders = tuple(folder / f"private{rank}" for rank in range(WORKERS))
    how = SynchronousSpec(global_batch=BATCH)
    factory = "millpond.train.zoo.models:digits_cnn"
    return processes.Work(factory, {}, folders, folder / "public", folder / "test", TRAINING, how, seed)


def _alone(work: processes.Work, epochs: int) -> float:
    """One process with all samples, the same optimizer and batches of the same size."""
    import torch  # slow to import, also for those who want another experiment
    from torch.nn.functional import cross_entropy

    from millpond.train.determinism import generators
    from millpond.train.local import evaluation, optimizers, selection
    from millpond.train.worker import user_code
    from millpond.train.zoo import models

    folders = [str(path) for path in (*work.private, work.public)]
    task, test = user_code.build(work.job.work, Path())[0], str(work.test)
    parts = [task.dataset(Path(), folder, "train") for folder in folders]
    images, labels = task.fetch([(part, np.arange(len(part))) for part in parts])
    generators.plant(work.seed)
    model = models.digits_cnn()
    optimizer = optimizers.make_optimizer(model, work.job.work.optimizer)
    shuffle = torch.Generator().manual_seed(work.seed)
    for _ in range(epochs):
        model.train()
        for batch in selection.batches(np.ones(len(labels), np.int64), BATCH, 1, shuffle):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    part = task.dataset(Path(), test, "test")
    held_out = selection.Selection(task, [part], [np.arange(len(part))], np.arange(len(part)))
    return task.summary(evaluation.evaluate(model, task, held_out, work.job.work))["accuracy"]


def _together(work: processes.Work, logs: Path, epochs: int) -> tuple[float, int, float]:
    """Accuracy, new plans, and the percentage of samples that came a step late."""
    plans = late = counted = 0
    with processes.processes(work, logs, Interrupted) as team:
        team.measure()
        for epoch in range(1, epochs + 1):
            samples = 0
            for _, outcome in team.epoch(epoch):
                plans += outcome.new_plan
                late += outcome.late
                samples += outcome.samples
            assert samples == team.shards.samples, f"{samples} of {team.shards.samples} samples"
            counted += samples
        return team.score().host["accuracy"], plans, 100 * late / counted
