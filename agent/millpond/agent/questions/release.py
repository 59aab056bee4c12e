# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the sums of a question as they may leave: masked for a cohort, or as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millpond.agent.audit.sessions import AuditSession
from millpond.agent.cohort.member import DeviceMember
from millpond.agent.cohort.told_sums import ToldSums
from millpond.agent.config import AgentConfig
from millpond.agent.questions.counting import CountedSums
from millpond.agent.questions.noise import SumsNoise, largest_group
from millpond.aggregate.masking import keys
from millpond.aggregate.masking.messages import OpenCohort, Unmask
from millpond.aggregate.masking.stream import mask_add
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.train.questions.messages import Answer, AskDevice, Counted, GetAnswer
from millpond.train.questions.sums import Words
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Message

SEND_SECONDS = 60.0
MaskedWords = NDArray[np.uint64]


def release(
    config: AgentConfig,
    request: AskDevice,
    sums: CountedSums,
    noise: SumsNoise | None,
    host: Channel,
    session: AuditSession,
) -> None:
    """Let the sums leave as the host asks for them, until it closes the connection. Raises RemoteError."""
    leaving = QuestionMember(config, request, noise) if request.masked else _Plain(noise)
    counted = replace(leaving.counted(), group=largest_group(config.policy.least_samples))
    host.send(counted, Deadline.after(SEND_SECONDS))
    while True:
        try:
            head = host.receive(NEVER)
        except ConnectionLost:
            if host.closed_cleanly:
                return
            raise
        if head.payload_size:
            raise ProtocolError("the host sent a payload on a control connection")
        try:
            if isinstance(head.message, GetAnswer):
                words = leaving.told(sums.words)
                session.exchange(sums.samples)
                host.send(Answer(), Deadline.after(SEND_SECONDS), words.data.cast("B"))
                continue
            reply = leaving.answer(head.message)
            if reply is None:
                raise ProtocolError(f"'{head.message.NAME}' has no place after a question")
        except Refused as error:
            session.refuse()
            reply = Failure(error.code, error.text)
        host.send(reply, Deadline.after(SEND_SECONDS))


class _Plain:
    """Sums as they are. With noise they have one noise, however often they are asked for."""

    def __init__(self, noise: SumsNoise | None) -> None:
        self._noise = noise
        self._noisy: Words | None = None

    def counted(self) -> Counted:
        return Counted()

    def told(self, sums: Words) -> Words:
        if self._noisy is None:
            self._noisy = self._noise.added(sums, 1) if self._noise else sums
        return self._noisy

    def answer(self, _request: Message) -> Message | None:
        return None


class QuestionMember:
    """The device in the masked exchanges of one question. It helps to unmask one sum: two sums of different
    devices would tell the difference. All devices must have masked sums of the same question: else a host
    could ask all but one for sums that it knows. Those that share noise must have it for groups of one size:
    the shares of the others would be too small for the largest groups.
    """

    def __init__(self, config: AgentConfig, request: AskDevice, noise: SumsNoise | None = None) -> None:
        folders = [(folder.path, folder.public) for folder in request.folders]
        code = request.work, sorted(request.needed.items())
        noisy = request.rho, largest_group(config.policy.least_samples) if request.rho else 0
        self._what = keys.digest("question", repr((request.question, noisy, folders, code)))
        self._noise = noise
        policy = self._policy = config.policy
        self._has_unmasked = False
        private = any(not folder.public for folder in request.folders)
        self._told_sums = ToldSums(Path(config.state)) if policy.cohort and private else None
        self._member = DeviceMember(config)

    def counted(self) -> Counted:
        """Return what the host needs for a cohort."""
        policy = self._policy
        member = self._member
        return Counted((), member.public, member.certificate, bool(policy.cohort), policy.least_devices)

    def told(self, sums: Words) -> MaskedWords:
        """Return the sums with the masks of the present exchange, and with the device's share of the noise:
        each exchange is paid for, as a host may unmask what it says has failed. Raises Refused.
        """
        noisy = self._noise.added(sums, self._member.fewest) if self._noise else sums
        words = noisy.astype(np.int64).view(np.uint64)
        mask_add(words, self._member.masks(self._what))
        return words

    def answer(self, request: Message) -> Message | None:
        """Answer a request about the present exchange, None for another one. Raises Refused."""
        if isinstance(request, OpenCohort) and self._has_unmasked:
            raise Refused("", "policy", "policy.questions: a question is answered once")
        if not isinstance(request, Unmask):
            return self._member.answer(request)
        shares = self._member.unmask(request)
        if self._told_sums:
            self._told_sums.note(self._what, self._member.survivors)
        self._has_unmasked = True
        return shares
