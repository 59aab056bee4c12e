# SPDX-License-Identifier: Apache-2.0
"""Edge: one authenticated connection of the host: questions about the device, tickets, and jobs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from millpond.agent import gate as gates
from millpond.agent import load
from millpond.agent.config import AgentConfig
from millpond.agent.job_files import JobFiles, LaidOutFiles
from millpond.agent.job_worker import JobWorker
from millpond.agent.launched_script import LaunchedScripts
from millpond.agent.log_lines import LogLines
from millpond.agent.policy import signatures
from millpond.agent.policy.draws import SecretDraws
from millpond.agent.policy.rules import StateAnswers, check_job
from millpond.agent.tickets import Tickets
from millpond.agent.volume import VolumeServer
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConfigError, ConnectionLost, LocalError, ProtocolError, Refused
from millpond.fs.store.usage import private_bytes
from millpond.linux.zygote.client import Zygote
from millpond.train.job import spec
from millpond.train.job.files import check_job_files
from millpond.train.protocol import PrepareWorker, WarmUp
from millpond.wire.channel import Channel
from millpond.wire.control_messages import (
    AtRest,
    Attach,
    GetLedger,
    GetLoad,
    GetLog,
    GetTicket,
    Hello,
    Ledger,
    Log,
    LogPosition,
    Ticket,
)
from millpond.wire.launch_messages import Launch
from millpond.wire.messages import Failure, Message, Ok

log = logging.getLogger(__name__)
REPLY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Purpose:
    """The purpose of a bulk connection: ``worker``'s parameters, or the volume if there is none."""

    worker: JobWorker | None = None


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
    ) -> None:
        self.config, self.software, self.gate, self.at_rest = config, software, gate, at_rest
        self.volume, self.launches, self.log_lines = volume, launches, log_lines
        self.boot = os.urandom(8).hex()
        self.tickets: Tickets[Purpose] = Tickets(lambda: os.urandom(32))
        self.zygote = zygote
        self._meter = load.meter(config)
        self._answers = StateAnswers(config.policy.answers_per_state)
        self._draws = SecretDraws(Path(config.state, "draws.key"))
        self._files = JobFiles(config)
        self._lock = threading.Lock()
        self._workers: list[JobWorker] = []
        self._greeted = False

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
            if request.payload_size:
                raise ProtocolError("the host sent a payload on a control connection")
            if isinstance(request.message, Attach):
                return request.message
            if isinstance(request.message, PrepareWorker):
                self._run_job(request.message, host)
                return None
            if isinstance(request.message, Launch):
                self.launches.serve(request.message, host)
                return None
            host.send(self._answer(request.message), Deadline.after(REPLY_SECONDS))

    def _answer(self, request: Message) -> Message:
        answer = self._ANSWERS.get(type(request))
        if answer is None:
            return Failure("protocol", f"'{request.NAME}' is not a request for an agent")
        return answer(self, request)

    def _hello(self, _request: Message) -> Message:
        return load.describe(self.config, self.software, self.boot, self.at_rest)

    def _load(self, _request: Message) -> Message:
        with self._lock:
            names = [*(worker.name for worker in self._workers), *self.launches.names]
            self._note_greeting()
            return load.measure(self.config, names, self._meter)

    def _note_greeting(self) -> None:
        """Signal to a new slot's trial boot that the host has accepted this agent."""
        if not self._greeted and (runtime := os.environ.get("RUNTIME_DIRECTORY")):
            Path(runtime, "greeted").touch()
        self._greeted = True

    def _ledger(self, _request: Message) -> Message:
        sent, seen = gates.ledger(self.gate, [self.volume.tally])
        return Ledger(sent, seen, private_bytes(Path(self.config.flash)))

    def _ticket(self, request: Message) -> Message:
        assert isinstance(request, GetTicket)
        return self.issue(Purpose(), request.tls)

    def _log(self, request: Message) -> Message:
        assert isinstance(request, GetLog)
        after = request.after
        if after is None:
            lines, count = self.log_lines.last(request.lines)
        else:
            lines, count = self.log_lines.since(after.number if after.boot == self.boot else 0)
        return Log(lines, LogPosition(self.boot, count))

    def _warm_up(self, _request: Message) -> Message:
        self.zygote.warm_up()
        return Ok()

    _ANSWERS: dict[type[Message], Callable[[AgentService, Message], Message]] = {  # noqa: RUF012 - never changed
        Hello: _hello,
        GetLoad: _load,
        GetLedger: _ledger,
        GetTicket: _ticket,
        GetLog: _log,
        WarmUp: _warm_up,
    }

    def _run_job(self, request: PrepareWorker, host: Channel) -> None:
        """Run a job's worker for as long as the host holds this connection."""
        try:
            spec.check_work(request.work, "the job")
            check_job_files(request.files, "the job: files")
            check_job(self.config.policy, self.config.name, request)
            if self.config.policy.code == "signed":
                signatures.check_signature(self.config.policy.owners, request)
            with self._files.laid_out(request.files, host) as files:
                self._run_worker(request, files, host)
        except Refused as error:
            host.send(Failure(error.code, error.text), Deadline.after(REPLY_SECONDS))
        except ConfigError as error:
            host.send(Failure("model", str(error)), Deadline.after(REPLY_SECONDS))
        except (OSError, LocalError) as error:  # a full flash, most likely
            reason = (error.strerror if isinstance(error, OSError) else "") or error
            text = f"the worker cannot be started: {reason}"
            log.error("job %s: %s", request.work.name, text)
            host.send(Failure("device", text), Deadline.after(REPLY_SECONDS))

    def _run_worker(self, request: PrepareWorker, files: LaidOutFiles, host: Channel) -> None:
        worker = JobWorker(self.config, request, files, self.zygote, self._answers, self._draws)
        self._workers.append(worker)
        log.info("job %s: worker started", worker.name)
        try:
            ready = worker.prepare(host)
            ticket = self.issue(Purpose(worker), request.tls)
            host.send(replace(ready, token=ticket.token, tls=ticket.tls), Deadline.after(REPLY_SECONDS))
            self._wait_for_end(host)
        finally:
            self._workers.remove(worker)
            worker.stop()
            log.info("job %s: worker ended", worker.name)

    def _wait_for_end(self, host: Channel) -> None:
        try:
            host.receive(NEVER)
        except ConnectionLost:
            return
        raise ProtocolError("the host sent another request on a connection that holds a job")
