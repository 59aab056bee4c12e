# SPDX-License-Identifier: Apache-2.0
"""Pure: the ``[policy]`` table of ``agent.toml``."""

from __future__ import annotations

import base64
import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from millpond.aggregate.masking.messages import LASTING_BYTES, LEAST_COHORT
from millpond.base.errors import ConfigError
from millpond.base.keys import Key, check_keys
from millpond.privacy.accounting import rho_of

_KEY = re.compile(r"(sk-)?(ssh|ecdsa)-[a-z0-9@.-]+ [A-Za-z0-9+/]+=*( [^\n]*)?")
"""A public key's line."""
BY_OWNERS = ("owners",)
"""The value of ``policy.cohort`` for a roster that owners have signed."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The privacy budget of each private folder over all jobs: together they are (epsilon, delta)-private for
    each ``unit``.
    """

    epsilon: Annotated[float, Key("what all answers together may tell of a unit", above=0)]
    delta: Annotated[float, Key("probability with which they may tell more", above=0, most=0.1)] = 1e-5
    unit: Annotated[
        Literal["device", "group"],
        Key('what is protected: all samples of the "device", or each "group" of least_samples'),
    ] = "device"

    @property
    def rho(self) -> float:
        """The most that a folder may cost, see ``privacy.accounting``."""
        return rho_of(self.epsilon, self.delta)


@dataclass(frozen=True, slots=True)
class Policy:
    """The jobs in which the device takes part, and the answers that it gives them."""

    least_samples: Annotated[
        int,
        Key("samples of a group; each answer covers whole groups of a private folder; 1: single samples", 1),
    ] = 8
    answers_per_state: Annotated[
        int, Key("most answers about a private folder at one state of a model; 0: any number", 0)
    ] = 256
    folders: Annotated[
        tuple[str, ...],
        Key('private folders that jobs may read, such as "private/digits"; empty: any that a job names'),
    ] = ()
    code: Annotated[
        Literal["any", "listed", "signed"],
        Key("jobs that the device takes: all, those with code in `listed`, or signed by a key of `owners`"),
    ] = "any"
    listed: Annotated[
        tuple[str, ...], Key("digests of code with its arguments, as `millpond sign` prints them")
    ] = ()
    owners: Annotated[
        tuple[str, ...], Key("public keys of those who may sign code, as OpenSSH writes them")
    ] = ()
    largest_model: Annotated[int, Key("most float32 values of a model", 1, math.inf)] = 1 << 30
    largest_files: Annotated[
        int, Key("most bytes of a job's files together, and of its unpacked wheels", 0, math.inf)
    ] = 4 << 30
    largest_state: Annotated[
        int, Key("most bytes that one job keeps on the device between exchanges", 0, math.inf)
    ] = 1 << 30
    plain_lan: Annotated[
        bool, Key("updates may go to other devices of a job by UDP, authenticated and not encrypted")
    ] = False
    cohort: Annotated[
        tuple[str, ...],
        Key(
            'devices with whose updates the own may be added, each as "NAME KEY", see its cohort.pub, or '
            '["owners"]: those of the newest roster that a key of `owners` has signed (`millpond roster`); '
            "private folders are then for jobs with federated.secure alone"
        ),
    ] = ()
    least_devices: Annotated[
        int,
        Key(
            "fewest devices of a sum that a job with federated.secure, or a masked question, may tell",
            LEAST_COHORT,
        ),
    ] = 3
    questions: Annotated[
        Literal["none", "masked", "plain"],
        Key(
            "questions about private folders that are answered (`millpond ask`): none, those whose answers "
            "leave masked, or also those that tell the device's own sums"
        ),
    ] = "masked"

    budget: Annotated[
        Budget | None,
        Key(
            "the privacy budget of each private folder over all jobs, { epsilon = 8, delta = 1e-5 }; the "
            "folders are then for jobs with [privacy] alone, until it is spent"
        ),
    ] = None

    @property
    def keeps_nothing(self) -> bool:
        """Whether jobs keep no state on the device: a later one could tell of it without noise or masks."""
        return bool(self.budget or self.cohort)

    @property
    def by_owners(self) -> bool:
        """Whether the cohort is that of a roster which owners have signed."""
        return self.cohort == BY_OWNERS

    @property
    def pinned(self) -> dict[str, bytes]:
        """The keys of the devices in ``cohort`` by name, none for a signed roster. Raises ValueError for what
        is none.
        """
        found = dict[str, bytes]()
        if self.by_owners:
            return found
        for line in self.cohort:
            name, key = line.split()
            found[name] = base64.b64decode(key, validate=True)
            if len(found[name]) != LASTING_BYTES:
                raise ValueError(line)
        return found


def check_policy(policy: Policy, where: str) -> None:
    """Raise ConfigError, naming ``where``, for values that make no sense."""
    for key in policy.owners:
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{where}: owners: '{key[:40]}' is no public key, such as 'ssh-ed25519 AAAA...'"
            )
    if policy.code == "signed" and not policy.owners:
        raise ConfigError(f"{where}: code: 'signed' needs keys in owners")
    if policy.budget:
        check_keys(policy.budget, f"{where}: budget")
        if policy.budget.unit == "group" and policy.code == "any":
            told = 'the worker clips groups, unseen by the agent: take known code alone, code = "signed"'
            raise ConfigError(f"{where}: budget: unit: {told}")
    _check_cohort(policy, where)
    for folder in policy.folders:
        if not folder.startswith("private/") or ".." in folder.split("/"):
            raise ConfigError(f"{where}: folders: '{folder}' is not a folder in private/")


def _check_cohort(policy: Policy, where: str) -> None:
    try:
        pinned = policy.pinned
    except ValueError:
        raise ConfigError(
            f"{where}: cohort: each is a name and the key of that device's cohort.pub, or it is ['owners']"
        ) from None
    if policy.by_owners and not policy.owners:
        raise ConfigError(f"{where}: cohort: 'owners' needs keys in owners, which sign the roster")
    if pinned and len(pinned) < policy.least_devices:
        raise ConfigError(f"{where}: cohort: it has fewer than least_devices, {policy.least_devices}")
