# SPDX-License-Identifier: Apache-2.0
"""Edge (files): a worker's part in a question: it reads all samples and counts them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from millpond.train import error_texts
from millpond.train.data.errors import DataError
from millpond.train.questions import columns
from millpond.train.questions.messages import AskDevice, Counted
from millpond.train.questions.question import DataQuestion
from millpond.train.questions.sums import Words, sums
from millpond.wire.channel import Buffer


def counted(request: AskDevice, root: Path) -> tuple[Counted, Buffer]:
    """Return the numbers of samples by folder, and the sums over all. Raises DataError."""
    question = request.question
    found = np.zeros(question.words, np.int64)
    counts = [_add(question, root, folder.path, found) for folder in request.folders]
    return Counted(tuple(counts)), found.data.cast("B")


def _add(question: DataQuestion, root: Path, folder: str, found: Words) -> int:
    """Add the samples of a folder to the sums. Returns their number."""
    count = 0
    for part in columns.values(root, folder, question.column, question.classes):
        found += sums(question, part)
        count += len(part)
    if not count:
        raise DataError(error_texts.HOLDS_NO_SAMPLES(folder))
    return count
