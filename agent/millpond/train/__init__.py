# SPDX-License-Identifier: Apache-2.0
"""The training engine that devices and the host's own worker run. ``fit`` trains a task in one process,
``simulate`` a fleet in one process; ``group`` is for scripts of one's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from millpond.train.compute.fit import Fitted
    from millpond.train.distributed.group import GroupPolicy, ProcessGroup
    from millpond.train.strategies import Strategy


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
    for a model without parameters, and for parameters that are not float32. A model may be on a GPU.
    """
    from millpond.train.distributed.group import joined  # imports torch, which the daemons do without

    return joined(model, policy, beside)


def fit(
    task: object,
    train: str | Path | Sequence[str | Path],
    test: str | Path = "",
    *,
    epochs: int = 1,
    seed: int = 0,
    **training: Any,
) -> Fitted:
    """Train a task in this process alone, on one or several folders, and print a line for each epoch, with
    the task's figures on the folder ``test``. ``task`` has the hooks of ``train.task.task``; ``training``
    are the keys of a job's table ``[train]``: batch, learning_rate, optimizer, ... So a task is tried before
    it goes to a fleet. Raises LocalError, and any exception of the task.
    """
    from millpond.train.compute.fit import fit as run  # imports torch, which the daemons do without

    return run(task, train, test, epochs=epochs, seed=seed, **training)


def simulate(
    task: object,
    folders: Sequence[str | Path],
    test: str | Path = "",
    *,
    rounds: int = 20,
    seed: int = 0,
    strategy: str | dict[str, Any] | Strategy = "fedavg",
    local: Sequence[str] = (),
    held_out: float = 0.0,
    **training: Any,
) -> Fitted:
    """Simulate federated averaging in this process alone: each of ``folders`` is the private folder of a
    device, csd0, csd1, ... A fleet with these folders computes the same, but for random draws of models,
    which are each device's own. ``strategy`` is that of a job's file or an object of a class of
    one's own, ``local`` are patterns of layers that stay on their devices, and ``training`` the keys of
    ``[train]``. Devices are scored, too, on a share ``held_out`` of their samples. Otherwise as ``fit``.
    """
    from millpond.train.compute.simulate import simulate as run

    training |= {"local": local, "held_out": held_out}
    return run(task, folders, test, rounds=rounds, seed=seed, strategy=strategy, **training)
