# SPDX-License-Identifier: Apache-2.0
"""Edge: the resident job of a fleet, submitted once and found again, whoever of both ends died meanwhile."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from millpond.aggregate.kernels import Vector
from millpond.base.errors import ConfigError, MillpondError, Refused
from millpond.host.api.daemon import JobInfo
from millpond.host.api.outer import OrderKind, OuterAnswer, OuterModel
from millpond.host.client.outer_client import OuterClient
from millpond.host.records.jobs import ACTIVE, JobState
from millpond.train.job import file
from millpond.train.job.overrides import Settings

T = TypeVar("T")
StateOf = Callable[[OuterModel], Vector]
PATIENCE_SECONDS, RETRY_SECONDS = 600.0, 0.5


@dataclass(frozen=True, slots=True, eq=False)
class OuterOutcome:
    """The answer to an order with its ``values``, float32 [size], after so many ``seconds``; and the model,
    and the state that the order brought.
    """

    model: OuterModel
    state: Vector
    answer: OuterAnswer
    values: Vector
    seconds: float


@dataclass(frozen=True, slots=True)
class ResidentJob:
    """The resident job of ``path`` on the fleet in a directory: the newest of its name that is one.
    ``settings`` change keys of the file. A daemon that is away, and a job that has failed, are given
    ``patience`` seconds.
    """

    fleet: Path
    path: Path
    settings: Settings = ()
    patience: float = PATIENCE_SECONDS

    def model(self) -> tuple[OuterModel, Vector]:
        """Return the layout of the model and its state, float32 [size]. Raises MillpondError."""
        return self._tried(lambda client: client.outer_model(self._number(client)))

    def order(self, kind: OrderKind, key: str, state_of: StateOf) -> OuterOutcome:
        """Give an order from the state that ``state_of`` returns, again where the daemon or the job has died
        meanwhile. ``key`` is completed by the state. Raises MillpondError.
        """

        def once(client: OuterClient) -> OuterOutcome:
            number = self._number(client)
            model, _ = client.outer_model(number)
            state = state_of(model)
            began, own = time.monotonic(), f"{key}/{zlib.crc32(state.data):08x}"
            answer, values = client.outer_round(number, kind, own, state)
            return OuterOutcome(model, state, answer, values, time.monotonic() - began)

        return self._tried(once)

    def end(self, key: str, state_of: StateOf) -> int:
        """End the job, unless it has ended, with the state that ``state_of`` returns as its model. Returns
        its number, 0 without one. Raises MillpondError.
        """

        def once(client: OuterClient) -> int:
            found = self._newest(client)
            if found is None or found.state == JobState.DONE:
                return found.id if found else 0
            number = self._number(client)
            try:
                state = state_of(client.outer_model(number)[0])
                client.outer_round(number, "end", key, state)
            except Refused:
                if client.job_info(number).state != JobState.DONE:
                    raise
            return number

        return self._tried(once)

    def _tried(self, call: Callable[[OuterClient], T]) -> T:
        """Return what ``call`` returns. It is called again while the daemon is away, and when its job has
        ended in the middle of it, by ``patience`` at most.
        """
        deadline = time.monotonic() + self.patience
        while True:
            try:
                with OuterClient(self.fleet) as client:
                    return call(client)
            except ConfigError:
                raise
            except MillpondError as error:
                lasting = isinstance(error, Refused) and error.code != "ended"
                if lasting or time.monotonic() > deadline:
                    raise
            time.sleep(RETRY_SECONDS)

    def _number(self, client: OuterClient) -> int:
        """Return the number of the job, which is submitted or resumed unless it runs. Raises Refused."""
        found = self._newest(client)
        if found is None or found.state == JobState.DONE:
            job, files = file.read(self.path, self.settings)
            if job.outer is None:
                raise ConfigError(f"{self.path}: it has no table [outer], so the job would not be resident")
            return client.submit(job, files)
        if found.state == JobState.STOPPED:
            told = f"job {found.id} ({found.name}) was stopped: 'millpond resume {found.id}' goes on"
            raise Refused("", "state", told)
        if found.state not in ACTIVE:
            client.resume(found.id)
        return found.id

    def _newest(self, client: OuterClient) -> JobInfo | None:
        """Return the newest resident job of the file's name. Raises ConfigError."""
        name = file.read(self.path, self.settings)[0].name
        for each in reversed(client.jobs()):
            if each.name == name and each.pruned is None and client.job(each.id, rounds=False).job.outer:
                return each
        return None
