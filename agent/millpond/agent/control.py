# SPDX-License-Identifier: Apache-2.0
"""Edge: one authenticated connection of the host: questions about the device, tickets, and jobs."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from millpond.agent import gate as gates
from millpond.agent.audit.recorder import AuditRecorder
from millpond.agent.audit.sessions import AuditSession
from millpond.agent.cohort import cohort_roster
from millpond.agent.cohort.cohort_key import make_key
from millpond.agent.config import AgentConfig
from millpond.agent.data_service.handle import DataServiceProcess, about_service
from millpond.agent.health import load
from millpond.agent.job_files import JobFiles, LaidOutFiles
from millpond.agent.job_worker import JobWorker
from millpond.agent.launched_script import LaunchedScripts
from millpond.agent.log_lines import LogLines
from millpond.agent.node.handle import NodeProcess, NodeRequests
from millpond.agent.node.memory import NodeMemory
from millpond.agent.policy import budget_ledger, signatures
from millpond.agent.policy.budget_ledger import BudgetLedger
from millpond.agent.policy.draws import SecretDraws
from millpond.agent.policy.questions import check_question
from millpond.agent.policy.rules import StateAnswers, check_job
from millpond.agent.supervision import SelfCheck
from millpond.agent.tickets import Tickets
from millpond.agent.volume import VolumeServer
from millpond.aggregate.messages import StartNode
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConfigError, ConnectionLost, LocalError, ProtocolError, Refused
from millpond.fs.store.usage import private_bytes
from millpond.launch.shared_mount import SharedMount
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.data_service_messages import StartDataService
from millpond.train.distributed.launch_messages import Launch, ShareFolder
from millpond.train.job import signed_code
from millpond.train.job.check import check_work
from millpond.train.job.files import check_job_files
from millpond.train.protocol import PrepareWorker, WarmUp
from millpond.train.questions import question
from millpond.train.questions.messages import AskDevice
from millpond.wire import tls
from millpond.wire.audit_log import Answered
from millpond.wire.channel import Channel
from millpond.wire.control_messages import (
    SENDERS,
    AtRest,
    Attach,
    GetAuditEntries,
    GetAuditHead,
    GetLedger,
    GetLoad,
    GetLog,
    GetTicket,
    Hello,
    Ledger,
    Log,
    LogPosition,
    SetRoster,
    Ticket,
)
from millpond.wire.framing import Head
from millpond.wire.messages import Failure, Message, Ok

log = logging.getLogger(__name__)
REPLY_SECONDS = 10.0
_DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Purpose:
    """The purpose of a bulk connection: ``worker``'s parameters, those of a ``node``, the mount of a folder
    that a launch has ``shared``, or else the volume.
    """

    worker: JobWorker | None = None
    node: NodeProcess | None = None
    shared: SharedMount | None = None


class HostTime:
    """Leaves the host's time in the ``runtime`` directory, to the service of a board that sets its clock."""

    def __init__(self, runtime: Path | None) -> None:
        self._runtime, self._next = runtime, 0.0

    def note(self, told: float, latest: float) -> None:
        """Note what the host has ``told``, in seconds since 1970, once a day at most. A time after the
        ``latest``, when the host's certificate expires, is none. Raises OSError.
        """
        now = time.monotonic()
        if self._runtime and 0 < told < latest and now >= self._next:
            new = self._runtime / "host-time.new"
            new.write_text(f"{told} {time.clock_gettime(time.CLOCK_BOOTTIME)}\n")
            new.replace(self._runtime / "host-time")
            self._next = now + _DAY_SECONDS


M = TypeVar("M", bound=Message)
_Handler = Callable[["AgentService", M, Channel], Message | None]
_HANDLERS: dict[type[Message], Callable[[AgentService, Any, Channel], Message | None]] = {}


def answers(kind: type[M]) -> Callable[[_Handler[M]], _Handler[M]]:
    """Register what answers requests of a kind: it returns the answer, or has taken the connection over for
    as long as it lasts.
    """

    def register(handler: _Handler[M]) -> _Handler[M]:
        _HANDLERS[kind] = handler
        return handler

    return register


def _refuse(_service: AgentService, request: Message, _host: Channel) -> Message:
    return Failure("protocol", f"'{request.NAME}' is not a request for an agent")


class AgentService:
    """Answers the host's requests; all control connections of one agent share one."""

    def __init__(
        self,
        config: AgentConfig,
        software: str,
        gate: gates.Gate,
        volume: VolumeServer,
        launches: LaunchedScripts,
        log_lines: LogLines,
        at_rest: AtRest,
        zygote: Zygote,
        nodes_tally: gates.LedgerCounters,
        data_tally: gates.LedgerCounters,
        check: SelfCheck,
        audit: AuditRecorder,
    ) -> None:
        self.audit = audit
        self.config, self.software, self.gate, self.at_rest = config, software, gate, at_rest
        self.nodes_tally, self.data_tally = nodes_tally, data_tally
        self.volume, self.launches, self.log_lines = volume, launches, log_lines
        self.boot = os.urandom(8).hex()
        self.tickets: Tickets[Purpose] = Tickets(lambda: os.urandom(32))
        self.zygote, self._check = zygote, check
        self._meter = load.meter(config)
        self._answers = StateAnswers(config.policy.answers_per_state)
        self.budget = BudgetLedger(Path(config.state, budget_ledger.FILE))
        make_key(Path(config.state), config.name)
        self._draws = SecretDraws(Path(config.state, "draws.key"))
        self._files = JobFiles(config)
        self._lock = threading.Lock()
        self._workers: list[JobWorker] = []
        self._greeted = False
        runtime = os.environ.get("RUNTIME_DIRECTORY")
        self._host_time = HostTime(Path(runtime) if runtime else None)

    def issue(self, purpose: Purpose, tls: bool) -> Ticket:
        """Issue a ticket for ``purpose``, encrypted if either side wants it."""
        tls = tls or self.config.privacy.encrypt == "always"
        with self._lock:
            return Ticket(self.tickets.issue(purpose, tls, time.monotonic()), tls)

    def redeem(self, token: bytes, tls: bool) -> Purpose | None:
        """Return the purpose of a token, once; None if it is not valid."""
        with self._lock:
            return self.tickets.redeem(token, tls, time.monotonic())

    def serve(self, host: Channel) -> Attach | None:
        """Answer the host until it closes, or shows a ticket for encrypted bulk. Raises RemoteError."""
        while True:
            try:
                request = host.receive(NEVER)
            except ConnectionLost:
                if host.closed_cleanly:
                    return None
                raise
            message = _without_payload(request)
            if isinstance(message, Attach):
                return message
            handler = _HANDLERS.get(type(message), _refuse)
            try:
                answer = handler(self, message, host)
            except Refused as error:
                answer = Failure(error.code, error.text)
            if answer is None:
                return None
            host.send(answer, Deadline.after(REPLY_SECONDS))

    @answers(Hello)
    def _hello(self, request: Hello, host: Channel) -> Message:
        if isinstance(host.sock, ssl.SSLSocket):
            self._host_time.note(request.time, tls.peer_expiry(host.sock))
        return load.describe(self.config, self.software, self.boot, self.at_rest)

    @answers(GetLoad)
    def _load(self, _request: GetLoad, _host: Channel) -> Message:
        with self._lock:
            names = [*(worker.name for worker in self._workers), *self.launches.names]
            self._note_greeting()
            budget = self.config.policy.budget
            spent = self.budget.shares(budget.rho) if budget else {}
            return load.measure(self.config, names, self._meter, self._check.fault, spent)

    def _note_greeting(self) -> None:
        """Signal to a new slot's trial boot that the host has accepted this agent."""
        if not self._greeted and (runtime := os.environ.get("RUNTIME_DIRECTORY")):
            Path(runtime, "greeted").touch()
        self._greeted = True

    @answers(GetLedger)
    def _ledger(self, _request: GetLedger, _host: Channel) -> Message:
        others = [self.volume.tally, self.nodes_tally, self.data_tally]
        sent, seen = gates.ledger(self.gate, others)
        senders = dict(zip(SENDERS, gates.totals([self.gate.tally, *others]), strict=True))
        return Ledger(sent, seen, private_bytes(Path(self.config.flash)), senders)

    @answers(GetAuditHead)
    def _audit_head(self, request: GetAuditHead, _host: Channel) -> Message:
        return self.audit.head(request.nonce)

    @answers(GetAuditEntries)
    def _audit_entries(self, request: GetAuditEntries, _host: Channel) -> Message:
        return self.audit.entries(request.first)

    @answers(SetRoster)
    def _set_roster(self, request: SetRoster, _host: Channel) -> Message:
        number = cohort_roster.take(self.config.policy, Path(self.config.state), request.text)
        self.audit.rules_changed()
        log.info("roster %d, signed by an owner, is the device's cohort", number)
        return Ok()

    @answers(GetTicket)
    def _ticket(self, request: GetTicket, _host: Channel) -> Message:
        return self.issue(Purpose(), request.tls)

    @answers(GetLog)
    def _log(self, request: GetLog, _host: Channel) -> Message:
        after = request.after
        if after is None:
            lines, count = self.log_lines.last(request.lines)
        else:
            lines, count = self.log_lines.since(after.number if after.boot == self.boot else 0)
        return Log(lines, LogPosition(self.boot, count))

    @answers(WarmUp)
    def _warm_up(self, _request: WarmUp, _host: Channel) -> Message:
        self.zygote.warm_up()
        return Ok()

    @answers(Launch)
    def _launch(self, request: Launch, host: Channel) -> None:
        self.launches.serve(request, host)

    @answers(ShareFolder)
    def _share(self, request: ShareFolder, host: Channel) -> None:
        self.launches.share(request, host, lambda mount, tls: self.issue(Purpose(shared=mount), tls))

    @answers(StartNode)
    def _run_node(self, request: StartNode, host: Channel) -> None:
        """Run a node without a job, to measure links, for as long as the host holds this connection."""
        if not 0 < request.size <= self.config.policy.largest_model:
            text = f"policy.largest_model: a node of {request.size} values"
            host.send(Failure("policy", text), Deadline.after(REPLY_SECONDS))
            return
        with self.audit.session(Answered("node", peer=tls.peer_of(host.sock))) as session:
            self._serve_node(NodeMemory.of_zeros(request.size), host, session, first=request)

    def _serve_node(
        self, memory: NodeMemory, host: Channel, session: AuditSession, first: Message | None = None
    ) -> None:
        """Answer requests about a node of ``memory`` until the host closes the connection."""
        gates.charge(host, session.counters)
        tallies = self.nodes_tally, session.elsewhere()
        requests = NodeRequests(
            lambda request: NodeProcess(self.config, request, memory, self.gate.patterns, *tallies),
            lambda node, tls: self.issue(Purpose(node=node), tls),
        )
        with contextlib.closing(requests):
            while True:
                try:
                    request, first = first or _without_payload(host.receive(NEVER)), None
                except ConnectionLost:
                    return
                try:
                    answer = requests.answer(request)
                except Refused as error:
                    answer = Failure(error.code, error.text)
                except (OSError, LocalError) as error:
                    answer = Failure("device", f"the node cannot be started: {error}")
                host.send(answer, Deadline.after(REPLY_SECONDS))

    @answers(StartDataService)
    def _serve_data(self, request: StartDataService, host: Channel) -> None:
        """Run a data service for as long as the host holds this connection."""
        gate, tally = self.gate, self.data_tally

        def begin(signer: str) -> contextlib.AbstractContextManager[AuditSession]:
            return self.audit.session(about_service(request.code, tls.peer_of(host.sock), signer))

        try:
            made = DataServiceProcess(
                self.config, request.secret, gate.patterns, tally, self.zygote, begin, request.code
            )
        except Refused as error:
            host.send(Failure(error.code, error.text), Deadline.after(REPLY_SECONDS))
        except ConfigError as error:
            host.send(Failure("launch", str(error)), Deadline.after(REPLY_SECONDS))
        except OSError as error:
            text = f"the data service cannot be started: {error.strerror or error}"
            host.send(Failure("device", text), Deadline.after(REPLY_SECONDS))
        else:
            with contextlib.closing(made):
                made.serve(host)

    @answers(PrepareWorker)
    def _run_job(self, request: PrepareWorker, host: Channel) -> None:
        """Run a job's worker for as long as the host holds this connection."""
        with self._telling(request.work.name, host):
            check_work(request.work, "the job")
            check_job_files(request.needed, "the job: files")
            check_job(self.config.policy, self.config.name, request)
            signer = ""
            if self.config.policy.code == "signed":
                signer = signatures.check_signature(self.config.policy.owners, request)
            with self.audit.session(_about(request, host, signer)) as session:
                gates.charge(host, session.counters)
                with self._files.laid_out(request.needed, host) as files:
                    self._run_worker(request, files, host, session)

    @answers(AskDevice)
    def _ask(self, request: AskDevice, host: Channel) -> None:
        """Answer a question, on the connection on which it has come."""
        with self._telling(f"question: {request.question}", host):
            question.check(request.question)
            signer, code = "", ""
            if request.work:
                check_work(request.work, "the question")
                check_job_files(request.needed, "the question: files")
                code = signed_code.digest(request.work, request.files)
            check_question(self.config.policy, self.config.name, request)
            if request.work and self.config.policy.code == "signed":
                signer = signatures.check_digest(self.config.policy.owners, code, request.signature)
            name = f"{request.question}" + (f", noise of rho {request.rho:.3g}" if request.rho else "")
            about = Answered("question", name, peer=tls.peer_of(host.sock), run=request.name)
            with self.audit.session(replace(about, code=code, signer=signer)) as session:
                gates.charge(host, session.counters)
                self._answer_question(request, host, session)

    def _answer_question(self, request: AskDevice, host: Channel, session: AuditSession) -> None:
        from millpond.agent.questions import counting, noise, release  # with numpy and cryptography

        added = noise.SumsNoise(self.config, request, self.budget) if request.rho else None
        if added:
            added.check()
        with self._files.laid_out(request.needed, host) as files:
            sums = counting.count(self.config, request, files, self.zygote, host)
        release.release(self.config, request, sums, added, host, session)

    @contextlib.contextmanager
    def _telling(self, name: str, host: Channel) -> Iterator[None]:
        """Tell the host why the block, which answers it about ``name``, has failed."""
        try:
            yield
        except Refused as error:
            if error.code == "policy":
                self.audit.refused(name, error.text)
            if error.code == "worker":  # it has died
                self._check.hurry()
            host.send(Failure(error.code, error.text), Deadline.after(REPLY_SECONDS))
        except ConfigError as error:
            host.send(Failure("model", str(error)), Deadline.after(REPLY_SECONDS))
        except (OSError, LocalError) as error:  # a full flash, most likely
            reason = (error.strerror if isinstance(error, OSError) else "") or error
            self._check.hurry()
            text = f"the worker cannot be started: {reason}"
            log.error("job %s: %s", name, text)
            host.send(Failure("device", text), Deadline.after(REPLY_SECONDS))

    def _run_worker(
        self, request: PrepareWorker, files: LaidOutFiles, host: Channel, session: AuditSession
    ) -> None:
        worker = JobWorker(
            self.config,
            request,
            files,
            self.zygote,
            self._answers,
            self.budget,
            self._draws,
            self.gate,
            session,
        )
        self._workers.append(worker)
        log.info("job %s: worker started", worker.name)
        try:
            ready = worker.prepare(host)
            ticket = self.issue(Purpose(worker), request.tls)
            host.send(replace(ready, token=ticket.token, tls=ticket.tls), Deadline.after(REPLY_SECONDS))
            self._serve_node(worker.node_memory, host, session)
        finally:
            self._workers.remove(worker)
            worker.stop()
            log.info("job %s: worker ended", worker.name)


def _about(request: PrepareWorker, host: Channel, signer: str) -> Answered:
    code = signed_code.digest(request.work, request.files)
    return Answered(
        "job", request.work.name, run=request.run, peer=tls.peer_of(host.sock), code=code, signer=signer
    )


def _without_payload(request: Head) -> Message:
    if request.payload_size:
        raise ProtocolError("the host sent a payload on a control connection")
    return request.message
