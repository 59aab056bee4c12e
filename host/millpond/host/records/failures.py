# SPDX-License-Identifier: Apache-2.0
"""Pure: the reasons for losing a worker and for the failure of a job, as users read them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterable

from millpond.base.errors import Refused
from millpond.train.update_bounds import NOT_FINITE, not_finite

OUT_OF_MEMORY, MACHINE_MEMORY = "memory", "machine-memory"
"""The codes of a refusal by a worker that has run out of memory: it has reached its own limit, so that the
same work would end it again, or the memory of its machine ran out.
"""
FOR_GOOD = ("data", "model", "policy", "processes", OUT_OF_MEMORY)
"""The codes of refusals that no other try with the same settings can mend."""
HIDDEN = "stays on the device"
"""The text for an error whose own text stays in the job's log on its device."""


def reason_of(error: Exception, worker: str) -> str:
    """Return the text of an error of a worker, whose name is told before it, without that name."""
    text = error.text if isinstance(error, Refused) else str(error)
    return text.removeprefix(f"{worker}: ")


def listed(reasons: Iterable[tuple[str, str]]) -> str:
    """List workers with their reasons: "csd0: no folder; csd1, csd2: not ready"."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(found)}: {reason}" for reason, found in names.items())


def too_few(needed: int) -> str:
    """Return the failure of a job of which not ``needed`` devices take part."""
    return "no device takes part" if needed == 1 else f"fewer than {needed} devices take part"


def diverged(value: float, unit: str, number: int, workers: Iterable[str]) -> str:
    """Return the failure of a job whose model has a ``value`` that is not finite after the last ``unit``, a
    step or round, with updates of ``workers``.
    """
    return (
        f"the model has diverged: its state is {not_finite(value)} after {unit} {number}, to which "
        f"{', '.join(sorted(workers))} contributed; try a lower learning rate"
    )


def advised(failure: str, job: int, devices: Collection[str]) -> str:
    """Return the failure of a job with what a user can do about it, if that is known."""
    if "update refused: " in failure and NOT_FINITE in failure:
        failure += (
            "; values have left the range of numbers: try a lower learning rate, or look at the samples"
        )
    if "out of memory: that of the whole machine" in failure:
        failure += "; end other programs there, or bound jobs by memory of [limits] in agent.toml"
    elif "out of memory" in failure:
        failure += (
            "; try a smaller batch or model, or fewer workers; memory of [limits] in agent.toml bounds a job"
        )
    if "more processes and threads" in failure:
        failure += "; try fewer workers of a DataLoader; processes of [limits] in agent.toml bounds a job"
    if os.strerror(errno.EACCES) in failure:
        failure += "; it is closed to the user of the worker: 'chmod -R a+rX' on the device opens it"
    if HIDDEN in failure:
        before = failure.partition(HIDDEN)[0]
        named = re.findall(r"(?<![\w-])([a-z0-9-]+): ", before)
        device = next((name for name in reversed(named) if name in devices), "DEVICE")
        failure += f"; 'millpond logs --device {device} {job}' shows the job's log there"
    return failure
