# SPDX-License-Identifier: Apache-2.0
"""A device's worker whose samples are on another device: the bits of samples in place, no other channel."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millpond.agent.config import AgentConfig, LinkConfig, Privacy
from millpond.agent.gate import KINDS, Gate, LedgerCounters, Pattern
from millpond.agent.job_files import LaidOutFiles
from millpond.agent.job_worker import JobWorker
from millpond.agent.policy.budget_ledger import BudgetLedger
from millpond.agent.policy.draws import SecretDraws
from millpond.agent.policy.rules import StateAnswers
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, Refused
from millpond.data.streaming.server import DataServer, ServiceSettings
from millpond.linux.zygote.client import Zygote
from millpond.train.balance.data_plan import order
from millpond.train.balance.ranges import Ranges
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import DataServicePlace, Fetch, Folder, Part, PrepareWorker, Ready, Update, Work
from millpond.train.state.layout import Tensor
from millpond.train.worker.start import WorkerFiles
from millpond.wire.channel import Channel
from millpond.wire.messages import Kind

from ..audited import unlogged
from ..data_stream.served import SAMPLES, images
from ..job_files import written
from ..waiting import eventually

SECRET = "s" * 64
SIZE = 64 * SAMPLES + SAMPLES
TENSORS = (Tensor("1.weight", (SAMPLES, 64), "float32"), Tensor("1.bias", (SAMPLES,), "float32"))
MODEL = f"""
import errno, os, socket
from torch import nn

def build(hidden=()):
    for path in hidden:
        assert not os.path.exists(path)
    try:
        socket.create_connection(("127.0.0.1", 1), 1)
    except OSError as error:
        assert error.errno == errno.ENETUNREACH
    return nn.Sequential(nn.Flatten(), nn.Linear(64, {SAMPLES}))
"""
STREAMED = Folder("public/digits", "csd0", public=True, streamed=True)
HERE = Folder("public/digits", "csd0", public=True)
WORK = WorkSpec("streamed", ModelSpec("net:build", ("net.py",)))


@contextmanager
def served(root: Path, port: int = 0, gate: Gate | None = None) -> Iterator[DataServicePlace]:
    sock = socket.create_server(("127.7.0.1", port))  # from which nobody connects, and takes its port
    place = DataServicePlace(*sock.getsockname(), SECRET)
    with DataServer(sock, ServiceSettings(root, SECRET), lambda _connection: gate and gate.outlet()):
        yield place


class Device:
    """A device, whose agent starts workers."""

    def __init__(
        self, name: str, base: Path, zygote: Zygote, *patterns: Pattern, encrypt: str = "auto"
    ) -> None:
        self.name, self._base, self._zygote = name, base, zygote
        for part in ("public", "private"):
            (base / "volume" / part).mkdir(parents=True, exist_ok=True)
        (base / "state" / "jobs").mkdir(parents=True)
        self.gate = Gate(patterns, LedgerCounters.in_memory())
        link = LinkConfig("10.77.0.6/30", str(base / "s"), peers="127.0.0.0/8")
        privacy = Privacy(encrypt=encrypt)  # type: ignore[arg-type]
        volume, state = str(base / "volume"), str(base / "state")
        self.config = AgentConfig(name, link, flash=volume, volume=volume, state=state, privacy=privacy)

    @property
    def asked(self) -> int:
        """The bytes that were counted on the way to a data service."""
        return self.gate.tally[KINDS.index(Kind.VOLUME)]

    def worker(self, folder: Folder, place: DataServicePlace | None = None) -> JobWorker:
        hidden = ["/state", f"{self.config.volume}/private"] if place else []
        work = replace(WORK, model=replace(WORK.model, arguments={"hidden": hidden}))
        request = PrepareWorker(work, self.name, (folder,), {}, TENSORS, streams=place)
        files = LaidOutFiles(WorkerFiles(written({"net.py": MODEL}, self._base / "code")), ("net.py",))
        draws, ledger = SecretDraws(self._base / "draws.key"), BudgetLedger(self._base / "budget")
        return JobWorker(
            self.config, request, files, self._zygote, StateAnswers(0), ledger, draws, self.gate, unlogged()
        )


@contextmanager
def prepared(worker: JobWorker) -> Iterator[Channel]:
    """The host's end of the bulk connection of a worker that has found all samples."""
    with contextlib.ExitStack() as stack:
        stack.callback(worker.stop)
        near, far = socket.socketpair()
        with Channel(near, "csd"), Channel(far, "host") as control:
            assert worker.prepare(control) == Ready((SAMPLES,), (0,), 8)
        near, far = socket.socketpair()

        def run() -> None:
            with Channel(far, "the host") as host, contextlib.suppress(ConnectionLost):
                worker.relay(host)

        thread = threading.Thread(target=run)
        thread.start()
        with Channel(near, "csd") as host:
            yield host
        thread.join(20)
        assert not thread.is_alive()


def soon() -> Deadline:
    return Deadline.after(30)


def step(host: Channel, number: int, ranges: Ranges, *coming: Ranges) -> tuple[Update, bytes]:
    state = np.random.default_rng(number).normal(size=SIZE).astype(np.float32)
    host.send(Work(number, 5, 2, (ranges,), coming=tuple((each,) for each in coming)), soon(), state.data)
    update = host.expect(Update, soon())
    host.send(Fetch(SIZE), soon())
    host.expect(Part, soon(), payload=4 * SIZE)
    return update, bytes(host.receive_payload(4 * SIZE, soon()))


@pytest.fixture
def origin(tmp_path: Path, zygote: Zygote) -> Device:
    """The device that has the samples."""
    made = Device("csd0", tmp_path / "csd0", zygote)
    images(tmp_path / "csd0" / "volume" / "public" / "digits")
    return made


STEPS: list[tuple[Ranges, ...]] = [
    (((0, 20),), ((20, 40),)),
    (((20, 40),), ((40, 60),)),
    (((40, 50), (190, 200)), ((60, 70),)),  # the plan has changed
    (((60, 70), (0, 3)),),
]


def test_updates_of_streamed_samples_have_the_bits_of_samples_in_place(
    origin: Device, tmp_path: Path
) -> None:
    away = Device("csd1", tmp_path / "csd1", origin._zygote)
    with prepared(origin.worker(HERE)) as host:
        wanted = [step(host, number, *ranges) for number, ranges in enumerate(STEPS)]
    assert origin.asked == 0
    with (
        served(Path(origin.config.volume, "public")) as place,
        prepared(away.worker(STREAMED, place)) as host,
    ):
        found = [step(host, number, *ranges) for number, ranges in enumerate(STEPS)]
    assert [values for _, values in found] == [values for _, values in wanted]
    assert [update.metrics for update, _ in found] == [update.metrics for update, _ in wanted]
    assert all(np.frombuffer(values, np.float32).any() for _, values in found)
    assert all(update.data.stream and update.data.stream.step > 0 for update, _ in found[1:])
    assert 0 < away.asked < 1 << 14  # indices, of eight bytes each, and what is around them


def test_a_stream_goes_on_when_its_service_was_away(origin: Device, tmp_path: Path) -> None:
    away, root = Device("csd1", tmp_path / "csd1", origin._zygote), Path(origin.config.volume, "public")
    with contextlib.ExitStack() as stack:
        with served(root) as place:
            host = stack.enter_context(prepared(away.worker(STREAMED, place)))
            first = step(host, 1, ((0, 20),))[1]
        with served(root, place.port):
            assert step(host, 2, ((100, 130),))[1] != first
            assert step(host, 1, ((0, 20),))[1] == first


def test_the_samples_of_the_next_exchange_are_fetched_before_it(origin: Device, tmp_path: Path) -> None:
    away, root = Device("csd1", tmp_path / "csd1", origin._zygote), Path(origin.config.volume, "public")
    with contextlib.ExitStack() as stack:
        with served(root, gate=origin.gate) as place:
            host = stack.enter_context(prepared(away.worker(STREAMED, place)))
            step(host, 1, ((0, 20),), ((20, 100),))
            eventually(lambda: origin.asked > 100 * 64, "all of them were sent", 20, 0.01)
        ahead = step(host, 2, ((20, 100),))[1]  # the service is away
        with served(root, place.port):
            step(host, 3, ((0, 20),))
            assert step(host, 2, ((20, 100),))[1] == ahead


def test_samples_that_are_not_there_are_told_by_name(origin: Device, tmp_path: Path) -> None:
    away, root = Device("csd1", tmp_path / "csd1", origin._zygote), Path(origin.config.volume, "public")
    shutil.rmtree(root / "digits")
    with served(root) as place, pytest.raises(Refused) as caught, prepared(away.worker(STREAMED, place)):
        pass
    assert caught.value.code == "data"
    assert caught.value.text == "the data service of csd0 gives no samples of public/digits"


def test_a_canary_in_what_a_worker_asks_for_ends_its_stream(origin: Device, tmp_path: Path) -> None:
    """What the worker sends passes the gate of its own device."""
    indices = order(SAMPLES, WORK.seed, 2, "csd0", public=True)[:4].astype(np.int64).tobytes()
    away = Device("csd1", tmp_path / "csd1", origin._zygote, Pattern("indices", indices, True))
    with (
        served(Path(origin.config.volume, "public")) as place,
        prepared(away.worker(STREAMED, place)) as host,
    ):
        step(host, 1, ((20, 40),))
        assert away.gate.tally[len(KINDS)] == 0
        host.send(Work(2, 5, 2, (((0, 20),),)), soon(), bytes(4 * SIZE))
        eventually(lambda: away.gate.tally[len(KINDS)] > 0, "the canary was seen", 20, 0.05)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"encrypt": "always"}, "policy", 'privacy.encrypt is "always", and streams are not encrypted'),
        ({"address": "10.9.9.9"}, "data", "csd0 has an address on no network of the fleet"),
        ({"address": "csd0"}, "data", "csd0 has an address on no network of the fleet"),
        ({}, "data", "csd0 has an address on no network of the fleet"),  # where agents and SSH servers listen
    ],
)
def test_streams_that_cannot_be_are_refused(
    tmp_path: Path, zygote: Zygote, changes: dict[str, str], code: str, words: str
) -> None:
    device = Device("csd1", tmp_path, zygote, encrypt=changes.get("encrypt", "auto"))
    place = DataServicePlace(changes.get("address", "127.0.0.1"), 4000, SECRET)
    with pytest.raises(Refused) as caught:
        device.worker(STREAMED, place)
    assert caught.value.code == code and caught.value.text.startswith(words)
