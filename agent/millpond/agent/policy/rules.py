# SPDX-License-Identifier: Apache-2.0
"""Pure: the policy of a device: which jobs it takes part in, and which of their requests it answers.

The agent enforces it outside the worker's process, where the job's own code runs. Every refusal names its
rule as ``agent.toml`` has it.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from millpond.agent.policy.settings import Budget, Policy
from millpond.aggregate.encoding.layout import PLAIN
from millpond.base.errors import Refused
from millpond.privacy.spec import PrivacySpec
from millpond.train.balance.ranges import Ranges
from millpond.train.job.files import JobFile, total_size
from millpond.train.job.signed_code import digest
from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import FIRST_VALUES, Folder, PrepareWorker, Work
from millpond.train.state import layout

PUBLIC, PRIVATE = "public", "private"  # the two parts of every volume, see fs.store.layout
_MOST_SYNTHETIC = 1 << 16
"""The most made-up samples of a request; the host profiles no larger batches."""
_STATES = 2048
"""The number of last states, and samples of states, whose answers are counted."""
_LEAST_CLIP = 1e-12
"""The least clip of updates with noise. A worker computes norms in float32, which has no squares of values
below 1e-22: by a smaller clip, and a learning rate, a host would have groups whose norm is 0 unclipped.
"""
_BLOCKS, _BLOCK = 64, 4096
"""Blocks of a sample of a state, and their bytes."""


def refused(rule: str, text: str) -> Refused:
    """Return the error of a request that a rule forbids."""
    return Refused("", "policy", f"policy.{rule}: {text}")


def check_job(policy: Policy, device: str, request: PrepareWorker) -> None:
    """Raise Refused for a job that the policy forbids, whoever has signed it."""
    for folder in request.folders:
        check_folder(policy, device, folder)
    check_streams(request)
    check_masks(policy, request)
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
    initial = request.work.model.initial
    if initial and str(PurePosixPath(str(initial))) not in request.files:  # which owners list or sign
        raise Refused("", "model", f"the first values '{initial}' are not among the job's files")
    if FIRST_VALUES in request.files:  # in the place of which the host's file would lie
        text = f"the job's file '{FIRST_VALUES}' has a name that is the host's: rename it"
        raise Refused("", "model", text)
    check_code(policy, request.work, request.files)


def check_code(policy: Policy, work: WorkSpec, files: Mapping[str, JobFile]) -> None:
    """Raise Refused for the code of a job that the policy forbids, whoever has signed it."""
    if (size := total_size(files)) > policy.largest_files:
        raise refused("largest_files", f"files of {size} bytes; at most {policy.largest_files} are allowed")
    found = digest(work, files) if policy.code == "listed" else ""
    if found and found not in policy.listed:
        raise refused("code", f"the job's code is not listed; its digest is {found}")


def check_folder(policy: Policy, device: str, folder: Folder) -> None:
    """Raise Refused for a folder that is none of the device's, or that the policy forbids."""
    path = PurePosixPath(folder.path)
    part = path.parts[0] if path.parts else ""
    if path.is_absolute() or ".." in path.parts or part not in (PRIVATE, PUBLIC):
        raise Refused("", "data", f"the data folder '{folder.path}' is not in {PRIVATE} or {PUBLIC}")
    elsewhere = folder.source != device
    if folder.public != (part == PUBLIC) or elsewhere != folder.streamed or (elsewhere and not folder.public):
        raise Refused("", "data", f"the data folder '{folder.path}' is not what the request says it is")
    if str(path) != folder.path:  # one folder has one name, by which its answers are counted
        raise Refused("", "data", f"the data folder '{folder.path}' must be written '{path}'")
    if part == PRIVATE and any(name.startswith(".") for name in path.parts[1:2]):  # logs, and what jobs keep
        raise Refused("", "data", f"'{folder.path}' is no folder of samples: its name begins with a dot")
    if part == PRIVATE and policy.folders and not any(path.is_relative_to(f) for f in policy.folders):
        raise refused("folders", f"jobs may not read '{folder.path}'")


def check_streams(request: PrepareWorker) -> None:
    """Raise Refused for streams to a worker that can read private data: whatever it asks another device for
    could tell of them.
    """
    if not any(folder.streamed for folder in request.folders):
        return
    if not all(folder.public for folder in request.folders):
        raise Refused("", "data", "a worker with private samples gets no stream")
    if request.streams is None or len(request.folders) > 1:
        raise Refused("", "data", "a worker with a stream has its one folder, and a place that serves it")
    if request.work.local_layers or request.work.local.personal:
        raise Refused("", "data", "a worker with a stream keeps nothing on its device")


def check_masks(policy: Policy, request: PrepareWorker) -> None:
    """Raise Refused for a job whose answers tell more than the sum of a cohort, if that is all that the
    device tells, and for one that says so and does not.
    """
    work, is_private = request.work, any(not folder.public for folder in request.folders)
    if policy.cohort and is_private and not work.secure:
        raise refused("cohort", "private folders are for jobs with federated.secure alone")
    if policy.budget and is_private:
        _check_budget(policy.budget, work)
        check_shared_noise(policy, bool(work.secure))
    if policy.keeps_nothing and (work.local_layers or work.local.alpha):
        rule = "budget" if policy.budget else "cohort"
        raise refused(rule, "jobs keep no state here: no federated.local, and no personal models")
    if not (work.secure or work.privacy):
        return
    key = "secure" if work.secure else "privacy"
    if not work.passes or work.held_out or work.encoding.name != PLAIN or work.local.normalized:
        text = f"{key}: a job with masks or noise has rounds, means, and no scores of devices"
        raise Refused("", "model", text)
    if layout.parameters_end(request.tensors) < layout.size(request.tensors):
        text = f"{key}: the model exchanges buffers, which no clip bounds: keep them by federated.local"
        raise Refused("", "model", text)
    if len({folder.public for folder in request.folders}) > 1:  # updates of what the host knows say nothing
        raise Refused("", "data", f"{key}: a worker with private folders gets no public ones")
    if work.privacy:
        _check_noise(work, work.privacy)


def check_shared_noise(policy: Policy, masked: bool) -> None:
    """Raise Refused if devices that the policy does not name would share the noise that the budget pays for:
    a host that makes them up gets a share for the price of all.
    """
    if masked and policy.budget and not policy.cohort:
        told = "devices share the noise of a masked sum: pin them by policy.cohort, or leave the masks out"
        raise refused("budget", told)


def _check_budget(budget: Budget, work: WorkSpec) -> None:
    if not work.privacy:
        raise refused("budget", "private folders have a privacy budget: they are for jobs with [privacy]")
    if budget.unit != work.privacy.unit:
        text = f'it is for unit = "{budget.unit}", and the job has noise for unit = "{work.privacy.unit}"'
        raise refused("budget", text)


def _check_noise(work: WorkSpec, privacy: PrivacySpec) -> None:
    """Raise Refused for a job whose noise does not cover its updates, whatever its host has checked."""
    if not (work.clip >= _LEAST_CLIP and work.total) or work.repeat.name:
        raise Refused("", "model", "privacy: noise needs a clip and rounds, and no rule repeats mini-epochs")
    if privacy.unit == "group" and (work.mini_epoch or work.local_layers or work.local.personal):
        text = 'unit = "group" trains on each group alone: no mini_epoch, federated.local and personal models'
        raise Refused("", "model", f"privacy: {text}")


class StateAnswers:
    """Counts the answers that cover private samples of a folder at a state, over all jobs: at most ``most``,
    0 for any number.

    A checksum of a large state takes longer than the other work of an exchange. So the first half of the
    answers are counted by a sample of the state, and only the others by the whole: states whose samples
    differ are others, and those whose samples are alike share that half.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: OrderedDict[tuple[str, bool, int], int] = OrderedDict()

    def count(self, folders: Sequence[str], state: memoryview) -> None:
        """Count an answer about ``folders``. Raises Refused, and counts none, if there were too many about
        one of them at the state.
        """
        if not self._most:
            return
        half, sample, whole = self._most // 2, _sample(state), None
        keys = []
        for folder in folders:
            key = folder, False, sample
            if self._answers.get(key, 0) >= half:
                whole = zlib.crc32(state) if whole is None else whole
                key = folder, True, whole
                if self._answers.get(key, 0) >= self._most - half:
                    text = f"policy.answers_per_state: '{folder}' has given {self._most} answers at one state"
                    raise Refused("", "state", text)  # the next state will do
            keys.append(key)
        for key in keys:
            self._answers[key] = self._answers.pop(key, 0) + 1
        while len(self._answers) > _STATES:
            self._answers.popitem(last=False)


def _sample(state: memoryview) -> int:
    """Return a checksum of some blocks of a state."""
    found = 0
    for start in range(0, len(state), max(_BLOCK, len(state) // _BLOCKS)):
        found = zlib.crc32(state[start : start + _BLOCK], found)
    return found


class ExchangeGuard:
    """The requests of one prepared worker, which has ``parts`` samples by folder, and holds out ``held``
    besides. The private samples of a folder are in groups of ``least_samples``, see ``data_plan.order``, and
    an answer covers whole groups: what many answers tell together, in whatever epochs and jobs, are sums
    over groups. With ``whole`` it covers all samples: a masked sum would be one device's update if the others
    were asked for few, and two sums would differ by some samples of one device. ``charge`` spends what a
    round costs: of each private folder, as the worker reads them all, whichever samples it is asked for.
    """

    def __init__(
        self,
        policy: Policy,
        answers: StateAnswers,
        folders: Sequence[Folder],
        parts: Sequence[int],
        held: Sequence[int],
        charge: Callable[[Sequence[str]], None] = lambda _folders: None,
        *,
        whole: bool = False,
    ) -> None:
        if not len(folders) == len(parts) == len(held):
            raise Refused("", "data", f"the worker has samples of {len(parts)} folders, not {len(folders)}")
        self._group, self._answers, self._folders, self._parts = policy.least_samples, answers, folders, parts
        self._held, self._charge, self._whole = held, charge, whole
        for folder, samples, out in zip(folders, parts, held, strict=True):
            if out < 0 or out % self._group:
                raise Refused("", "data", f"{out} samples of '{folder.path}' are held out, no whole groups")
            if not folder.public and samples < self._group:
                text = f"'{folder.path}' has {samples} samples; an answer covers {self._group} or more"
                raise refused("least_samples", text)

    def check(self, request: Work, state: memoryview) -> None:
        """Count an answer to ``request``, with its head alone or with its values. Raises Refused for a
        request that must not be answered.
        """
        if request.held_out:
            private = [f.path for f, out in zip(self._folders, self._held, strict=True) if out]
            self._answers.count(private, state)
            return
        if request.synthetic:
            if not 0 < request.synthetic <= _MOST_SYNTHETIC:
                raise Refused("", "data", f"{request.synthetic} made-up samples are wanted")
            return
        if len(request.ranges) != len(self._folders):
            raise Refused("", "data", f"samples of {len(request.ranges)} folders are wanted")
        if self._whole and request.ranges != tuple(((0, samples),) for samples in self._parts):
            raise Refused("", "data", "secure: a masked update is of all samples of the worker's folders")
        wanted = []
        for folder, samples, ranges in zip(self._folders, self._parts, request.ranges, strict=True):
            if ranges and not folder.public:
                self._check_ranges(folder, samples, ranges)
                wanted.append(folder.path)
        if wanted:
            self._answers.count(wanted, state)
        if private := [folder.path for folder in self._folders if not folder.public]:
            self._charge(private)

    def _check_ranges(self, folder: Folder, samples: int, ranges: Ranges) -> None:
        group, before = self._group, 0
        last = (samples // group - 1) * group
        for start, stop in sorted(ranges):
            if not 0 <= start < stop <= samples:
                raise Refused("", "data", f"samples {start} to {stop} are wanted; there are {samples}")
            if start < before:
                text = f"sample {start} of '{folder.path}' is wanted twice"
                raise refused("least_samples", text)
            if start % group or start > last or (stop != samples and (stop % group or stop > last)):
                text = f"samples {start} to {stop} of '{folder.path}' are no whole groups of {group}"
                raise refused("least_samples", text)
            before = stop
