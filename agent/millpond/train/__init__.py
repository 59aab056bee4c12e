# SPDX-License-Identifier: Apache-2.0
"""The training engine that devices and the host's own worker run; ``group`` is for scripts of one's own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from millpond.train.distributed.group import GroupPolicy, ProcessGroup


def group(
    model: nn.Module, *, policy: GroupPolicy = "balance", beside: ProcessGroup | None = None
) -> AbstractContextManager[ProcessGroup]:
    """Join the processes that train ``model`` with this script, each with its part of every batch; a step is
    exactly that of one process with all samples. The members are the ranks of torch's default process group.
    Without one, a gloo group is made from the environment, as ``millpond launch`` and ``torchrun`` set it,
    and ended with the ``with`` block; if RANK is not set there, the process trains alone. In a confined
    launch, ``millpond launch --private``, they are the ranks of the launch.

    All ranks begin with the model of rank 0. With the policy "balance" batches follow the ranks' speeds; with
    "fixed" they are equal, and the same data and seeds give the same bits. A second model that is trained on
    the batches of a first one, such as a generator's on its critic's, names the first one's group as
    ``beside``. Raises LocalError, in ``with``,
    for a model without parameters, and for parameters that are not float32 on a CPU.
    """
    from millpond.train.distributed.group import joined  # imports torch, which the daemons do without

    return joined(model, policy, beside)
