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
from typing import Literal

from millpond.base.errors import ConfigError, Refused
from millpond.train.balance.data_plan import Ranges, count
from millpond.train.protocol import Folder, PrepareWorker, Work
from millpond.train.state import layout

PUBLIC, PRIVATE = "public", "private"  # the two parts of every volume, see fs.store.layout
_STATES = 1024
"""The number of last states whose answers are counted."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The jobs that the device takes part in, and what it answers them.

    An answer covers ``least_samples`` private samples or none; 1 shows single samples. At one state of a
    model there are ``answers_per_state`` answers about a private folder, 0 for any number. ``folders`` are
    the private folders that jobs may read, such as "private/digits"; none means all, each job its own.
    ``code`` "listed" takes jobs whose code has a SHA-256 in ``listed``. ``largest_model`` is a number of
    float32 values.
    """

    least_samples: int = 8
    answers_per_state: int = 16
    folders: tuple[str, ...] = ()
    code: Literal["any", "listed"] = "any"
    listed: tuple[str, ...] = ()
    largest_model: int = 1 << 30


def check_policy(policy: Policy, where: str) -> None:
    """Raise ConfigError, naming ``where``, for values that make no sense."""
    if policy.least_samples < 1:
        raise ConfigError(f"{where}: least_samples must be 1 or more")
    if policy.answers_per_state < 0 or policy.largest_model < 1:
        raise ConfigError(f"{where}: answers_per_state and largest_model must not be negative or none")
    for folder in policy.folders:
        if not folder.startswith("private/") or ".." in folder.split("/"):
            raise ConfigError(f"{where}: folders: '{folder}' is not a folder in private/")


def refused(rule: str, text: str) -> Refused:
    """Return the error of a request that a rule forbids."""
    return Refused("", "policy", f"policy.{rule}: {text}")


def digest(code: dict[str, str]) -> str:
    """Return the SHA-256 of a job's files, in hexadecimal, as ``policy.listed`` has it."""
    return hashlib.sha256(json.dumps(sorted(code.items()), ensure_ascii=False).encode()).hexdigest()


def check_job(policy: Policy, device: str, request: PrepareWorker) -> None:
    """Raise Refused for a job that the policy forbids."""
    for folder in request.folders:
        _check_folder(policy, device, folder)
    if (size := layout.size(request.tensors)) > policy.largest_model:
        raise refused(
            "largest_model", f"a model of {size} values; at most {policy.largest_model} are allowed"
        )
    if policy.code == "listed" and (found := digest(request.code)) not in policy.listed:
        raise refused("code", f"the job's code is not listed; its digest is {found}")


def _check_folder(policy: Policy, device: str, folder: Folder) -> None:
    path = PurePosixPath(folder.path)
    part = path.parts[0] if path.parts else ""
    if path.is_absolute() or ".." in path.parts or part not in (PRIVATE, PUBLIC):
        raise Refused("", "data", f"the data folder '{folder.path}' is not in {PRIVATE} or {PUBLIC}")
    if folder.public != (part == PUBLIC) or folder.source != device:
        raise Refused("", "data", f"the data folder '{folder.path}' is not what the request says it is")
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
    sample or enough of them, and in an epoch no private sample twice. The same request may be repeated.
    """

    def __init__(
        self, policy: Policy, answers: StateAnswers, folders: Sequence[Folder], parts: Sequence[int]
    ) -> None:
        if len(folders) != len(parts):
            raise Refused("", "data", f"the worker has samples of {len(parts)} folders, not {len(folders)}")
        self._policy, self._answers, self._folders = policy, answers, folders
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
                self._check_ranges(folder, ranges, self._answered[number])

    def _check_ranges(self, folder: Folder, ranges: Ranges, answered: list[tuple[int, int]]) -> None:
        least, wanted = self._policy.least_samples, count(ranges)
        if wanted < least:
            text = f"{wanted} samples of '{folder.path}' are wanted; an answer covers {least} or more"
            raise refused("least_samples", text)
        used = sorted([*answered, *ranges])
        for (_, stop), (start, _) in pairwise(used):
            if start < stop:
                text = f"a sample of '{folder.path}' is wanted twice in epoch {self._epoch}"
                raise refused("least_samples", text)

    def answered(self) -> None:
        """Note that values of the last request's update are about to leave."""
        asked, self._asked = self._asked, None
        if asked is None or asked == self._last:
            return
        self._last = asked
        self._answers.count(asked.private, asked.checksum)
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
