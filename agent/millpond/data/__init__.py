# SPDX-License-Identifier: Apache-2.0
"""Training data that is larger than memory and lies elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from millpond.data.streaming.dataset import StreamDataset
    from millpond.data.tier.mini_epochs import MiniEpochs
    from millpond.data.tier.repeats import RepeatRule
    from millpond.train.distributed.group import MapStyle


def mini_epochs(
    dataset: MapStyle,
    *,
    fast: str | int = "1 GiB",
    folder: str | Path | None = None,
    size: int | None = None,
    repeat: int | str | RepeatRule = "auto",
    passes: int = 1,
    seed: int = 0,
    recompose: bool = True,
    augment: Callable[[Any], Any] | None = None,
    remember: tuple[str | Path, str] | None = None,
) -> MiniEpochs:
    """Return the mini-epochs of a torch map-style data set: random slices that are repeated in a fast tier
    while the next one is fetched from where the data set lies.

    The fast tier takes at most ``fast`` bytes, of the file system of ``folder`` (a flash, or a file system in
    memory) or of this process's memory. Half of it is one mini-epoch, of ``size`` samples if that is less.
    Each is repeated ``repeat`` times, or by a rule: "auto" until the next one is there, "score" and "bands"
    by the scores that are reported, see ``tier.repeats``. There are ``passes`` over the data set, composed
    anew each time if ``recompose``. ``remember`` is a file and a name of data set and model: what worked best
    is used the next time.

    What ``dataset`` returns is kept, with all that it has decoded; ``augment`` is called whenever a sample is
    read, and so may be random. Raises LocalError, and ValueError for a rule that does not exist. A context
    manager, and an iterator over data sets, one for each repetition; the data set's own exceptions are raised
    there.
    """
    from millpond.data.tier.mini_epochs import make  # imports torch, which the daemons do without

    return make(
        dataset,
        fast=fast,
        folder=folder,
        size=size,
        repeat=repeat,
        passes=passes,
        seed=seed,
        recompose=recompose,
        augment=augment,
        remember=remember,
    )


def stream(
    where: str,
    *,
    batch: int | None = None,
    secret: str = "",
    run: str = "",
    seed: int = 0,
    shuffle: int = 0,
    memory: str | int = "256 MiB",
    chunk: int | None = None,
    at: Literal["server", "worker"] = "worker",
    transform: str = "",
    apply: Callable[[Any], Any] | None = None,
    patience: float = 60.0,
) -> StreamDataset:
    """Return a data set that a data service serves at ``where``, such as "host:port/folder", as a torch
    IterableDataset: an iteration is an epoch, in which each sample comes once, over all processes that give
    the same ``run``.

    It yields samples, or batches of ``batch`` as views of what was received, ``apply`` being called on either
    a batch or, where there is no ``batch``, a batch of one. The order follows from ``seed`` and the epoch: a
    random one, or of shards one that moves a sample by at most ``shuffle`` samples, so that shards are read
    from front to back. At most ``memory`` bytes are on the way; ``chunk`` samples are sent at once, tuned if
    None. Images are decoded ``at`` the worker or the server, which may apply a ``transform`` of its own, by
    its name. ``patience`` is the seconds for which the service may be away. Raises LocalError.
    """
    from millpond.data.streaming.open import make

    return make(
        where,
        batch=batch,
        secret=secret,
        run=run,
        seed=seed,
        shuffle=shuffle,
        memory=memory,
        chunk=chunk,
        at=at,
        transform=transform,
        apply=apply,
        patience=patience,
    )
