# SPDX-License-Identifier: Apache-2.0
"""Pure: the policy of a device: which jobs it takes part in, and which of their requests it answers.

The agent enforces it outside the worker's process, where the job's own code runs. Every refusal names its
rule as ``agent.toml`` has it.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

from millpond.agent.policy_settings import Policy
from millpond.base.errors import Refused
from millpond.train.balance.ranges import Ranges, count
from millpond.train.protocol import Folder, PrepareWorker, Work
from millpond.train.state import layout

PUBLIC, PRIVATE = "public", "private"  # the two parts of every volume, see fs.store.layout
_MOST_SYNTHETIC = 1 << 16
"""The most made-up samples of a request; the host profiles no larger batches."""
_STATES = 1024
"""The number of last states whose answers are counted."""


def refused(rule: str, text: str) -> Refused:
    """Return the error of a request that a rule forbids."""
    return Refused("", "policy", f"policy.{rule}: {text}")


def digest(factory: str, code: dict[str, str]) -> str:
    """Return the SHA-256 of a job's factory and files, in hexadecimal, as ``policy.listed`` has it. The
    factory counts: Python itself has callables that run what their arguments say.
    """
    return hashlib.sha256(json.dumps([factory, sorted(code.items())]).encode()).hexdigest()


def check_job(policy: Policy, device: str, request: PrepareWorker) -> None:
    """Raise Refused for a job that the policy forbids."""
    for folder in request.folders:
        _check_folder(policy, device, folder)
    if len({folder.path for folder in request.folders}) < len(request.folders):
        raise Refused("", "data", "a data folder is named twice")  # each has its own positions
    if any(length < 0 for tensor in request.tensors for length in tensor.shape):
        raise Refused("", "model", "a tensor of the model has a negative length")
    if (size := layout.size(request.tensors)) > policy.largest_model:
        raise refused(
            "largest_model", f"a model of {size} values; at most {policy.largest_model} are allowed"
        )
    if size < 1:
        raise Refused("", "model", "the model has no values")
    found = digest(request.work.model.factory, request.code) if policy.code == "listed" else ""
    if found and found not in policy.listed:
        raise refused("code", f"the job's code is not listed; its digest is {found}")


def _check_folder(policy: Policy, device: str, folder: Folder) -> None:
    path = PurePosixPath(folder.path)
    part = path.parts[0] if path.parts else ""
    if path.is_absolute() or ".." in path.parts or part not in (PRIVATE, PUBLIC):
        raise Refused("", "data", f"the data folder '{folder.path}' is not in {PRIVATE} or {PUBLIC}")
    if folder.public != (part == PUBLIC) or folder.source != device:
        raise Refused("", "data", f"the data folder '{folder.path}' is not what the request says it is")
    if str(path) != folder.path:  # one folder has one name, by which its answers are counted
        raise Refused("", "data", f"the data folder '{folder.path}' must be written '{path}'")
    if part == PRIVATE and policy.folders and not any(path.is_relative_to(f) for f in policy.folders):
        raise refused("folders", f"jobs may not read '{folder.path}'")


class StateAnswers:
    """Counts the answers that have covered private samples of a folder at a state, over all jobs."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: OrderedDict[tuple[str, int], int] = OrderedDict()

    def check(self, folders: Sequence[str], checksum: int) -> None:
        """Raise Refused if there were too many answers about one of ``folders`` at the state."""
        for folder in folders:
            found = self._answers.get((folder, checksum), 0)
            if self._most and found >= self._most:
                text = f"policy.answers_per_state: '{folder}' has given {found} answers at one state"
                raise Refused("", "state", text)  # the next state will do

    def count(self, folders: Sequence[str], checksum: int) -> None:
        """Count an answer about ``folders``."""
        for folder in folders:
            found = self._answers.pop((folder, checksum), 0)
            self._answers[folder, checksum] = found + 1
        while len(self._answers) > _STATES:
            self._answers.popitem(last=False)


class ExchangeGuard:
    """The requests of one prepared worker, which has ``parts`` samples by folder: an answer covers no private
    sample or enough of them, and in an epoch no private sample twice. The same request may be repeated, and
    is counted again.
    """

    def __init__(
        self, policy: Policy, answers: StateAnswers, folders: Sequence[Folder], parts: Sequence[int]
    ) -> None:
        if len(folders) != len(parts):
            raise Refused("", "data", f"the worker has samples of {len(parts)} folders, not {len(folders)}")
        self._policy, self._answers, self._folders, self._parts = policy, answers, folders, tuple(parts)
        least = policy.least_samples
        for folder, samples in zip(folders, parts, strict=True):
            if not folder.public and samples < least:
                text = f"'{folder.path}' has {samples} samples; an answer covers {least} or more"
                raise refused("least_samples", text)
        self._epoch = -1
        self._answered: list[list[tuple[int, int]]] = []  # positions of the epoch, by folder
        self._asked: _Asked | None = None
        self._last: _Asked | None = None

    def check(self, request: Work, state: memoryview) -> None:
        """Raise Refused for a request that must not be answered."""
        self._asked = None
        if request.synthetic:
            if not 0 < request.synthetic <= _MOST_SYNTHETIC:
                raise Refused("", "data", f"{request.synthetic} made-up samples are wanted")
            return
        if len(request.ranges) != len(self._folders):
            raise Refused("", "data", f"samples of {len(request.ranges)} folders are wanted")
        pairs = zip(self._folders, request.ranges, strict=True)
        private = tuple(folder.path for folder, ranges in pairs if ranges and not folder.public)
        asked = _Asked(
            private, request.epoch, request.seed, request.ranges, zlib.crc32(state) if private else 0
        )
        if asked != self._last:
            self._check_epoch(request)
        self._answers.check(private, asked.checksum)
        self._asked = asked

    def _check_epoch(self, request: Work) -> None:
        if request.epoch < self._epoch:
            raise refused("least_samples", f"epoch {request.epoch} is wanted after epoch {self._epoch}")
        if request.epoch > self._epoch:
            self._epoch, self._answered = request.epoch, [[] for _ in self._folders]
        for number, (folder, ranges) in enumerate(zip(self._folders, request.ranges, strict=True)):
            if ranges and not folder.public:
                self._check_ranges(folder, ranges, number)

    def _check_ranges(self, folder: Folder, ranges: Ranges, number: int) -> None:
        for start, stop in ranges:
            if not 0 <= start < stop <= self._parts[number]:
                text = f"samples {start} to {stop} are wanted; there are {self._parts[number]}"
                raise Refused("", "data", text)
        least, wanted = self._policy.least_samples, count(ranges)
        if wanted < least:
            text = f"{wanted} samples of '{folder.path}' are wanted; an answer covers {least} or more"
            raise refused("least_samples", text)
        used = sorted([*self._answered[number], *ranges])
        for (_, stop), (start, _) in pairwise(used):
            if start < stop:
                text = f"a sample of '{folder.path}' is wanted twice in epoch {self._epoch}"
                raise refused("least_samples", text)

    def answered(self) -> None:
        """Note that values of the last request's update are about to leave."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        self._answers.count(asked.private, asked.checksum)
        if asked == self._last:
            return
        self._last = asked
        for number, ranges in enumerate(asked.ranges):
            self._answered[number] = _merged([*self._answered[number], *ranges])


@dataclass(frozen=True, slots=True)
class _Asked:
    private: tuple[str, ...]
    epoch: int
    seed: int
    ranges: tuple[Ranges, ...]
    checksum: int


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found
