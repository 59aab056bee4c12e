# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): ``millpond data check``: a folder as a worker would see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.base.errors import LocalError
from millpond.host.cli.options import Format, FormatOption
from millpond.host.terminal import tables
from millpond.train.job import file
from millpond.train.job.spec import ModelSpec, WorkSpec

if TYPE_CHECKING:
    from torch import nn

_FEW = 2
"""Samples of the batch that is shown."""
_FORMATS = {
    "npy": ("images*.npy",),
    "idx": ("*images*idx3-ubyte", "*images*idx3-ubyte.gz"),
    "images": ("*/",),
}

app = typer.Typer(help="Look at data before it is trained on.", no_args_is_help=True)


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


@app.callback()
def _group() -> None:
    """Look at data before it is trained on."""  # with it 'check' is a command of its own


@app.command()
def check(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of this machine.")],
    task: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help="Read it with the task of this file.")
    ] = "",
    job: Annotated[
        Path | None, typer.Option(metavar="JOB.toml", help="Read it as the workers of this job.")
    ] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show a folder as a worker would see it: format, samples, a batch, labels.

    What a worker would refuse is one line, with exit code 2. A task's own code is run here, by this user.
    """
    path = _own(folder)
    if task and job:
        raise LocalError("--task and --job are two ways to read the folder: give one of them")
    work, code_dir = _of_job(job) if job else _of_task(task) if task else (_guessed(path), Path())
    found = summarize(path, work, code_dir.resolve())
    if output is Format.JSON:
        tables.print_json(found)
    else:
        print("\n".join(lines(found)))


def _own(folder: str) -> Path:
    device, colon, path = folder.partition(":")
    if colon and "/" not in device and not Path(folder).exists():
        if path.strip("/").partition("/")[0] == "public":
            raise LocalError(f"{folder}: check it where 'millpond mount {device} DIR' shows it")
        raise LocalError(
            f"{folder}: a device tells nothing of private data but in a job, and then only how many samples "
            "there are, or what is wrong: submit it with 'millpond train'"
        )
    if not Path(folder).is_dir():
        raise LocalError(f"missing data: there is no folder {folder}")
    return Path(folder)


def _of_job(path: Path) -> tuple[WorkSpec, Path]:
    found, _ = file.read(path)
    return found.work, path.parent


def _of_task(text: str) -> tuple[WorkSpec, Path]:
    path, _, name = text.partition(":")
    source = Path(path)
    if not source.is_file():
        raise LocalError(f"--task: there is no file {path}")
    factory = f"{source.stem}:{name}" if name else source.stem
    return WorkSpec("check", ModelSpec(factory), task=True), source.parent


def _guessed(folder: Path) -> WorkSpec:
    """Return the work on labelled images of the format that the folder has. Raises LocalError for none."""
    for name, patterns in _FORMATS.items():
        if any(next(folder.glob(pattern), None) for pattern in patterns):
            return WorkSpec("check", ModelSpec(""), format=name)  # type: ignore[arg-type]
    raise LocalError(
        f"{folder} has no images.npy, no *-images-idx3-ubyte and no sub-folder per class; for other data say "
        "how it is read, with --task or --job"
    )


def summarize(folder: Path, work: WorkSpec, code_dir: Path) -> DataSummary:
    """Load a folder as a worker does, with the files in ``code_dir``. Raises LocalError for what a worker
    would refuse.
    """
    try:
        from millpond.train.worker import error_reports, roles
    except ImportError as error:
        raise LocalError(f"data is read with torch: install millpond[train] ({error})") from None
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
    from millpond.train.task.task import Task
    from millpond.train.worker import user_code

    model: nn.Module | None = None
    if work.model.factory:
        task, model = user_code.build(work, code_dir)
    else:
        task = Task(_Images(), work.format)
    part = task.dataset(Path(), str(folder), "train")
    if not len(part):
        raise LocalError(f"missing data: {folder} holds no samples")
    if model is not None:
        task.check([part], model)
    batch = task.fetch([(part, np.arange(min(_FEW, len(part))))])
    kind, classes = type(part).__name__, {}
    if isinstance(part, LabelledImages):
        kind, classes = work.format, _classes(part.labels, folder, work)
    return DataSummary(str(folder), kind, len(part), dict(_shapes(batch)), classes)


class _Images:
    """A task that only reads images."""

    def model(self) -> None:
        """Be there, as each task has this hook."""


def _classes(labels: Any, folder: Path, work: WorkSpec) -> dict[str, int]:
    import numpy as np

    names: Sequence[str] = ()
    if work.format == "images":
        names = work.classes or file.class_names(folder)
    counts = np.bincount(labels, minlength=len(names)).tolist()
    return {f"{label} {names[label]}" if names else str(label): count for label, count in enumerate(counts)}


def _shapes(batch: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place in a batch, and shape and type, of each of its parts."""
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        shape = "x".join(["N", *map(str, batch.shape[1:])])
        yield place or "batch", f"{str(batch.dtype).removeprefix('torch.')} {shape}"
    elif isinstance(batch, Mapping):
        for key, each in batch.items():
            yield from _shapes(each, f"{place}.{key}".lstrip("."))
    elif isinstance(batch, (list, tuple)) and not all(isinstance(each, (str, bytes)) for each in batch):
        for number, each in enumerate(batch):
            yield from _shapes(each, f"{place}[{number}]")
    else:
        kind = type(batch[0]).__name__ if isinstance(batch, (list, tuple)) and batch else type(batch).__name__
        yield place or "batch", kind


def lines(found: DataSummary) -> list[str]:
    """Return it as text."""
    out = [f"{found.folder}: {found.samples} samples, {found.format}"]
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
