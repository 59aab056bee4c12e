# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'ask': questions about the samples of all devices, answered by sums."""

from __future__ import annotations

from typing import Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.api.questions import COUNT_SECONDS, MOST_COUNT_SECONDS
from millpond.host.cli.options import DEFAULT_FLEET, DevicesOption, FleetOption, FormatOption, new_app
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.records.questions import AnsweredQuestion
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import waiting
from millpond.train.questions.question import (
    MOST_BINS,
    MOST_LABELS,
    MOST_ROUNDS,
    AskedKind,
    DataQuestion,
    Kind,
)

app = new_app()
_INCOMPLETE = 1
_KINDS = "What to ask for: count, mean, histogram, quantiles, confusion or auc."
_COLUMN = "A column of a table; of labelled images 'label', or 'image' for the mean of its pixels."
_BINS = "Bins of a histogram, or of the scores of an auc."
_CLASSES = "Texts that count as 0, 1, ...; also the folders of classes."
_ROUNDS = "Histograms by which quantiles are found, each within bins of the one before."
_SECURE = "Mask devices' answers, or have each tell its own sums."
_DEADLINE = "Leave out a device that needs longer to count."
DeadlineOption = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.001, max=MOST_COUNT_SECONDS, help=_DEADLINE)
]
BinsOption = Annotated[int, typer.Option(metavar="N", min=1, max=MOST_BINS, help=_BINS)]
RoundsOption = Annotated[int, typer.Option(metavar="N", min=1, max=MOST_ROUNDS, help=_ROUNDS)]
LabelsOption = Annotated[
    int, typer.Option(metavar="N", min=2, max=MOST_LABELS, help="Labels of a confusion, from 0 on.")
]
PositiveOption = Annotated[
    int, typer.Option(metavar="LABEL", min=0, max=MOST_LABELS, help="The label that an auc is about.")
]


@app.command()
def ask(
    kind: Annotated[AskedKind, typer.Argument(metavar="KIND", help=_KINDS)],
    folders: Annotated[
        list[str], typer.Argument(metavar="FOLDER...", help="Folders of each device, such as private/digits.")
    ],
    column: Annotated[str, typer.Option(metavar="NAME", help=_COLUMN)] = "",
    bounds: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="LOW HIGH", help="The range of values of a column."),
    ] = None,
    bins: BinsOption = 10,
    shares: Annotated[
        str, typer.Option(metavar="SHARE,...", help="The quantiles to ask for: shares of the values.")
    ] = "0.25,0.5,0.75",
    rounds: RoundsOption = 4,
    classes: Annotated[str, typer.Option(metavar="A,B,...", help=_CLASSES)] = "",
    job: Annotated[
        int, typer.Option(metavar="JOB", help="The job whose model a confusion or an auc is about.")
    ] = 0,
    best: Annotated[bool, typer.Option("--best", help="Its model of the best score.")] = False,
    labels: LabelsOption = 2,
    positive: PositiveOption = 1,
    secure: Annotated[bool, typer.Option("--secure/--plain", help=_SECURE)] = True,
    epsilon: Annotated[
        float, typer.Option(metavar="E", min=0.0, help="Have noise added: the answer is (E, D)-private.")
    ] = 0.0,
    delta: Annotated[float, typer.Option(metavar="D", help="The delta of that.")] = 1e-5,
    deadline: DeadlineOption = COUNT_SECONDS,
    devices: DevicesOption = "",
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> int:
    """Ask devices about their samples, for sums alone.

    The answer is a sum over all devices, and no sample leaves one. Devices mask their answers for each other,
    so that the host learns the sum alone. What a device answers is its own policy.questions. Values beyond
    the bounds are clipped, or counted apart in a histogram. Exit code 1 also says that a device is left out.
    """
    from millpond.host.program.questions import AskedDevices  # loads numpy

    if bounds is None and kind in ("mean", "histogram", "quantiles"):
        raise LocalError(f"--bounds: {kind} of values need their range, which is not taken from the data")
    device_kind: Kind = "histogram" if kind == "quantiles" else kind
    names, (low, high) = tuple(filter(None, classes.split(","))), bounds or (0.0, 1.0)
    question = DataQuestion(device_kind, column, low, high, bins, names, labels=labels, positive=positive)
    with (
        DaemonClient(fleet_directory) as client,
        waiting("ask", "devices answer", shows=output is Format.TEXT) as tell,
    ):
        asked = AskedDevices(client, tuple(folders), devices, secure, job, best, epsilon, delta, deadline)
        if kind == "quantiles":
            found = asked.ask_quantiles(question, _shares(shares), rounds, tell)
        else:
            found = asked.ask(question)

    printing.show(output, found, lambda: _table(found))
    return _INCOMPLETE if found.left_out else 0


def _table(found: AnsweredQuestion) -> object:
    from millpond.host.terminal import answer_table  # loads rich

    return answer_table.show(found)


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise LocalError(f"--shares: '{text}' are no numbers, such as 0.25,0.5,0.75") from None
