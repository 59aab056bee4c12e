# SPDX-License-Identifier: Apache-2.0
"""Edge (files, torch): a worker's part in a question: it reads all samples and counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from millpond.base.errors import LocalError
from millpond.linux.progress import reading
from millpond.train import error_texts
from millpond.train.data.errors import DataError
from millpond.train.job.spec import WorkSpec
from millpond.train.questions import columns
from millpond.train.questions.messages import MODEL, AskDevice, Counted
from millpond.train.questions.scores import score_sums
from millpond.train.questions.sums import Words, sums
from millpond.wire.channel import Buffer

_BATCH = 256
FolderSums = Callable[[str], Iterator[tuple[int, Words]]]
"""Yields for parts of a folder the number of samples, and their sums."""


def counted(request: AskDevice, root: Path, code_dir: Path) -> tuple[Counted, Buffer]:
    """Return the numbers of samples by folder, and the sums over all. Raises LocalError, and any exception of
    the user's code.
    """
    found = np.zeros(request.question.words, np.int64)
    with reading():  # of a slow disk, all the time
        parts = _scored(request, request.work, root, code_dir) if request.work else _of_columns(request, root)
        counts = [_add(parts, folder.path, found) for folder in request.folders]
    return Counted(tuple(counts)), found.data.cast("B")


def _add(parts: FolderSums, folder: str, found: Words) -> int:
    """Add the samples of a folder to the sums. Returns their number."""
    count = 0
    for part, words in parts(folder):
        found += words
        count += part
    if not count:
        raise DataError(error_texts.HOLDS_NO_SAMPLES(folder))
    return count


def _of_columns(request: AskDevice, root: Path) -> FolderSums:
    question = request.question

    def parts(folder: str) -> Iterator[tuple[int, Words]]:
        for values in columns.values(root, folder, question.column, question.classes):
            yield len(values), sums(question, values)

    return parts


def _scored(request: AskDevice, work: WorkSpec, root: Path, code_dir: Path) -> FolderSums:
    """Return what scores samples with a model. Raises LocalError, and any exception of the user's code."""
    import torch  # takes seconds to load

    from millpond.train.local.evaluation import autocast
    from millpond.train.local.selection import Selection
    from millpond.train.state import initial
    from millpond.train.task.task import logits
    from millpond.train.worker import user_code

    task, model = user_code.build(work, code_dir)
    initial.load(model, code_dir / MODEL)
    model.eval()

    @torch.no_grad()
    def parts(folder: str) -> Iterator[tuple[int, Words]]:
        samples = task.dataset(root, folder, "test")
        every = np.arange(len(samples))
        chosen = Selection(task, [samples], [every], every)
        for start in range(0, len(every), _BATCH):
            batch = chosen.batch(every[start : start + _BATCH])
            if not (isinstance(batch, tuple | list) and len(batch) == 2):
                raise LocalError(error_texts.NO_LABELS())
            inputs, labels = batch
            with autocast(work, torch.device("cpu")):
                outputs = logits(model(inputs))
            outputs = outputs.double().reshape(len(labels), -1)
            yield (
                len(labels),
                score_sums(request.question, labels.double().flatten().numpy(), outputs.numpy()),
            )

    return parts
