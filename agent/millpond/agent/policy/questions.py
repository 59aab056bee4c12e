# SPDX-License-Identifier: Apache-2.0
"""Pure: the policy of a device about questions: which it answers, and about how many samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from millpond.agent.policy.rules import check_code, check_folder, check_shared_noise, refused
from millpond.agent.policy.settings import Policy
from millpond.base.errors import Refused
from millpond.train.protocol import Folder
from millpond.train.questions.messages import MODEL, AskDevice
from millpond.train.questions.question import SCORING

_HEAD = 1 << 20
"""The most bytes of a model's file besides its values."""


def check_question(policy: Policy, device: str, request: AskDevice) -> None:
    """Raise Refused for a question that the policy forbids, whoever has signed its code."""
    _check_model(policy, request)
    if not 0 <= request.rho < math.inf:
        raise Refused("", "data", f"noise of {request.rho}")
    if len({folder.path for folder in request.folders}) != len(request.folders) or not request.folders:
        raise Refused("", "data", "a question is about folders, each named once")
    for folder in request.folders:
        check_folder(policy, device, folder)
        if folder.streamed:
            raise Refused("", "data", f"'{folder.path}' is of another device")
    if all(folder.public for folder in request.folders):
        return
    _check_budget(policy, request)
    if policy.questions == "none":
        raise refused("questions", "the device answers no questions about private folders")
    if not request.masked and (policy.cohort or policy.questions != "plain"):
        rule = "cohort" if policy.cohort else "questions"
        raise refused(rule, "private folders are for masked questions alone (--secure)")


def _check_budget(policy: Policy, request: AskDevice) -> None:
    """Raise Refused for a question that the privacy budget of private folders does not cover."""
    if policy.budget and not request.rho:
        raise refused("budget", "private folders have a privacy budget: questions need noise (--epsilon)")
    if policy.budget and policy.budget.unit == "device":
        told = 'it is for the device, and noise of questions protects groups of samples (unit = "group")'
        raise refused("budget", told)
    check_shared_noise(policy, request.masked)


def _check_model(policy: Policy, request: AskDevice) -> None:
    """Raise Refused for a question whose model, or its code, the device does not take."""
    is_about_model = request.question.kind in SCORING
    if not is_about_model == (request.work is not None) == (request.model is not None):
        raise Refused("", "model", "a model comes with the questions about one, and no other")
    if MODEL in request.files or (request.files and request.work is None):
        raise Refused("", "model", "a question has files that are not of its model")
    if request.work:
        check_code(policy, request.work, request.files)
        if request.rho and policy.code == "any":
            raise refused("code", "unknown code counts what it wants: noise is for listed or signed code")
        if request.model and request.model.size > 4 * policy.largest_model + _HEAD:
            raise refused("largest_model", f"a model's file of {request.model.size} bytes")


def check_counted(policy: Policy, folders: Sequence[Folder], samples: Mapping[str, int]) -> None:
    """Raise Refused for a question about a private folder of too few ``samples``."""
    for folder in folders:
        least = policy.least_samples
        if not folder.public and samples[folder.path] < least:  # how many is the device's own answer
            text = f"'{folder.path}' has too few samples; an answer covers {least} or more"
            raise refused("least_samples", text)
