# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): the command 'data explain': what was chosen for a job's data, and how that went."""

from __future__ import annotations

from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, FormatOption, complete_jobs
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.records.data_costs import RECENT
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format


def explain(
    job: Annotated[
        int, typer.Argument(metavar="JOB", help="The job's number.", autocompletion=complete_jobs)
    ],
    last: Annotated[
        int, typer.Option("--last", min=0, help="Of how many rounds, the last ones; 0 for all.")
    ] = RECENT,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show what was chosen for a job's data, the waiting that this predicts, and what was measured.

    Each worker measures how long it reads, trains and waits. Predictions follow from the first two: for
    batches by the threads that read ahead, for mini-epochs by the model of two tiers, for streams by their
    tuner.
    """
    from millpond.host.records.data_explanation import explanation
    from millpond.host.terminal import data_table

    with DaemonClient(fleet_directory) as client:
        record = client.job(job)
    found = explanation(job, record.job, record.info.unit, record.rounds[-last:])
    if found is None:
        raise LocalError(f"job {job} has no {record.info.unit} yet in which the reading of data was measured")
    printing.show(output, found, lambda: data_table.show(found))
