# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the bytes of a job's weights and of the data of a step, counted on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.train.job.spec import Job

_FEW = 2
"""Samples that are counted: BatchNorm takes no single one."""


@dataclass(frozen=True, slots=True)
class StepVolumes:
    """The bytes of the ``weights`` and of the ``data`` between layers of a step, see ``train.task.volumes``.
    The gradients of the weights are what an exchange carries.
    """

    weights: int
    data: int

    @property
    def text(self) -> str:
        """The volumes as a line, with FireCaffe's ratio (Iandola et al. 2015, table 1)."""
        ratio = self.data / max(self.weights, 1)
        advice = "exchange weights, as here" if ratio >= 1 else "an exchange of activations would be less"
        sizes = f"data {self.data / 1e6:,.1f} MB, weights {self.weights / 1e6:,.1f} MB"
        return f"a step: {sizes}, data/weights {ratio:,.2f}: {advice}"


def step_volumes(job: Job, folder: Path, samples: int) -> StepVolumes:
    """Count a step of so many ``samples`` by two of the job's test samples. The job's code, whose files are
    in ``folder``, runs in this process. Raises LocalError if it does not, or the job has no test folder.
    """
    if not job.data.test:
        raise LocalError("volumes are not counted: the job has no test folder in [data]")
    try:
        import numpy as np
        import torch

        from millpond.train.task import volumes
        from millpond.train.worker import user_code

        task, model = user_code.build(job.work, folder.resolve())
        part = task.dataset(Path(), job.data.test, "test")
        batch = task.fetch([(part, np.arange(_FEW))])
        with volumes.watched(model.eval()) as found, torch.no_grad():
            task.loss(model, batch)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        raise LocalError(f"volumes are not counted: {type(error).__name__}: {error}") from None
    return StepVolumes(found.weights, found.data * samples // _FEW)
