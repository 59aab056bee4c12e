# SPDX-License-Identifier: Apache-2.0
"""Edge (ssh-keygen): the device's policy about confined launches: scripts, folders, each exchange."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from millpond.agent.policy.batch_structure import is_word
from millpond.agent.policy.rules import PRIVATE, check_folder, refused
from millpond.agent.policy.settings import Policy
from millpond.agent.policy.signatures import check_digest
from millpond.base.errors import Refused
from millpond.train.distributed.group_messages import (
    LONGEST_NAME,
    MOST_COUNT,
    MOST_GROUPS,
    MOST_SAMPLES,
    Contribution,
    Gather,
    Gathered,
    GroupJoined,
    GroupRequest,
    JoinGroup,
    ReportMetric,
    ShareState,
)
from millpond.train.distributed.launch_messages import (
    Launch,
    check_files,
    check_transforms_file,
    script_digest,
)
from millpond.train.protocol import Folder
from millpond.wire.messages import Message

STRANGE = "the script's process sent what is no exchange"
_MOST_GATHERS = 4096
"""The most numbers that one launch may give away by themselves: sizes of models and folders."""
_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{LONGEST_NAME - 1}}}")


def check_launch(policy: Policy, device: str, request: Launch) -> str:
    """Return the fingerprint of the owner's key that signed a launch that may read private folders, "" where
    the policy asks for none. Raises Refused for one that it forbids.
    """
    more = request.variables or request.inputs or request.shares or request.elastic or request.processes != 1
    if more and (request.confined or policy.code != "any"):
        raise refused("code", "a private launch is its script and files alone, which owners sign")
    for folder in request.folders:
        check_folder(policy, device, Folder(folder, device))
    return _check_code(policy, request)


def check_transforms(policy: Policy, request: Launch) -> str:
    """Return the fingerprint of the owner's key that signed transforms, "" where the policy asks for none.
    Raises Refused for transforms that the policy forbids, ConfigError for those that the launch has not.
    """
    check_files(request.script, request.files, installed=bool(request.module))
    check_transforms_file(request.transforms, request.files)
    return _check_code(policy, request)


def code_digest(request: Launch) -> str:
    """Return the digest of a launch's code, which owners list or sign."""
    return script_digest(request.script, request.files, request.arguments, request.module, request.transforms)


def _check_code(policy: Policy, request: Launch) -> str:
    digest = code_digest(request)
    if policy.code == "listed" and digest not in policy.listed:
        raise refused("code", f"the script is not listed; its digest is {digest}")
    return check_digest(policy.owners, digest, request.signature) if policy.code == "signed" else ""


def shown_folders(policy: Policy, request: Launch) -> tuple[str, ...]:
    """Return the private folders that the script sees: those it names, or all that the policy allows."""
    return request.folders or policy.folders or (PRIVATE,)


def sources(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the texts of a script's Python files, whose words may leave the device."""
    return {name: data.decode(errors="replace") for name, data in files.items() if name.endswith(".py")}


class GroupGuard:
    """Checks the requests of one confined script, whose ``code`` names its metrics. Each covers the policy's
    least samples or none: a worker without samples gives no vector.
    """

    def __init__(self, policy: Policy, code: Mapping[str, str]) -> None:
        self._policy, self._words = policy, "\n".join(code.values())
        self._gathers = 0

    def checked(self, request: Message) -> GroupRequest:
        """Return the request as it may leave. Raises Refused, also for what is no request."""
        if isinstance(request, JoinGroup):
            return JoinGroup(self._policy.least_samples)
        if isinstance(request, Gather):
            self._check_number(request.value)
        elif isinstance(request, ShareState):
            self._check_size(request.size / 8)
            self._check_number(request.size)
        elif isinstance(request, Contribution):
            self._check_contribution(request)
        elif isinstance(request, ReportMetric):
            self._check_metric(request)
        else:
            raise Refused("", "worker", STRANGE)
        return request

    @staticmethod
    def check_answer(request: GroupRequest, answer: Message, rank: int) -> None:
        """Raise Refused if the host tells a script of worker ``rank`` other samples, or another least number
        of them, than this device has told: by these the script makes groups.
        """
        own, told = None, tuple[int, ...]()
        if isinstance(request, JoinGroup) and isinstance(answer, GroupJoined):
            own, told = request.least, answer.least
        elif isinstance(request, Gather) and isinstance(answer, Gathered):
            own, told = request.value, answer.values
        if own is not None and dict(enumerate(told)).get(rank) != own:
            raise Refused("", "policy", "the host tells the script of other groups than this device has")

    def _check_number(self, number: int) -> None:
        self._gathers += 1
        if not 0 <= number < 1 << 53 or self._gathers > _MOST_GATHERS:
            raise Refused("", "policy", "a script gives away too many numbers, or one that is no count")

    def _check_contribution(self, request: Contribution) -> None:
        self._check_size(request.size)
        self._check_samples(request.samples)
        numbers = (request.seconds, request.largest)
        if not 0 <= request.group < MOST_GROUPS or not all(
            math.isfinite(each) and each >= 0 for each in numbers
        ):
            raise Refused("", "model", "the sums of a step are not finite")
        if request.largest and not request.samples:
            raise Refused("", "model", "a step of no samples has sums")
        if not 0 <= request.divisor <= MOST_COUNT * request.samples:
            raise Refused("", "model", f"a step of {request.samples} samples counts {request.divisor}")

    def _check_metric(self, request: ReportMetric) -> None:
        self._check_samples(request.samples)
        if not _NAME.fullmatch(request.name) or not is_word(request.name, self._words):
            raise Refused("", "policy", "a metric's name must be an identifier in the script's files")
        if not math.isfinite(request.total) or (request.total and not request.samples):
            raise Refused("", "model", f"the metric '{request.name}' is not finite, or of no samples")

    def _check_size(self, size: float) -> None:
        if size < 0 or size > self._policy.largest_model:
            text = f"a model of {size:.0f} values; at most {self._policy.largest_model} are allowed"
            raise refused("largest_model", text)

    def _check_samples(self, samples: int) -> None:
        least = self._policy.least_samples
        if samples and not least <= samples <= MOST_SAMPLES:
            raise refused("least_samples", f"an exchange of {samples} samples; it must cover {least} or more")
