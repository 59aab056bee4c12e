# SPDX-License-Identifier: Apache-2.0
"""Edge (imports the product): the files and folders of a host and of a device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from documents.markdown import code, page, prose, summary, table
from millpond.agent.cohort import cohort_key, cohort_roster, opened_sessions, told_sums
from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.policy import budget_ledger
from millpond.base.keys import keys_of
from millpond.host.cli import exits
from millpond.host.fleet.directory import Fleet, FleetConfig
from millpond.host.jobs import job_folder

FLEET = Path("/FLEET")
STATE = {
    cohort_key.FILE: "The device's lasting key in masked sums.",
    cohort_key.PUBLIC: "The line by which other devices pin it, in `policy.cohort`.",
    cohort_roster.FILE: 'The newest roster that an owner has signed, if `policy.cohort` is `["owners"]`.',
    opened_sessions.FILE: f"Masked exchanges that were opened; removed only with `{cohort_key.FILE}`.",
    told_sums.FILE: "Of which devices the device has helped to unmask a sum, at each state.",
    budget_ledger.FILE: "What is spent of the privacy budgets of private folders.",
}
"""What the files of privacy in the agent's state are."""


def files_page() -> str:
    """Return the page of the files on disk."""
    return page(
        "Files on disk",
        "## The fleet's directory on the host",
        prose(exits.FLEET_DIRECTORY),
        table(
            ("path", "what it is"),
            [("`fleet.toml`", "The [configuration](fleet.toml.md) of the fleet."), *fleet()],
        ),
        "## A job's folder",
        "The folder is `jobs/JOB` in the fleet's directory.",
        table(("file", "what it is"), [(code(name), about) for name, about in job_folder.FILES.items()]),
        "## A device",
        "The paths are the defaults of [agent.toml](agent.toml.md).",
        table(("path", "what it is"), device()),
    )


def fleet() -> Iterator[tuple[str, str]]:
    """Yield the paths of a fleet, relative to its directory, and what its class says of them."""
    found = Fleet(FLEET, FleetConfig("fleet"))
    for name, member in vars(Fleet).items():
        if isinstance(member, property) and isinstance(path := getattr(found, name), Path):
            yield code(str(path.relative_to(FLEET))), summary(member.__doc__)
        elif inspect.isfunction(member) and member.__annotations__.get("return") == "Path":
            path = getattr(found, name)(_placeholder(member))
            about = summary(member.__doc__).removeprefix("Return ")
            yield code(str(path.relative_to(FLEET))), about[:1].upper() + about[1:]


def _placeholder(method: object) -> str:
    (name,) = [each for each in inspect.signature(method).parameters if each != "self"]  # type: ignore[arg-type]
    return {"name": "DEVICE", "job": "JOB"}.get(name, name.upper())


def device() -> Iterator[tuple[str, str]]:
    """Yield the paths of an agent's configuration, and what each key says of them."""
    config, known = AgentConfig("csd0", LinkConfig("10.77.0.2/30")), keys_of(AgentConfig)
    for field in fields(AgentConfig):
        value = getattr(config, field.name)
        if isinstance(value, str) and value.startswith("/"):
            yield code(value), known[field.name].about
    for name, about in STATE.items():
        yield code(f"{config.state}/{name}"), about
    yield code(str(config.job_logs)), summary(AgentConfig.job_logs.__doc__)
