# SPDX-License-Identifier: Apache-2.0
"""Entry: a worker's training role in a process of its own, ``python -m bench.task.reader FOLDER PREFETCH
SAMPLES``. It tells on standard output that it is prepared, waits for a line, trains a linear model on so many
of the folder's samples (0: all), and tells how many there were and the seconds that it took.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from torch import nn

from bench.task.images import SIDE
from millpond.linux import memory
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.protocol import Folder, PrepareWorker, Update, Work
from millpond.train.state import flat, layout
from millpond.train.worker import user_code
from millpond.train.worker.roles import Descriptors, TrainingRole
from millpond.train.zoo.models import DigitsCNN

BATCH = 256


def cnn() -> nn.Module:
    """The demo's."""
    return DigitsCNN(side=SIDE)


def linear() -> nn.Module:
    """A model that takes next to no time, so that a whole epoch can be read."""
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 10))


def role(folder: Path, model: str, prefetch: int) -> TrainingRole:
    """Prepare a worker for a folder."""
    work = WorkSpec(
        "bench",
        ModelSpec(f"bench.task.reader:{model}"),
        optimizer=OptimizerSpec("SGD", 0.01),
        threads=1,
        passes=1,
        batch=BATCH,
        prefetch=prefetch,
    )
    tensors = flat.describe(user_code.build(work, Path())[1])
    size = 4 * layout.size(tensors)
    shared = Descriptors(memory.make("states"), memory.make("values"))
    states = memory.map_first(shared.states, size)
    memory.map_first(shared.values, size)
    np.frombuffer(states.data, np.float32)[:] = 0.001
    request = PrepareWorker(work, "csd0", (Folder(str(folder), "csd0"),), {}, tensors)
    return TrainingRole(request, Path(), Path(), shared)


def train(role: TrainingRole, start: int, stop: int) -> Update:
    """Make one exchange with the samples at these positions of the first epoch."""
    answer = role.answer(Work(1, 1, 1, (((start, stop),),)))
    assert answer
    assert isinstance(answer[0], Update)
    return answer[0]


def main() -> None:
    """Train once."""
    prepared = role(Path(sys.argv[1]), "linear", int(sys.argv[2]))
    most = prepared.ready().samples
    print(most, flush=True)
    sys.stdin.readline()
    update = train(prepared, 0, int(sys.argv[3]) or most)
    print(update.samples, update.seconds, flush=True)


if __name__ == "__main__":
    main()
