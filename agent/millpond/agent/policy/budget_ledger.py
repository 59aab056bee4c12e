# SPDX-License-Identifier: Apache-2.0
"""Edge (a file): what has been spent of the privacy budgets of the device's private folders, over all jobs.

An answer is paid before it leaves: its cost is on the flash, durably, before ``spend`` returns. The file
holds sums alone, and no time, so that neither a restart nor a clock that is set back gives anything back.
Costs are in zCDP, see ``privacy.accounting``: another budget in ``agent.toml`` counts what was spent before,
too.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from millpond.base.errors import Refused
from millpond.linux.files import write_secret

FILE = "privacy-budget.json"
MOST_RUNS = 256
"""Jobs of which the ledger knows the cost, so that they can go on."""
_ALL = 1 - 1e-8
"""The share from which on a budget is spent: costs that add up to it are rounded."""
ROUNDING: Final = 1 + 1e-9
"""Parts of a cost may add up to a little more than the whole."""
_VERSION = 1


class BudgetLedger:
    """The ledger in ``file``, which the first cost makes. One that cannot be read counts as all spent: to
    begin anew is for the owner, who removes it.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()
        self._spent, self._runs, self._fault = dict[str, float](), dict[str, float](), ""
        try:
            self._spent, self._runs = _read(file.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not what the agent has written"
            self._fault = f"{file} cannot be read: {reason}"

    def spent(self, folder: str) -> float:
        """Return the most that any sample of a private folder has cost: answers about the folder, about those
        in it and about those that it lies in.
        """
        with self._lock:
            return self._of(folder)

    def shares(self, most: float) -> dict[str, float]:
        """Return the share of ``most`` that is spent by each folder that answers were about, 1 at most."""
        with self._lock:
            return {folder: min(1.0, self._of(folder) / most) for folder in self._spent}

    def _of(self, folder: str) -> float:
        if self._fault:
            return math.inf
        path = PurePosixPath(folder)
        related = (
            rho
            for name, rho in self._spent.items()
            if path.is_relative_to(name) or PurePosixPath(name).is_relative_to(path)
        )
        return math.fsum(related)

    def check(self, folders: Sequence[str], rho: float, most: float) -> None:
        """Raise Refused unless each folder has ``rho`` left of ``most``."""
        with self._lock:
            self._check(folders, rho, most)

    def _check(self, folders: Sequence[str], rho: float, most: float) -> None:
        if not 0 <= rho < math.inf:
            raise ValueError(f"a cost of {rho}")
        for folder in folders:
            if self._fault:
                raise Refused("", "policy", f"policy.budget: {self._fault}")
            spent = self._of(folder)
            if spent >= most * _ALL:
                raise Refused("", "policy", f"policy.budget: the privacy budget of '{folder}' is spent")
            if spent + rho > most:
                text = (
                    f"'{folder}' has {1 - spent / most:.1%} of its privacy budget left, less than this costs"
                )
                raise Refused("", "policy", f"policy.budget: {text}")

    def spent_by(self, run: str) -> float:
        """Return what the answers of a job's ``run`` have cost, 0 if it is none of the last MOST_RUNS."""
        with self._lock:
            return self._runs.get(run, 0.0)

    def spend(
        self, folders: Sequence[str], rho: float, most: float, run: str = "", whole: float = math.inf
    ) -> None:
        """Spend ``rho`` of each folder for an answer of a job's ``run``, if it is of one, and return when
        that is on the flash. Raises Refused, and nothing may be told then, if less is left of ``most``, if
        the run would have cost more than ``whole``, or if the ledger cannot be written.
        """
        with self._lock:
            if self._runs.get(run, 0.0) + rho > whole:
                text = "the job has spent its epsilon: rounds that were repeated have cost, too"
                raise Refused("", "policy", f"privacy: {text}")
            self._check(folders, rho, most)
            spent = dict(self._spent)
            for folder in set(folders):
                spent[folder] = math.nextafter(spent.get(folder, 0.0) + rho, math.inf)
            if run:
                self._runs[run] = self._runs.pop(run, 0.0) + rho
                self._runs = dict(list(self._runs.items())[-MOST_RUNS:])
            data = json.dumps({"version": _VERSION, "spent": spent, "runs": self._runs}).encode()
            try:
                write_secret(self._file, data)
            except OSError as error:
                text = f"{self._file} cannot be written: {error.strerror}"
                raise Refused("", "device", f"policy.budget: {text}") from None
            finally:
                self._spent = spent  # it may have reached the flash all the same


def _read(data: bytes) -> tuple[dict[str, float], dict[str, float]]:
    """Return the costs by folder and by run. Raises ValueError."""
    found = json.loads(data)
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise ValueError("version")
    return _costs(found.get("spent")), _costs(found.get("runs"))


def _costs(found: object) -> dict[str, float]:
    if not isinstance(found, dict):
        raise ValueError("no table")
    if not all(isinstance(rho, float) and 0 <= rho < math.inf for rho in found.values()):
        raise ValueError("no costs")
    return found
