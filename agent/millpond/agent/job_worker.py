# SPDX-License-Identifier: Apache-2.0
"""Edge: a job's worker on the device: one process without network that may read the private data.

The worker trains; the agent relays. All answers of the worker go to the host through the agent's gate, and
the worker ends when the host's connections end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from dataclasses import replace
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path

from millpond.agent.audit.sessions import AuditSession
from millpond.agent.config import AgentConfig
from millpond.agent.gate import Gate
from millpond.agent.job_files import LaidOutFiles
from millpond.agent.node.memory import NodeMemory
from millpond.agent.node.release import ReleaseBuffer
from millpond.agent.policy import batch_structure, error_reports, kept_state
from millpond.agent.policy.budget_ledger import BudgetLedger
from millpond.agent.policy.draws import SecretDraws
from millpond.agent.policy.job_budget import JobBudget
from millpond.agent.policy.rules import ExchangeGuard, StateAnswers
from millpond.agent.policy.shown_volume import showing_folders
from millpond.aggregate.encoding.layout import PLAIN
from millpond.aggregate.encoding.update_encoder import UpdateEncoder
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.base.sizes import SLOWEST, bytes_of
from millpond.data.streaming.relay import StreamRelay, relay_of
from millpond.linux import memory
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.zygote.client import Zygote
from millpond.train.job.log_name import log_name
from millpond.train.protocol import (
    MOST_PERCENT,
    OWN_STATE,
    PART_VALUES,
    SPREAD,
    DataServicePlace,
    DataTiming,
    Fetch,
    Part,
    PrepareWorker,
    Ready,
    Update,
    Work,
    WorkProgress,
    state_digest,
)
from millpond.train.state import layout
from millpond.train.task.sums import LOSS, is_declared
from millpond.train.worker.handle import HostLeft, WorkerHandle, WorkerHangs
from millpond.wire.channel import Channel
from millpond.wire.control_messages import JOB_PORTS
from millpond.wire.framing import Head
from millpond.wire.messages import Failure, Message

log = logging.getLogger(__name__)

PREPARE_SECONDS = 300.0  # a cold ARM board needs half a minute for `import torch` alone
SEND_SECONDS = 60.0
PROGRESS_SECONDS = 1.0
_DIED = "the worker process died; the job's log on the device may say why"
_STRANGE = "the worker process sent an invalid answer"
_HANGS = "the worker process hangs: it neither computes nor reads"
_NO_SCORES = "a device with masks or noise tells no scores of samples that are held out"
_LONGEST_TEXT = 1000
MOST_LOGS = 200
"""Logs of jobs that stay on the device."""


class JobWorker:
    """The worker process of one job with ``files``, a fork of ``zygote``. ``prepare`` comes first; then
    ``relay`` relays each bulk request. The state and the values of updates lie in memory that the agent
    shares with the worker. Answers at one state are counted in ``answers``, their cost in privacy in
    ``ledger``; models draw from ``draws``. What leaves, also by the relay of the worker's streams, passes
    ``gate``, and is noted in ``session``.
    """

    def __init__(
        self,
        config: AgentConfig,
        request: PrepareWorker,
        files: LaidOutFiles,
        zygote: Zygote,
        answers: StateAnswers,
        ledger: BudgetLedger,
        draws: SecretDraws,
        gate: Gate,
        session: AuditSession,
    ) -> None:
        self.gate, self.session = gate.charging(session.counters), session
        self.name, self._request, self._files = request.work.name, request, files
        self._place = Path("/", os.urandom(8).hex())  # of private folders, in the worker's sandbox
        self._config, self._answers, self._draws = config, answers, draws
        self._is_bounded = bool(request.work.secure or request.work.privacy)  # what leaves tells no more
        self._errors = "location" if self._is_bounded else config.privacy.errors
        self._budget = JobBudget(config.policy, ledger, request)
        self._budget.check([folder.path for folder in request.folders if not folder.public])
        self._guard: ExchangeGuard | None = None
        self._held: tuple[int, ...] = ()  # samples that are held out, by folder
        self._has_update = False  # whether the shared values are of an update whose head has left
        size, end = layout.size(request.tensors), layout.parameters_end(request.tensors)
        self._size, encoding = 4 * size, request.work.encoding
        self._encoder = UpdateEncoder(encoding, size, end) if encoding.name != PLAIN else None
        self._masked, self._noisy, released = None, None, self._size
        if request.work.secure:
            from millpond.agent.node.masked_update import MaskedUpdates  # with numpy and cryptography

            self._masked = MaskedUpdates(config, request, size)
            released = self._masked.bytes
        elif request.work.privacy:
            from millpond.agent.node.update_noise import NoisyUpdates  # with numpy

            self._noisy = NoisyUpdates(config, request.work, size)
        self._busy = threading.Lock()
        sandbox = showing_folders(bare_sandbox(config), config, request.folders, self._place)
        self._streams = _relay(config, request, self.gate)
        # The state that jobs keep is private, and a worker with a stream could send it.
        self._kept = None if self._streams else kept_state.take(config, self.name)
        with contextlib.ExitStack() as failed:
            failed.callback(kept_state.leave, self._kept)
            self._worker = WorkerHandle(
                self.name,
                zygote,
                sandbox,
                files.worker,
                _log(config, self.name, request.run),
                ("--root", config.volume, "--errors", self._errors),
                peer=f"the worker of {self.name}",
                kept=self._kept,
                streams=self._streams,
            )
            failed.callback(self._worker.close)
            shared = (self._worker.states, self._worker.values)
            self._state, self._values = (memory.map_first(each, self._size) for each in shared)
            self._release, self._sent_size = ReleaseBuffer(self.name, released, size), released
            failed.pop_all()

    @property
    def node_memory(self) -> NodeMemory:
        """The memory of a reduction node of the job's updates."""
        return self._release.node_memory

    def prepare(self, host: Channel) -> Ready:
        """Have the worker build the model and load its data. Raises Refused with the worker's reason."""
        try:
            self._worker.channel.send(self._placed(), Deadline.after(SEND_SECONDS))
            self._worker.wait(Deadline.after(PREPARE_SECONDS), host, computes=False)
            ready = self._worker.channel.expect(Ready, Deadline.after(SEND_SECONDS))
        except HostLeft:
            raise
        except ConnectionLost:
            found = self._worker.of_death(_DIED)
            raise Refused("", found.code, found.text) from None
        except ProtocolError:  # its text has the worker's own words, and the host can read the agent's log
            raise Refused("", "worker", _STRANGE) from None
        except Refused as error:
            found = self._rebuilt(Failure(error.code, error.text))
            raise Refused("", found.code, found.text) from None
        self._held = ready.held
        if self._is_bounded and any(ready.held):
            raise Refused("", "model", _NO_SCORES)
        policy, folders, charge = self._config.policy, self._request.folders, self._budget.charge
        work, answers = self._request.work, self._answers
        self._guard = ExchangeGuard(
            policy, answers, folders, ready.parts, ready.held, charge, whole=bool(work.secure)
        )
        batch = () if work.total else batch_structure.rebuilt(ready.batch, work, self._files.sources())
        answer = Ready(ready.parts, ready.held, policy.least_samples, batch=batch)
        return self._masked.described(answer) if self._masked else answer

    def _placed(self) -> PrepareWorker:
        """Return the request as the worker, for which private folders lie elsewhere, needs it."""
        group, request = self._config.policy.least_samples, self._request
        found = (
            replace(f, group=1) if f.public else replace(f, path=str(self._place / f.path), group=group)
            for f in request.folders
        )
        fast = bytes_of(self._config.tier.fast)
        return replace(request, folders=tuple(found), files={}, fast=fast, streams=None)

    def relay(self, host: Channel) -> None:
        """Serve the exchanges of the host until it closes. Raises RemoteError."""
        with self._busy:
            while True:
                request = host.receive(NEVER)
                if isinstance(request.message, Work):
                    self._train(request.message, request.payload_size, host)
                elif isinstance(request.message, Fetch) and not request.payload_size:
                    self._send_parts(request.message, host)
                elif (
                    self._masked and not request.payload_size and (reply := self._in_cohort(request.message))
                ):
                    host.send(reply, Deadline.after(SEND_SECONDS))
                else:
                    raise ProtocolError(f"'{request.message.NAME}' has no place on a bulk connection")

    def _in_cohort(self, request: Message) -> Message | None:
        """Answer a request about the present masked exchange; None for another one."""
        assert self._masked is not None
        try:
            answer = self._masked.answer(request)
        except Refused as error:
            answer = Failure(error.code, error.text)
        if isinstance(answer, Failure):
            self.session.refuse()
        return answer

    def _train(self, request: Work, size: int, host: Channel) -> None:
        self._has_update = False
        self._release.withdraw()
        try:
            self._receive_state(request, size, host)
            if self._is_bounded and request.held_out:
                raise Refused("", "model", _NO_SCORES)
            if self._is_bounded and not request.samples:
                raise Refused("", "data", "an update of no samples is wanted")
            assert self._guard is not None  # no ticket is issued before
            self._guard.check(request, self._state.data)
        except Refused as error:
            self.session.refuse()
            host.send(Failure(error.code, error.text), Deadline.after(SEND_SECONDS))
            return
        if not self._streams:  # such a worker has no private data, and could tell others of the seed
            request = replace(request, draws=self._draws.seed(request))
        if self._masked:
            self._masked.begin(request, self._state.data)
        self._worker.begin()
        self._worker.channel.send(request, Deadline.after(SEND_SECONDS))
        began = time.monotonic()
        reply = self._received(host)
        answer = self._answer(request, reply, time.monotonic() - began)
        if fault := self._fault_of_state():
            answer = Failure("policy", fault)
        if isinstance(answer, Update) and not (request.held_out or request.synthetic):
            answer = self._released(answer, request, host)
            self._has_update = isinstance(answer, Update)
        if isinstance(answer, Update):
            self.session.exchange(self._covered(request))
        host.send(answer, Deadline.after(SEND_SECONDS))

    def _covered(self, request: Work) -> dict[str, int]:
        """Return the number of samples by folder that the answer to a request covers."""
        if request.held_out:
            counts = self._held
        else:
            counts = tuple(sum(stop - start for start, stop in ranges) for ranges in request.ranges)
        known = zip(self._request.folders, counts, strict=False)  # made-up samples are of no folder
        return {folder.path: count for folder, count in known if count}

    def _receive_state(self, request: Work, size: int, host: Channel) -> None:
        """Receive the state of a request, or take the one that was spread over the nodes. Raises Refused if
        that is another than the host means: nodes are devices of others. In a job without repair of lost
        datagrams each device goes on from its own.
        """
        if size != (0 if request.spread else self._size):
            raise ProtocolError(f"{host.peer} sent {size} bytes of state, not {self._size}")
        if request.spread == OWN_STATE and self._masked:
            raise Refused("", SPREAD, "masks cancel for updates from one state alone")
        if not request.spread:
            host.receive_into(self._state.data, Deadline.after(SEND_SECONDS + size / SLOWEST))
            return
        spread = self._release.spread_state
        if spread is not None:
            self._state.data[:] = spread
        is_meant = request.spread == OWN_STATE or state_digest(self._state.data) == request.spread
        if spread is None or not is_meant:
            raise Refused("", SPREAD, "the state that was spread is not the one that the host means")

    def _released(self, update: Update, request: Work, host: Channel) -> Update | Failure:
        """Copy the values of an update out of the worker's memory, or mask, encode or add noise: what is
        sent is read from there. Returns its head with the bounds of what will be decoded.
        """
        if writer := self._masked or self._noisy:
            values = host.examined(self._values.data)
            try:
                return self._release.fill(
                    update.exchange, lambda out: writer.write(update, request, values, out)
                )
            except Refused as error:
                return Failure(error.code, error.text)
        if self._encoder is None:  # a node adds values as they are
            self._release.release(update.exchange, self._values.data)
            return update
        task = request.exchange, request.seed, request.ranges
        largest, norm = self._encoder.encode(self._values.data, host.examined, task)
        return replace(update, largest=largest, norm=norm, encoding=self._encoder.encoding.name)

    def _received(self, host: Channel) -> Head:
        """Return the worker's answer, and tell the host meanwhile how far it is: a percentage that grows, and
        not often, so that a malicious model can hide little in it, and none with masks or noise. Raises
        ProtocolError without the worker's own words: the host can read the agent's log.
        """
        told, due = 0, time.monotonic() + PROGRESS_SECONDS
        while True:
            self._wait_while_busy(host)
            try:
                reply = self._worker.channel.receive(Deadline.after(SEND_SECONDS))
            except ProtocolError:
                raise ProtocolError(_STRANGE) from None
            except ConnectionLost:
                host.send(self._worker.of_death(_DIED), Deadline.after(SEND_SECONDS))
                raise
            if not isinstance(reply.message, WorkProgress) or reply.payload_size:
                return reply
            if self._is_bounded:
                continue
            percent, now = min(reply.message.percent, MOST_PERCENT), time.monotonic()
            if percent > told and now >= due:
                told, due = percent, now + PROGRESS_SECONDS
                host.send(WorkProgress(percent), Deadline.after(SEND_SECONDS))

    def _answer(self, request: Work, reply: Head, seconds: float) -> Update | Failure:
        """Return the part of the worker's answer that may leave, which took ``seconds``. Raises
        ProtocolError.
        """
        found = reply.message
        if not isinstance(found, (Update, Failure)) or reply.payload_size:
            raise ProtocolError(f"the worker sent '{found.NAME}', which may not leave")
        if isinstance(found, Failure):
            return self._rebuilt(found)
        allowed = is_declared(found.metrics) if request.held_out else set(found.metrics) == {LOSS}
        if not allowed:
            raise ProtocolError("the worker sent metrics that were not declared")
        if found.encoding != PLAIN:  # the agent encodes; any other word would be the model's own
            raise ProtocolError("the worker sent values of an encoding")
        samples = sum(self._held) if request.held_out else request.samples
        if (found.exchange, found.samples) != (request.exchange, samples):
            raise ProtocolError("the worker answered another exchange than the one it was asked for")
        return self._reduced(self._without_figures(found, seconds) if self._is_bounded else found, request)

    @staticmethod
    def _without_figures(found: Update, seconds: float) -> Update:
        """Return the head of an update with the bounds of its values and its loss, which masks or noise
        cover, and no other figure by the worker's word.
        """
        return Update(
            found.exchange,
            found.samples,
            weight=float(found.samples),
            largest=found.largest,
            norm=found.norm,
            seconds=float(f"{seconds:.1e}"),
            busy=math.nan,
            peak=0,
            metrics=found.metrics,
        )

    def _reduced(self, found: Update, request: Work) -> Update:
        """Return the head of an update without what its kind of answer has no need of."""
        trained = not (request.held_out or request.synthetic)
        # Gradients tell it, too; of all else nothing but its figures may leave.
        tells = trained and not self._request.work.passes
        unused = tuple(sorted({*found.unused} & {*range(len(self._request.tensors))})) if tells else ()
        data = self._timing(found.data) if trained else DataTiming()
        found = replace(found, data=data, unused=unused)
        if request.held_out or not self._request.work.local.normalized:
            found = replace(found, local_steps=1.0)
        if not trained:  # it has no values
            found = replace(found, weight=0.0, largest=0.0, norm=0.0, shift=0.0)
        if request.synthetic:  # how long it takes is all that a profile needs
            return replace(found, weight=1.0, metrics={LOSS: (0.0, 1.0)}, local_steps=1.0)
        return found

    def _timing(self, data: DataTiming) -> DataTiming:
        """Return what the worker's data cost as it may leave: nothing of what the job does not have."""
        data = data.rounded()
        if not self._streams:
            data = replace(data, stream=None)
        work = self._request.work
        if not work.mini_epoch:
            data = replace(data, stalled=0, mini_epochs=0, fitting=0)
        return data if work.mini_epoch and work.repeat.name else replace(data, repeats=0)

    def _fault_of_state(self) -> str:
        """Return what is wrong with the state that the task keeps, "" if nothing is."""
        most = self._config.policy.largest_state
        if kept_state.size(self._kept) <= most:  # not told: it is the task's own number
            return ""
        return f"policy.largest_state: the task keeps more than {most} bytes on the device"

    def _rebuilt(self, failure: Failure) -> Failure:
        """Return the part of the worker's report that may leave, or the shortage of which its error is a
        consequence.
        """
        return self._worker.of_error(failure) or self._worker.hinted(self._discreet(failure))

    def _discreet(self, failure: Failure) -> Failure:
        """Return the part of the worker's report that may leave."""
        failure = Failure(failure.code, failure.text.replace(f"{self._place}/", ""))
        if self._errors == "full":
            return Failure(failure.code[:20], failure.text[:_LONGEST_TEXT])
        request = self._request
        names = {
            request.worker,
            request.work.model.factory,
            *(f.path for f in request.folders),
            *(f.source for f in request.folders),
            *(t.name for t in request.tensors),
            *request.unsent,
        }
        return error_reports.rebuilt(failure, names, self._files.sources())

    def _send_parts(self, request: Fetch, host: Channel) -> None:
        stop, encoder = request.stop, self._encoder
        most = self._masked.written if self._masked else self._sent_size
        if not 0 < 4 * stop <= most or (encoder and not encoder.is_end(stop)):
            raise ProtocolError(f"{host.peer} wants {stop} values of an update")
        if not self._has_update:
            raise ProtocolError(f"{host.peer} wants values of an update that was not answered")
        for start in range(0, stop, PART_VALUES):  # the host may take its time: other updates come first
            end = min(start + PART_VALUES, stop)
            data = encoder.data(start, end) if encoder else self._release.part(4 * start, 4 * end)
            host.send(Part(start), NEVER, data)
        if encoder:
            encoder.sent(stop)

    def _wait_while_busy(self, host: Channel) -> None:
        """Wait for the worker as long as it computes or reads: all others wait in this step, too."""
        try:
            self._worker.wait(NEVER, host)
        except WorkerHangs:
            log.warning("job %s: %s", self.name, _HANGS)
            host.send(Failure("worker", _HANGS), Deadline.after(SEND_SECONDS))
            raise ConnectionLost(_HANGS) from None

    def stop(self) -> None:
        """Kill the worker: nothing it holds is worth keeping."""
        self._worker.close()
        kept_state.leave(self._kept)


def bare_sandbox(config: AgentConfig, *shown: Bind) -> Sandbox:
    """Return the sandbox of a worker that sees ``shown`` of the volume."""
    return Sandbox(
        binds=(*system_binds(), *python_binds(), *shown),
        own_network=True,
        own_pids=True,
        uid=config.users.worker,
    )


def _is_served_by_peer(config: AgentConfig, place: DataServicePlace) -> bool:
    """Return whether a place is another device's, and no port of agents or SSH servers."""
    with contextlib.suppress(ValueError):
        address, own = ip_address(place.address), ip_interface(config.link.address)
        is_peer = bool(config.link.peers) and address in ip_network(config.link.peers)
        return is_peer and address not in own.network and place.port in JOB_PORTS
    return False


def _relay(config: AgentConfig, request: PrepareWorker, gate: Gate) -> StreamRelay | None:
    """Return the relay of a worker's streams, None for a worker without. Raises Refused."""
    streamed = next((folder for folder in request.folders if folder.streamed), None)
    place = request.streams
    if streamed is None or place is None:
        return None
    if config.privacy.encrypt == "always":
        raise Refused("", "policy", 'privacy.encrypt is "always", and streams are not encrypted yet')
    if not _is_served_by_peer(config, place):
        raise Refused("", "data", f"{streamed.source} has an address on no network of the fleet")
    return relay_of(place, streamed, request.work, gate.outlet)


def _log(config: AgentConfig, job: str, run: str) -> Path:
    """Return the path of a run's log. Of the others those that were written last stay."""
    path = config.job_logs / log_name(job, run)
    written = dict[float, Path]()
    with contextlib.suppress(OSError):
        written = {each.stat().st_mtime: each for each in config.job_logs.iterdir() if each != path}
    for moment in sorted(written)[: -MOST_LOGS + 1]:
        written[moment].unlink(missing_ok=True)
    return path
