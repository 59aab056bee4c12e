# SPDX-License-Identifier: Apache-2.0
"""Edge: a confined script on the device: it may read private folders, and has no network but its exchanges.

The agent relays these to the host through its gate, one part of a vector at a time, and only those that the
device's policy allows. The script's prints stay on the device, unless the device tells errors in full.
What it saves ends with it.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from millpond.agent.audit.sessions import AuditSession
from millpond.agent.config import AgentConfig
from millpond.agent.policy import error_reports
from millpond.agent.policy.launch_rules import STRANGE, GroupGuard, shown_folders, sources
from millpond.agent.policy.shown_volume import showing
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded, ProtocolError, Refused
from millpond.base.text import printable
from millpond.fs.store.layout import PUBLIC
from millpond.launch.process import LaunchedScript
from millpond.linux import sockets
from millpond.linux.confinement.sandbox import Sandbox, python_binds, system_binds
from millpond.linux.logs import BoundedLog
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.group_messages import (
    Contribution,
    Gather,
    Gathered,
    GroupJoined,
    GroupPart,
    GroupRequest,
    JoinGroup,
    MeanOfStep,
    ReportedMetric,
    ReportMetric,
    SharedState,
    ShareState,
    VectorWanted,
    parts,
)
from millpond.train.distributed.launch_messages import AllSaved, Exited, Launch, Lines, Output, Taken
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Message

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Message)

SEND_SECONDS = 600.0
DEATH_SECONDS = 2.0
_DIED = "the first process of the script's sandbox died"
SCRIPT_SECONDS = 60.0
"""Time for a script's process to send what it has begun: meanwhile nobody sees that the host leaves."""
_ANSWERS: dict[type[Message], type[Message]] = {
    JoinGroup: GroupJoined,
    Gather: Gathered,
    ShareState: SharedState,
    Contribution: MeanOfStep,
    ReportMetric: ReportedMetric,
}
MOST_OUTPUT = 16 << 20


def run_confined(
    config: AgentConfig, zygote: Zygote, request: Launch, host: Channel, session: AuditSession
) -> None:
    """Run a script that the policy allows, until it ends or the host leaves; its exchanges are noted in
    ``session``. Raises RemoteError, OSError.
    """
    sandbox = _sandbox(config, request)
    output = None
    if config.privacy.errors != "full":
        output = BoundedLog(config.job_logs / f"{log_name(request.script)}.log")
    try:
        own = replace(request, worker=config.name)  # by which its samples are in the same groups as in jobs
        script = LaunchedScript(zygote, sandbox, own, "", output.writer if output else None)
    finally:
        if output:
            output.close_writer()
    try:
        _Relay(config, request, script, host, session).run()
    finally:
        script.stop()


def log_name(script: str) -> str:
    """Return the name of the log of a confined script, beside those of jobs."""
    return f"launch-{Path(script).name}"


def expect_exit(script: LaunchedScript, *, confined: bool = True) -> Exited:
    """Return how a script has ended, and what it had run out of; of one that is not ``confined`` also why it
    was not started. Raises Refused if the first process of its sandbox has died, too.
    """
    try:
        exited = script.channel.expect(Exited, NEVER)
    except ConnectionLost:
        shortage = script.shortage(DEATH_SECONDS)
        text = shortage.text or "; ".join(filter(None, (_DIED, script.hint)))
        raise Refused("", shortage.value or "worker", text) from None
    told = "" if confined else printable(exited.error)
    reason = told or script.shortage(code=exited.code).text or script.hint
    return Exited(exited.code, reason if exited.code else "")


class _Relay:
    """Passes one script's requests on to the host, and the answers back."""

    def __init__(
        self,
        config: AgentConfig,
        request: Launch,
        script: LaunchedScript,
        host: Channel,
        session: AuditSession,
    ) -> None:
        self._session, self._folders = session, " ".join(shown_folders(config.policy, request))
        self._script, self._group, self._host = script, script.requests, host
        self._code = sources(request.files)
        self._guard, self._rank = GroupGuard(config.policy, self._code), request.rank
        self._errors, self._error = config.privacy.errors, ""
        self._lines, self._left, self._untaken = Lines(), MOST_OUTPUT, False
        self._tells_begin = request.tells_begin

    def run(self) -> None:
        """Relay until the script has ended, and tell how. Raises RemoteError."""
        if self._tells_begin:
            self._script.begin(self._host, self._note_taken)
        ending, host, output = (
            self._script.channel.sock.fileno(),
            self._host.sock.fileno(),
            self._script.output,
        )
        watched = {host: self._note_taken, self._group.sock.fileno(): self._exchange}
        if output >= 0:
            watched[output] = self._show
        while True:
            held = {ending, output} if self._untaken else set()
            ready = set(sockets.readable([number for number in (ending, *watched) if number not in held]))
            if ready == {ending}:
                break
            for descriptor in ready - {ending}:  # what came before the end comes first
                if not watched[descriptor]():
                    del watched[descriptor]
        self._end()

    def _note_taken(self) -> bool:
        """Note that the host has taken the last output. Raises RemoteError, such as when it has left."""
        self._host.expect(Taken, NEVER)
        self._untaken = False
        return True

    def _expect(self, wanted: type[R]) -> R:
        """Wait for an answer of the host, for as long as the other workers take."""
        while True:
            head = self._host.receive(NEVER)
            if not isinstance(head.message, Taken):
                return self._host.checked(head, wanted)
            self._untaken = False

    def _show(self) -> bool:
        """Pass on output, where the device tells all, up to a limit; return whether there may be more."""
        data = self._script.read()
        lines = self._lines.take(data) if data else self._lines.end()
        self._left -= len(data)
        if lines and self._left > 0:
            self._host.send(Output(lines), Deadline.after(SEND_SECONDS))
            self._untaken = True
        return bool(data)

    def _end(self) -> None:
        exited = expect_exit(self._script)
        found = Exited(exited.code & 0xFF, exited.error or self._error)
        self._host.send(found, Deadline.after(SEND_SECONDS))
        if self._untaken:
            self._note_taken()
        self._host.send(AllSaved(0, 0, 0), Deadline.after(SEND_SECONDS))

    def _exchange(self) -> bool:
        """Pass on one request and its answer; return whether there may be more."""
        try:
            head = self._group.receive(Deadline.after(SCRIPT_SECONDS))
        except ConnectionLost:
            return False  # the script has ended, or will do no more exchanges
        except (ProtocolError, DeadlineExceeded):
            # the text of one has the script's own words, and the host can read the agent's log
            raise Refused("", "worker", STRANGE) from None
        if head.payload_size:
            raise Refused("", "worker", STRANGE)
        if isinstance(head.message, Failure):
            self._error = self._rebuilt(head.message)
            return False
        request = self._guard.checked(head.message)
        if isinstance(request, (Contribution, ReportMetric)):
            self._session.exchange({self._folders: request.samples} if request.samples else {})
        self._host.send(request, Deadline.after(SEND_SECONDS))
        if isinstance(request, Contribution) and request.samples:
            self._expect(VectorWanted)
            self._pass_vector(4 * request.size)
        self._answer(request)
        return True

    def _pass_vector(self, size: int) -> None:
        try:
            _pass_parts(self._group, self._host, size, SCRIPT_SECONDS)
        except ConnectionLost:
            raise Refused("", "worker", "the script ended in the middle of an exchange") from None
        except ProtocolError:
            raise Refused("", "worker", STRANGE) from None

    def _answer(self, request: GroupRequest) -> None:
        """Wait for the host's answer, for as long as the others take, and pass it on to the script."""
        answer = self._expect(_ANSWERS[type(request)])
        self._guard.check_answer(request, answer, self._rank)
        size = 0
        if isinstance(request, Contribution):
            size = 4 * request.size
        elif isinstance(request, ShareState):
            size = request.size
        with contextlib.suppress(ConnectionLost):  # if the script has died, its end is seen next
            self._group.send(answer, Deadline.after(SEND_SECONDS))
        _pass_parts(self._host, self._group, size, SEND_SECONDS, drop=True)

    def _rebuilt(self, failure: Failure) -> str:
        """Return the part of the script's report of an exception that may leave."""
        if self._errors == "full":
            return printable(failure.text)
        return error_reports.rebuilt(failure, (), self._code).text


def _pass_parts(source: Channel, target: Channel, size: int, seconds: float, *, drop: bool = False) -> None:
    """Pass ``size`` bytes on in parts, each checked for its length before it is received, and received in
    ``seconds``. If ``drop``, they are received even if the target has gone.
    """
    gone = False
    for start, stop in parts(size):
        source.expect(GroupPart, Deadline.after(seconds), stop - start)
        data = source.receive_payload(stop - start, Deadline.after(seconds))
        try:
            if not gone:
                target.send(GroupPart(start), Deadline.after(SEND_SECONDS), data)
        except ConnectionLost:
            if not drop:
                raise
            gone = True


def _sandbox(config: AgentConfig, request: Launch) -> Sandbox:
    """Return the script's sandbox."""
    own = Sandbox(
        binds=(*system_binds(), *python_binds()), own_network=True, own_pids=True, uid=config.users.worker
    )
    return showing_private(own, config, request)


def showing_private(sandbox: Sandbox, config: AgentConfig, request: Launch) -> Sandbox:
    """Return the sandbox of a script that sees the public part and the private folders that it may read.
    Raises Refused.
    """
    volume = Path(config.volume).resolve()
    folders = [volume / folder for folder in shown_folders(config.policy, request)]
    missing = [path for path in folders if not path.is_dir()]
    if missing and request.folders:
        raise Refused("", "data", f"missing data: there is no folder {missing[0].relative_to(volume)}")
    return showing(sandbox, volume, {path: path for path in (volume / PUBLIC, *folders)})
