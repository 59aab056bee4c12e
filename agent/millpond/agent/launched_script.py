# SPDX-License-Identifier: Apache-2.0
"""Edge: a launched script on the device: a process that has the network, and therefore no private part; or a
confined one, see ``confined_script``.

Its output goes to the host through the agent's gate. Traffic that the script sends by itself the agent cannot
search; the ledger counts it, by the counters of the tunnel.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from millpond.agent.audit.recorder import Begin
from millpond.agent.audit.sessions import AuditSession
from millpond.agent.config import AgentConfig
from millpond.agent.confined_script import expect_exit, run_confined, showing_private
from millpond.agent.gate import Gate, LedgerCounters, charge, ledger
from millpond.agent.policy.launch_rules import check_launch, code_digest
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConfigError, ConnectionLost, DeadlineExceeded, ProtocolError, Refused
from millpond.fs.store.layout import PUBLIC
from millpond.launch.process import LaunchedScript, shared_bind
from millpond.launch.sharing import Issue, SharedFolders
from millpond.linux import sockets
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.data_service_messages import DataFound, FindData
from millpond.train.distributed.launch_messages import (
    SAVED_PART,
    AllSaved,
    InputPart,
    InputsEnd,
    Launch,
    Lines,
    Output,
    RestartScript,
    SavedOrder,
    SavedPart,
    ShareFolder,
    StopScript,
    Taken,
    check_files,
    check_start,
)
from millpond.wire.audit_log import Answered
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Kind, Message
from millpond.wire.tls import peer_of

log = logging.getLogger(__name__)

SEND_SECONDS = 600.0  # the reader of the output may have paused
REPLY_SECONDS = 10.0
PLACE_SECONDS = 20.0  # the host may launch again before this agent has seen that it left the last one
MOST_OUTPUT = 16 << 20
OUTPUT_RATE = 1 << 20  # bytes per second
COUNT_SECONDS = 1.0


class LaunchedScripts:
    """Runs one launched script at a time, a fork of ``zygote``. ``crossed`` returns the bytes that have left
    by the tunnel. The audit log says first that a script ``begins``.
    """

    def __init__(
        self,
        config: AgentConfig,
        gate: Gate,
        others: Sequence[LedgerCounters],
        crossed: Callable[[], int],
        zygote: Zygote,
        begins: Begin,
    ) -> None:
        self._config, self._gate, self._others, self._crossed = config, gate, others, crossed
        self._zygote, self._begins = zygote, begins
        self._shared = SharedFolders(Path(config.state, "shared"), _user(config))
        self._lock = threading.Lock()
        self._script = ""

    @property
    def names(self) -> list[str]:
        """Return the name of the running script, if any, for the device's load."""
        script = self._script
        return [script] if script else []

    def serve(self, request: Launch, host: Channel) -> None:
        """Run the script until it ends or the host leaves. Raises RemoteError."""
        inputs, failure = _Inputs(host, request.inputs), None
        try:
            self._serve(request, host, inputs)
        except Refused as error:
            failure = Failure(error.code, error.text)
        except ConfigError as error:
            failure = Failure("launch", str(error))
        except OSError as error:
            failure = Failure("device", f"the script cannot be started: {error.strerror or error}")
            log.error("launch %s: %s", request.script, failure.text)
        if failure:
            inputs.pass_on(None)
            host.send(failure, Deadline.after(REPLY_SECONDS))

    def share(self, request: ShareFolder, host: Channel, issue: Issue) -> None:
        """Mount the folder that a launch shares, until the host leaves. Raises RemoteError."""
        about = Answered("shared folder", run=request.run, peer=peer_of(host.sock))
        with self._begins(about) as session, self._counted(session):
            charge(host, session.counters)
            self._shared.serve(request, host, issue)

    def _serve(self, request: Launch, host: Channel, inputs: _Inputs) -> None:
        installed = bool(request.module) and not request.confined
        check_files(request.script, request.files, installed=installed)
        check_start(request.processes, dict(request.variables), request.elastic)
        signer = ""
        if request.confined or self._config.privacy.launch == "private":
            signer = check_launch(self._config.policy, self._config.name, request)
        with self._place(request.script), self._begins(_about(request, host, signer)) as session:
            charge(host, session.counters)
            log.info("launch %s: worker %d of %d", request.script, request.rank, request.world_size)
            if request.confined:
                run_confined(self._config, self._zygote, request, host, session)
            else:
                with self._counted(session) as count:
                    self._run(request, host, inputs, count)

    @contextlib.contextmanager
    def _place(self, script: str) -> Iterator[None]:
        if not self._lock.acquire(timeout=PLACE_SECONDS):
            raise Refused("", "busy", f"'{self._script}' has been launched here already")
        self._script = script
        try:
            yield
        finally:
            log.info("launch %s: ended", script)
            self._script = ""
            self._lock.release()

    def _run(self, request: Launch, host: Channel, inputs: _Inputs, count: Callable[[], None]) -> None:
        shared = self._shared.place(request.run) if request.shares else None
        sandbox = _sandbox(self._config, request, shared)
        script = LaunchedScript(self._zygote, sandbox, request, self._config.link.interface)
        try:
            inputs.pass_on(script)
            outgoing = _Outgoing(script, host)
            if request.tells_begin:
                script.begin(host, outgoing.answer)
            _relay(script, host, outgoing, count)
            _finish(script, host, outgoing, request.most_saved)
        finally:
            script.stop()

    @contextlib.contextmanager
    def _counted(self, session: AuditSession) -> Iterator[Callable[[], None]]:
        """Yield a function to call now and then: it adds to the ledger the bytes that have left by the tunnel
        and that the gate has not counted, packets' heads included.
        """
        gate, begin = self._gate.charging(session.counters), self._uncounted()

        def count() -> None:
            new = self._uncounted() - begin  # bytes once added are in the gate's sum from then on
            if new > 0:
                gate.count(Kind.LAUNCHED, new)

        try:
            yield count
        finally:
            count()

    def _uncounted(self) -> int:
        return self._crossed() - sum(ledger(self._gate, self._others)[0].values())


class _Inputs:
    """The files that come behind a Launch, if there are ``more``."""

    def __init__(self, host: Channel, more: bool) -> None:
        self._host, self._more = host, more

    def pass_on(self, script: LaunchedScript | None) -> None:
        """Pass all on to the script's process, or drop them without one. Raises RemoteError of the host."""
        while self._more:
            head = self._host.receive(Deadline.after(SEND_SECONDS))
            self._more = isinstance(head.message, InputPart)
            if not self._more and (not isinstance(head.message, InputsEnd) or head.payload_size):
                raise ProtocolError(f"the host sent '{head.message.NAME}' where files belong")
            data = b""
            if head.payload_size:
                data = bytes(self._host.receive_payload(SAVED_PART, Deadline.after(SEND_SECONDS)))
            if script:
                with contextlib.suppress(ConnectionLost):  # if it has died, its end is seen next
                    script.channel.send(head.message, Deadline.after(SEND_SECONDS), data)


class _Outgoing:
    """Sends what a script prints and saves to a host that takes one message after the other."""

    def __init__(self, script: LaunchedScript, host: Channel) -> None:
        self._script, self._host = script, host
        self._untaken = 0

    @property
    def waits(self) -> bool:
        """Whether the host has not taken the last message yet."""
        return self._untaken > 0

    def send(self, message: Output | SavedPart, data: bytes = b"") -> None:
        """Send a message, which the host is to take."""
        self._host.send(message, Deadline.after(SEND_SECONDS), data)
        self._untaken += 1

    def answer(self, *wanted: type[Message]) -> Message | None:
        """Receive a message of the host: return a ``wanted`` one, heed others. Raises RemoteError."""
        head = self._host.receive(NEVER)
        message = head.message
        if head.payload_size:
            raise ProtocolError(f"the host sent a payload behind '{message.NAME}'")
        if isinstance(message, Taken):
            self._untaken -= 1
        elif isinstance(message, StopScript):
            self._script.kill()
        elif isinstance(message, RestartScript):
            self._script.restart()
        elif isinstance(message, wanted):
            return message
        else:
            raise ProtocolError(f"the host sent '{message.NAME}' while a script runs")
        return None

    def until_taken(self) -> None:
        """Wait until the host has taken the last message. Raises RemoteError."""
        while self.waits:
            self.answer()


def _relay(script: LaunchedScript, host: Channel, outgoing: _Outgoing, count: Callable[[], None]) -> None:
    """Relay the script's output, at a bounded rate and as the host takes it, until there is no more and the
    script's end is told. Raises ConnectionLost.
    """
    lines, left, requests = Lines(), MOST_OUTPUT, [script.requests.sock.fileno()]
    own = [script.output, script.channel.sock.fileno()]
    while True:
        watched = [host.sock.fileno(), *requests, *(() if outgoing.waits else own)]
        ready = sockets.readable(watched, COUNT_SECONDS)
        count()
        if host.sock.fileno() in ready:  # otherwise the host has left, which ends this
            outgoing.answer()
        if requests and requests[0] in ready and not _find_data(script, host, outgoing):
            requests.clear()
        if set(own) & set(ready):
            data = script.read() if script.output in ready else b""
            found = lines.take(data) if data else lines.end()
            if left > 0 and found:
                outgoing.send(Output(found))
                left -= len(data)
                if left <= 0:
                    notice = f"(more than {MOST_OUTPUT >> 20} MiB of output: the rest is not shown)"
                    outgoing.send(Output((notice,)))
            if not data:
                return
            time.sleep(len(data) / OUTPUT_RATE)


def _find_data(script: LaunchedScript, host: Channel, outgoing: _Outgoing) -> bool:
    """Pass on a request and its answer; return whether there may be more. Raises RemoteError of the host."""
    try:
        head = script.requests.receive(Deadline.after(REPLY_SECONDS))
    except (ConnectionLost, DeadlineExceeded):
        return False  # the script has ended, or closed its end
    if not isinstance(head.message, FindData) or head.payload_size:
        raise ProtocolError(f"a script's process sent '{head.message.NAME}' as a request")
    host.send(head.message, Deadline.after(SEND_SECONDS))
    answer = None
    while answer is None:
        answer = outgoing.answer(DataFound, Failure)
    with contextlib.suppress(ConnectionLost):
        script.requests.send(answer, Deadline.after(REPLY_SECONDS))
    return True


def _finish(script: LaunchedScript, host: Channel, outgoing: _Outgoing, most: int) -> None:
    """Relay how the script has ended, and what it has saved. Raises RemoteError."""
    order = SavedOrder(most)
    host.send(expect_exit(script, confined=False), Deadline.after(SEND_SECONDS))
    while True:
        head = script.channel.receive(NEVER)
        if isinstance(head.message, AllSaved) and not head.payload_size:
            outgoing.until_taken()  # nothing of the host is on its way when this connection ends
            host.send(head.message, Deadline.after(SEND_SECONDS))
            return
        if not isinstance(head.message, SavedPart):
            raise ProtocolError(f"a script's process sent '{head.message.NAME}' at its end")
        order.take(head.message, head.payload_size)
        data = script.channel.receive_payload(head.payload_size, Deadline.after(SEND_SECONDS))
        outgoing.until_taken()
        outgoing.send(head.message, bytes(data))


def _about(request: Launch, host: Channel, signer: str) -> Answered:
    code, peer = code_digest(request), peer_of(host.sock)
    return Answered("launch", request.script, run=request.run, peer=peer, code=code, signer=signer)


def _user(config: AgentConfig) -> int:
    """Return the user of scripts, who may read private folders where the device's owner lets them."""
    return config.users.worker if config.privacy.launch == "private" else config.users.launch


def _sandbox(config: AgentConfig, request: Launch, shared: Path | None) -> Sandbox:
    """Return a sandbox with the device's network, so without the private part unless its owner allows it, and
    with the ``shared`` folder.
    """
    own = Sandbox(binds=(*system_binds(), *python_binds()), own_pids=True, uid=_user(config))
    if shared:
        links = config.privacy.launch != "private"  # see policy.shown_volume
        own = replace(own, binds=(*(own.binds or ()), shared_bind(shared, follow_links=links)))
    if config.privacy.launch == "private":
        return showing_private(own, config, request)
    public = Path(config.volume, PUBLIC)
    return replace(own, binds=(*(own.binds or ()), Bind(public, public)))
