# SPDX-License-Identifier: Apache-2.0
"""Entry: the host's side of federated rounds, in a process whose memory can be measured:
``python -m bench.train.simulated_host WORKERS ROUNDS FOLDER FD...``.

It has the daemon's own engine, reduction, workers, checkpoints and parameter server; its devices are at the
other ends of the sockets. It tells on standard output what comes next, and waits for a line on standard
input: ``building`` (until then a job with a model of a few values is idle after its rounds), ``rounds``,
``saving``, ``end``.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from bench.train.simulated_devices import SAMPLES
from millpond.base.deadline import Deadline
from millpond.host.fleet.device import LIMITS, Device
from millpond.host.jobs.training.checkpoints import CheckpointWriter, SavedCheckpoint, TrainingProgress
from millpond.host.jobs.training.collection import LatePolicy
from millpond.host.jobs.training.exchange_engine import ExchangeEngine
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.jobs.training.round_planner import RoundPlanner
from millpond.host.jobs.training.shards import Shard, Shards
from millpond.host.workers.dispatcher import Dispatcher
from millpond.host.workers.parameter_server import ParameterServer
from millpond.host.workers.worker import DeviceWorker
from millpond.linux import memory
from millpond.linux.zygote.client import Zygote
from millpond.train.job.spec import DataSpec, Job, ModelSpec
from millpond.train.protocol import Folder, PrepareServer, PrepareWorker
from millpond.train.worker.start import WorkerFiles, workers_zygote
from millpond.wire.channel import Channel

MODEL = ModelSpec("millpond.train.zoo.models:cifar_cnn", arguments={"side": 40})
VALUES = 3_602_506
TINY_CODE = "from torch import nn\n\n\ndef build():\n    return nn.Linear(2, 1)\n"
TINY = ModelSpec("tiny:build", ("tiny.py",))
_PREPARE_SECONDS = 120.0


class SimulatedDevice:
    """A device whose two connections are sockets that were there before."""

    def __init__(self, name: str, control: int, bulk: int) -> None:
        self.name = name
        self._control, self._bulk = (socket.socket(fileno=number) for number in (control, bulk))

    def control(self, _deadline: Deadline) -> Channel:
        """See Device."""
        return Channel(self._control, self.name, limits=LIMITS)

    def bulk(self, _token: bytes, _encrypted: bool, _deadline: Deadline) -> Channel:
        """See Device."""
        return Channel(self._bulk, self.name, limits=LIMITS)


class Rounds:
    """A job's rounds with one simulated device for each pair of ``descriptors``."""

    def __init__(self, job: Job, folder: Path, zygote: Zygote, descriptors: Sequence[int]) -> None:
        count = len(descriptors) // 2
        self._folder, self._job = folder, job
        self._undo = ExitStack()
        states = memory.make("states")
        request = PrepareServer(job.work, job.strategy, count + 1)
        self._server = ParameterServer(
            request, WorkerFiles(folder), [folder], folder / "server.log", zygote, states
        )
        self._undo.callback(self._server.close)
        self._server.prepare(Deadline.after(_PREPARE_SECONDS))
        self._shards = Shards(count)
        names = [f"csd{rank}" for rank in range(count)]
        self._planner = RoundPlanner(names, 60.0)
        self._roster = JobRoster(count, (), 0.0)
        self._engine = ExchangeEngine(
            self._roster, self._server.mean, self._shards, lambda: None, late=LatePolicy(counts=False)
        )
        self._shards.begin(1)
        for rank, name in enumerate(names):
            self._join(rank, SimulatedDevice(name, *descriptors[2 * rank : 2 * rank + 2]))
        self._done = 0

    def _join(self, rank: int, device: SimulatedDevice) -> None:
        folder = Folder("private/digits", device.name)
        request = PrepareWorker(self._job.work, device.name, (folder,), {}, self._server.tensors)
        worker = DeviceWorker(
            cast(Device, device), lambda _deadline: request, lambda file: self._folder / file.sha256
        )
        worker.prepare(Deadline.after(_PREPARE_SECONDS))
        dispatcher = Dispatcher(rank, worker, self._roster.events)
        self._undo.callback(worker.close)
        self._undo.callback(dispatcher.end)
        self._roster.join(rank, dispatcher)
        self._shards.add(rank, [Shard(device.name, False, SAMPLES)])
        self._planner.join(rank, SAMPLES)

    def run(self, rounds: int) -> None:
        """Run so many rounds. Raises RuntimeError if an update is missing."""
        for _ in range(rounds):
            self._done += 1
            state, planner = self._server.state, self._planner
            outcome = self._engine.run(self._done, 1, state, planner, planner.background)
            if len(outcome.counted) != len(self._roster.present) or outcome.lost:
                raise RuntimeError(f"{len(outcome.counted)} updates in round {self._done}; {outcome.lost}")
            self._server.apply(1.0, self._done, self._roster.states_in_use)
            self._shards.begin(self._done + 1)

    def save(self) -> None:
        """Write a checkpoint, as after each round of a job."""
        writer = CheckpointWriter(self._folder, "bench", self._server.tensors, logging.getLogger(__name__))
        tensors, momentum = self._server.momentum()
        progress = TrainingProgress(self._done, self._shards.epoch_position, {}, 0.0, 0.0, 0.0)
        writer.save_now(SavedCheckpoint(self._server.state.values, tensors, momentum, progress))

    def close(self) -> None:
        """End all processes."""
        self._undo.close()


def main() -> None:
    """Run the phases."""
    count, rounds, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    descriptors = [int(text) for text in sys.argv[4:]]
    data, zygote = DataSpec("private/digits", str(folder)), workers_zygote(600.0)
    folder.chmod(0o755)  # its workers are of another user
    (folder / "tiny.py").write_text(TINY_CODE)
    tiny = Rounds(Job("tiny", data, TINY), folder, zygote, descriptors[: 2 * count])
    tiny.run(3)
    tiny.save()
    _tell("building")
    tiny.close()
    large = Rounds(Job("large", data, MODEL), folder, zygote, descriptors[2 * count :])
    _tell("rounds")
    large.run(rounds)
    _tell("saving")
    large.save()
    _tell("end")
    large.close()
    zygote.close()


def _tell(phase: str) -> None:
    print(phase, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
