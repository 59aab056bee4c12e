# SPDX-License-Identifier: Apache-2.0
"""Edge (the daemon's socket): what a browser with the token of ``--control`` does: stop, resume, prune."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl

from starlette.requests import Request

from millpond.base.errors import LocalError
from millpond.host.api.daemon import PrunedJob
from millpond.host.client.daemon_client import DaemonClient

LARGEST_FORM: Final = 4096
SECONDS_A_DAY: Final = 86400.0


async def form(request: Request) -> dict[str, str]:
    """Return the fields of a form that were filled in. Raises LocalError for a large one."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > LARGEST_FORM:
            raise LocalError("the form is too large")
    return {key: value for key, value in parse_qsl(data.decode(errors="replace")) if value.strip()}


def number(fields: Mapping[str, str], name: str, least: int) -> int | None:
    """Return a whole number of a form, None for an empty field. Raises LocalError for another text."""
    text = fields.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
        raise LocalError(f"{name.replace('_', ' ')}: give a whole number from {least} on")
    return int(text)


def stop(directory: Path, job: int) -> None:
    """Stop a job. Raises Refused."""
    with DaemonClient(directory) as client:
        client.stop(job)


def resume(directory: Path, job: int, fields: Mapping[str, str]) -> None:
    """Resume a job, up to the number of rounds that the form has. Raises Refused, LocalError."""
    with DaemonClient(directory) as client:
        client.resume(job, number(fields, "rounds", 1))


def prune(directory: Path, fields: Mapping[str, str]) -> tuple[PrunedJob, ...]:
    """Remove the folders of jobs as the form says, or if it is not confirmed tell which these would be.
    Raises Refused, LocalError.
    """
    days = number(fields, "older_than", 0)
    seconds = None if days is None else days * SECONDS_A_DAY
    with DaemonClient(directory) as client:
        return client.prune(number(fields, "keep", 0), seconds, dry_run="confirmed" not in fields)
