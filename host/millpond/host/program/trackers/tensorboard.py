# SPDX-License-Identifier: Apache-2.0
"""Edge (TensorBoard): a job as a run for TensorBoard, by its own writer, which does not load torch."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millpond.host.api.daemon import JobInfo
from millpond.host.program.trackers.update import JobUpdate
from millpond.host.records.jobs import JobEvent, JobState

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

_SUFFIX: Final = ".millpond"


class TensorBoardTracker:
    """Writes a job into ``folder/NAME-NUMBER``: curves, events as text, hyperparameters, and the model's file
    beside them. A job that is tracked again replaces what this class wrote before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: EventFileWriter | None = None

    def track(self, update: JobUpdate) -> None:
        """Write a round, or the end of the job."""
        writer = self._writer = self._writer or self._begin(update)
        if result := update.round:
            _add(writer, _scalars(update.figures), result.round)
            for event in result.events:
                _add(writer, _text(event), result.round, event.at)
            writer.flush()
            return
        _add(writer, _end(update.job))
        if update.model:
            shutil.copyfile(update.model, self._folder / update.name / update.model.name)
        writer.close()

    def _begin(self, update: JobUpdate) -> EventFileWriter:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        run = self._folder / update.name
        for old in run.glob(f"events.out.tfevents.*{_SUFFIX}"):
            old.unlink()
        writer = EventFileWriter(str(run), filename_suffix=_SUFFIX)
        for each in _hyperparameters(update):
            _add(writer, each)
        return writer


def _add(writer: EventFileWriter, found: Summary, step: int = 0, at: float = 0.0) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    writer.add_event(Event(wall_time=at or time.time(), step=step, summary=found))


def _scalars(figures: dict[str, float]) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in figures.items()])


def _text(event: JobEvent) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    text = make_tensor_proto([f"{event.worker} {event.text}".strip().encode()])
    tag = f"events/{event.kind}"
    return Summary(value=[Summary.Value(tag=tag, metadata=create_summary_metadata(tag, ""), tensor=text)])


def _hyperparameters(update: JobUpdate) -> Iterator[Summary]:
    """Yield the keys of the job file, and the names of the scores that TensorBoard shows beside them."""
    from tensorboard.plugins.hparams import summary_v2

    given: dict[str, Any] = {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in update.parameters.items()
    }
    scores = [name for name in update.figures if name.startswith(("host/", "devices/"))]
    yield summary_v2.hparams_config_pb(
        [summary_v2.HParam(key) for key in given], [summary_v2.Metric(name) for name in scores]
    )
    yield summary_v2.hparams_pb(given, trial_id=update.name, start_time_secs=update.job.created)


def _end(job: JobInfo) -> Summary:
    """Return the end of the run; TensorBoard's own function for it needs TensorFlow."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    status = api_pb2.STATUS_SUCCESS if job.state == JobState.DONE else api_pb2.STATUS_FAILURE
    found = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=job.ended))
    about = metadata.create_summary_metadata(found)
    tag, tensor = metadata.SESSION_END_INFO_TAG, metadata.NULL_TENSOR
    return Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=tensor)])
