# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): what a worker trains for itself alone, from exchange to exchange: local layers, and what its
loop keeps.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from millpond.train.job.spec import WorkSpec
from millpond.train.local.batch_loop import BatchLoop
from millpond.train.local.inner_steps import InnerStepLoop
from millpond.train.local.personal_model import MixedLoop
from millpond.train.state import flat, layout
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.state.personal_state import PersonalState
from millpond.train.task.task import Task


def loop_of(task: Task, model: nn.Module, work: WorkSpec) -> BatchLoop:
    """Return the loop of local training that a job's strategy wants."""
    rule = work.local
    kind = MixedLoop if rule.alpha else InnerStepLoop if rule.inner_rate else BatchLoop
    return kind(task, model, work)


class PersonalPart:
    """The local layers of the model of ``parameters``, and what ``loop`` keeps, of a ``run``: in ``folder``,
    or in memory alone without one. Raises LocalError.
    """

    def __init__(
        self, parameters: FlatParameters, loop: BatchLoop, run: str = "", folder: Path | None = None
    ) -> None:
        self._model, self._loop = parameters.model, loop
        self._layers = flat.describe_some(self._model, parameters.local)
        self._size = layout.size(self._layers)
        self._first = np.empty(self._size, np.float32)
        flat.read(self._model, self._first, self._layers)
        self._state = PersonalState(self._layers + loop.tensors, run, folder)

    def load(self, exchange: int) -> None:
        """Take what was kept after an exchange, or the last one before it; without one, first values."""
        found = self._state.after(exchange)
        flat.write(self._model, self._first if found is None else found[: self._size], self._layers)
        self._loop.restore(None if found is None else found[self._size :])

    def keep(self, exchange: int) -> None:
        """Keep what training has made of it in an exchange. Raises LocalError."""
        layers = np.empty(self._size, np.float32)
        flat.read(self._model, layers, self._layers)
        self._state.keep(exchange, np.concatenate([layers, self._loop.kept()]))
