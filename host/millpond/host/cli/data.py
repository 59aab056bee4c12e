# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands 'data convert', a published data set as folders for devices, 'data check', a folder as
a worker would see it, and 'data explain', what was chosen for a job's data, and how that went.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer

from millpond.base.errors import LocalError, MillpondError
from millpond.base.text import counted
from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, FormatOption, JobArgument, new_app
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.records.data_costs import RECENT
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import view, waiting
from millpond.train import error_texts
from millpond.train.job import file
from millpond.train.job.spec import DataSpec, Job, ModelSpec, WorkSpec
from millpond.train.task import structure
from millpond.train.task.structure import GUESSED_IMAGES

app, data = (
    new_app(),
    new_app(help="Prepare data, and look at it before and in training.", no_args_is_help=True),
)
app.add_typer(data, name="data")
_FEW = 2
"""Samples of the batch that is shown."""


@dataclass(frozen=True, slots=True)
class DataSummary:
    """``batch`` has the shapes and types of a batch's parts, of which the first dimension is the samples, by
    their place in it; ``classes`` the numbers of samples by label, and name where labels have names.
    """

    folder: str
    format: str
    samples: int
    batch: dict[str, str]
    classes: dict[str, int]


@dataclass(frozen=True, slots=True)
class PrivateSummary:
    """A private folder as its device tells of it: numbers of samples to train on and held out, the first in
    groups of ``group``; a batch as in ``DataSummary``; the ``classes`` of the job, which has all of its own.
    """

    folder: str
    samples: int
    held_out: int
    group: int
    batch: dict[str, str]
    classes: tuple[str, ...]


@data.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A tar file of CIFAR, or a folder of IDX files or classes."),
    ],
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="The new folder.")],
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="Shares of the training samples.")] = 1,
    output: FormatOption = Format.TEXT,
) -> None:
    """Divide a published data set of images among devices.

    It is CIFAR-10, CIFAR-100, MNIST or folders of ImageNet; the shares have formats that jobs read.
    Nothing is fetched: if SOURCE is missing, the command says where it comes from. Training samples become
    the folders share-0, share-1, ... of FOLDER, others the folder test. Of CIFAR it takes the binary version.
    """
    from millpond.train.data import conversion  # loads numpy

    with view(terminal=sys.stdout.isatty(), shows=output is Format.TEXT) as shown:
        found = conversion.convert(source, target, devices, shown.begin)
    lines = [f"{target / name}: {count} samples" for name, count in found.items()]
    printing.show(output, {"samples": found}, "\n".join(lines))


@data.command()
def check(
    folder: Annotated[
        str,
        typer.Argument(metavar="FOLDER", help="A folder of this machine, or of a device: csd0:private/x."),
    ],
    task: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help="Read the folder with the task of this file.")
    ] = "",
    job: Annotated[
        Path | None, typer.Option(metavar="JOB.toml", help="Read the folder as the workers of this job do.")
    ] = None,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show a folder as a worker would see it.

    The command shows format, samples, a batch and labels.
    For a folder that a worker would refuse, the command prints one line, with exit code 2. A task's own code
    runs on this machine, as this user. A private folder is read on its device, by a job without rounds. Then
    the command shows what a job learns: the number of samples, the parts of a batch, and the shape of images.
    """
    if task and job:
        raise LocalError("--task and --job are two ways to read the folder: give one of them")
    how = _of_job(job) if job else _of_task(task) if task else _GUESSED
    try:
        with waiting("data check", f"reads {folder}", shows=output is Format.TEXT) as tell:
            found = _look(folder, how, fleet_directory, tell)
    except MillpondError as error:
        if not error_texts.NO_IMAGES.is_in(str(error)):
            raise
        raise LocalError(f"{error}; for other data say how it is read, with --task or --job") from None
    text = lines(found) if isinstance(found, DataSummary) else private_lines(found)
    printing.show(output, found, "\n".join(text))


@dataclass(frozen=True, slots=True)
class _Reading:
    """How a folder is read: the job, its files by name, and the folder where they lie."""

    job: Job
    code: Mapping[str, Path]
    folder: Path


_GUESSED = _Reading(Job("data-check", DataSpec("private"), task=ModelSpec(GUESSED_IMAGES)), {}, Path())


def _look(
    folder: str, how: _Reading, fleet: Path, tell: Callable[[str], None]
) -> DataSummary | PrivateSummary:
    device, path = _place_of(folder)
    if device:
        if path.parts[0] == "public":
            return _public(fleet, device, path, how)
        return _private(fleet, device, path, how, tell)
    if not Path(folder).is_dir():
        raise LocalError(f"missing data: there is no folder {folder}")
    return summarize(Path(folder), how.job.work, how.folder.resolve())


def _place_of(folder: str) -> tuple[str, PurePosixPath]:
    """Return the device and the path of a folder, "" as the device of one of this machine. Raises
    LocalError.
    """
    device, colon, text = folder.partition(":")
    if not colon or "/" in device or Path(folder).exists():
        return "", PurePosixPath(folder)
    path = PurePosixPath(text)
    if path.parts[:1] not in (("public",), ("private",)) or ".." in path.parts:
        raise LocalError(f"{folder}: a device has its data in public and private: {device}:private/FOLDER")
    return device, path


def _of_job(path: Path) -> _Reading:
    job, code = file.read(path)
    return _Reading(job, code, path.parent)


def _of_task(text: str) -> _Reading:
    path, _, name = text.partition(":")
    source = Path(path)
    if not source.is_file():
        raise LocalError(f"--task: there is no file {path}")
    factory = f"{source.stem}:{name}" if name else source.stem
    code = ModelSpec(factory, files=(source.name,))
    return _Reading(Job("data-check", DataSpec("private"), task=code), {source.name: source}, source.parent)


def _public(fleet: Path, device: str, path: PurePosixPath, how: _Reading) -> DataSummary:
    """Read a device's public folder here: the host may have all of it."""
    from millpond.host.remote import device_data

    with device_data.mounted(fleet, device) as volume:
        if not (volume / path).is_dir():
            raise LocalError(f"missing data: there is no folder {device}:{path}")
        try:
            found = summarize(volume / path, how.job.work, how.folder.resolve())
        except LocalError as error:
            raise LocalError(str(error).replace(f"{volume}/", f"{device}:")) from None
        return replace(found, folder=f"{device}:{path}")


def _private(
    fleet: Path, device: str, path: PurePosixPath, how: _Reading, tell: Callable[[str], None]
) -> PrivateSummary:
    from millpond.host.remote import device_data

    job = device_data.looking_at(how.job, device, str(path))
    ready = device_data.prepare(fleet, job, how.code, lambda text: print(text, file=sys.stderr), tell)
    batch = {part.place: str(part) for part in ready.batch}
    named = job.data.classes if job.data.format == "images" else ()
    return PrivateSummary(f"{device}:{path}", ready.samples, ready.held, ready.group, batch, named)


def summarize(folder: Path, work: WorkSpec, code_dir: Path) -> DataSummary:
    """Load a folder as a worker does, with the files in ``code_dir``. Raises LocalError for what a worker
    would refuse.
    """
    try:
        from millpond.train.worker import error_reports, roles
    except ImportError as error:
        raise LocalError(f"data is read with torch: pip install torch ({error})") from None
    assert roles  # with it torch is there
    try:
        return _summarize(folder, work, code_dir)
    except LocalError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        told = error_reports.failure(error, code_dir, work.model.factory, full=True)
        raise LocalError(f"{folder}: {told.text}") from None


def _summarize(folder: Path, work: WorkSpec, code_dir: Path) -> DataSummary:
    import numpy as np

    from millpond.train.data.labelled_images import LabelledImages
    from millpond.train.task.guessed_images import format_of
    from millpond.train.worker import user_code

    task, model = user_code.build(work, code_dir)
    part = task.dataset(Path(), str(folder), "train")
    if not len(part):
        raise LocalError(f"missing data: {folder} holds no samples")
    task.check([part], model)
    batch = structure.parts_of(task.fetch([(part, np.arange(min(_FEW, len(part))))]))
    kind, classes = type(part).__name__, {}
    if isinstance(part, LabelledImages):
        kind = format_of(folder) if work.model.factory == GUESSED_IMAGES else work.format
        classes = _classes(part.labels, folder, kind, work.classes)
    return DataSummary(str(folder), kind, len(part), {each.place: str(each) for each in batch}, classes)


def _classes(labels: Any, folder: Path, format_: str, classes: Sequence[str]) -> dict[str, int]:
    import numpy as np

    names = (classes or file.class_names(folder)) if format_ == "images" else ()
    counts = np.bincount(labels, minlength=len(names)).tolist()
    return {f"{label} {names[label]}" if names else str(label): count for label, count in enumerate(counts)}


def lines(found: DataSummary) -> list[str]:
    """Return it as text."""
    out = [f"{found.folder}: {counted(found.samples, 'sample')}, {found.format}"]
    out += [f"  {place}: {shape}" for place, shape in found.batch.items()]
    if found.classes:
        most = max(found.classes.values())
        width = max(map(len, found.classes))
        out.append("  samples by label:")
        out += [
            f"    {label:<{width}}  {count:>8}  {'#' * round(40 * count / most)}".rstrip()
            for label, count in found.classes.items()
        ]
    return out


def private_lines(found: PrivateSummary) -> list[str]:
    """Return it as text."""
    held = f", {found.held_out} held out" if found.held_out else ""
    groups = f" in groups of {found.group}" if found.group > 1 else ""
    out = [f"{found.folder}: {counted(found.samples, 'sample')}{groups}{held}"]
    out += [f"  {place}: {shape}" for place, shape in found.batch.items()]
    if found.classes:
        out.append(f"  classes, all of the job's: {', '.join(found.classes)}")
    return out


@data.command()
def explain(
    job: JobArgument,
    last: Annotated[
        int, typer.Option("--last", min=0, help="The number of last rounds to cover; 0: all.")
    ] = RECENT,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show the choices for a job's data, and what they came to.

    That is the waiting that they predict, and what was measured.
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
