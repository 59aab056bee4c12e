# SPDX-License-Identifier: Apache-2.0
"""Edge (tensorboardX): a job as a run for TensorBoard."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millpond.host.program.trackers.update import JobUpdate
from millpond.host.records.jobs import JobState

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

_SUFFIX: Final = ".millpond"


class TensorBoardTracker:
    """Writes a job into ``folder/NAME-NUMBER``: curves, events as text, hyperparameters, and the model's file
    beside them. A job that is tracked again replaces what this class wrote before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def track(self, update: JobUpdate) -> None:
        """Write a round, or the end of the job."""
        writer = self._writer = self._writer or self._begin(update)
        if result := update.round:
            for name, value in update.figures.items():
                writer.add_scalar(name, value, result.round)
            for event in result.events:
                text = f"{event.worker} {event.text}".strip()
                writer.add_text(f"events/{event.kind}", text, result.round, walltime=event.at)
            writer.flush()
            return
        self._end(writer, update)

    def _begin(self, update: JobUpdate) -> SummaryWriter:
        from tensorboardX import SummaryWriter  # takes long to load
        from tensorboardX.summary import hparams

        run = self._folder / update.name
        for old in run.glob(f"events.out.tfevents.*{_SUFFIX}"):
            old.unlink()
        writer = SummaryWriter(str(run), filename_suffix=_SUFFIX)
        scores = {name: 0.0 for name in update.figures if name.startswith(("host/", "devices/"))}
        first, start, _ = hparams(_plain(update.parameters), scores)
        writer.file_writer.add_summary(first)
        writer.file_writer.add_summary(start)
        return writer

    def _end(self, writer: SummaryWriter, update: JobUpdate) -> None:
        from tensorboardX.summary import hparams

        if update.job.state == JobState.DONE:
            writer.file_writer.add_summary(hparams({}, {})[2])
        elif update.job.error:
            writer.add_text("error", update.job.error, update.job.round)
        if update.model:
            shutil.copyfile(update.model, self._folder / update.name / update.model.name)
        writer.close()


def _plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return values that hyperparameters may have: numbers, truth values and texts."""
    return {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in parameters.items()
    }
