# SPDX-License-Identifier: Apache-2.0
"""Edge (files, the clock): the mini-epochs of a data set, for a training loop of one's own.

::

    with millpond.data.mini_epochs(dataset, fast="8 GiB", repeat="auto", passes=10) as mini_epochs:
        for mini_epoch in mini_epochs:  # instead of: for epoch in range(...)
            for batch in DataLoader(mini_epoch, batch_size=64, shuffle=True):
                ...
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.utils.data import Dataset

from millpond.base.errors import LocalError
from millpond.base.sizes import bytes_of
from millpond.data.tier.remembered import RememberedRepeats
from millpond.train.local.fast_tier import FastTier, FetchedSlice
from millpond.train.local.repeated_slices import RepeatedSlices
from millpond.train.local.slices import SinglePasses
from millpond.train.repeats import RepeatRule, rule_of
from millpond.train.task.task import SampleSet

log = logging.getLogger(__name__)
Augment = Callable[[Any], Any]
_TRIED = 64
"""Samples whose size in the tier is taken for that of all."""


class MiniEpoch(Dataset[Any]):
    """One repetition of a mini-epoch: a map-style data set that lies in the fast tier. A process of a
    DataLoader may read it if that forks.
    """

    def __init__(self, fetched: FetchedSlice, repeat: int, augment: Augment | None) -> None:
        self.place, self.repeat = fetched.place, repeat
        self._slot, self._augment = fetched.slot, augment

    def __len__(self) -> int:
        return len(self._slot)

    def __getitem__(self, index: int) -> Any:
        sample = self._slot[index]
        return self._augment(sample) if self._augment else sample


class MiniEpochs:
    """Iterates over the mini-epochs of some passes, each as often as a rule says; see
    ``millpond.data.mini_epochs``. ``waited`` are the seconds without a mini-epoch, ``repeats`` the
    repetitions of those that are done.
    """

    def __init__(
        self,
        tier: FastTier,
        slices: RepeatedSlices,
        augment: Augment | None,
        remembered: RememberedRepeats | None = None,
    ) -> None:
        self._tier, self._slices, self._augment, self._remembered = tier, slices, augment, remembered

    @property
    def waited(self) -> float:
        """The seconds without a mini-epoch."""
        return self._slices.waited

    @property
    def repeats(self) -> list[int]:
        """The repetitions of the mini-epochs that are done."""
        return self._slices.repeats

    @property
    def read_bytes(self) -> int:
        """The bytes of samples that were fetched from the slow tier."""
        return self._tier.fetched_bytes

    def report(
        self, score: float, train_error: float | None = None, validation_error: float | None = None
    ) -> None:
        """Report the score of the repetition that has just ended: a loss or an error, lower is better; for a
        rule with ``weights`` the training loss, and the errors that it weighs. Raises LocalError for a score
        that is not finite, and for an error that is missing.
        """
        self._slices.report(score, train_error, validation_error)

    def __iter__(self) -> Iterator[MiniEpoch]:
        for fetched, repeat in self._slices:
            yield MiniEpoch(fetched, repeat, self._augment)

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two repetitions, of numbers alone."""
        return self._slices.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the repetition at which the state was taken. Raises LocalError for that of another
        size of mini-epochs.
        """
        self._slices.load_state_dict(state)

    def callback(self, monitor: str) -> MiniEpochCallback:
        """Return a callback for trainers like Lightning's that reports the metric ``monitor``."""
        return MiniEpochCallback(self, monitor)

    def close(self) -> None:
        """End the fetch that is under way, and remember what worked."""
        self._tier.close()
        scores = self._slices.scores
        if self._remembered and self.repeats and scores:
            self._remembered.keep(self.repeats, min(scores))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MiniEpochCallback:
    """Reports a metric to mini-epochs after each validation, with the hooks of Lightning's callbacks. The
    trainer has each repetition as an epoch, with ``reload_dataloaders_every_n_epochs=1``.
    """

    def __init__(self, mini_epochs: MiniEpochs, monitor: str) -> None:
        self._mini_epochs, self._monitor = mini_epochs, monitor

    def on_validation_end(self, trainer: Any, _module: Any) -> None:
        """Report the metric that the trainer has logged. Raises LocalError if there is none."""
        if getattr(trainer, "sanity_checking", False):
            return
        metrics = trainer.callback_metrics
        if self._monitor not in metrics:
            raise LocalError(f"monitor: there is no metric '{self._monitor}'")
        self._mini_epochs.report(float(metrics[self._monitor]))


def mini_epochs(
    dataset: SampleSet,
    *,
    fast: str | int = "1 GiB",
    folder: str | Path | None = None,
    size: int | None = None,
    repeat: int | str | RepeatRule = "auto",
    passes: int = 1,
    seed: int = 0,
    recompose: bool = True,
    augment: Augment | None = None,
    remember: tuple[str | Path, str] | None = None,
) -> MiniEpochs:
    """Return the mini-epochs of a torch map-style data set: random slices that are repeated in a fast tier
    while the next one is fetched from where the data set lies.

    The fast tier takes at most ``fast`` bytes, of the file system of ``folder`` (a flash, or a file system in
    memory) or of this process's memory. Half of it is one mini-epoch, of ``size`` samples if that is less.
    Each is repeated ``repeat`` times, or by a rule: "auto" until the next one is there, "score", "bands" and
    "bollinger" by the scores that are reported, see ``train.repeats``. There are ``passes`` over the data
    set, composed anew each time if ``recompose``. ``remember`` is a file and a name of data set and model:
    what worked best is used the next time.

    What ``dataset`` returns is kept, with all that it has decoded; ``augment`` is called whenever a sample is
    read, and so may be random. Raises LocalError, and ValueError for a rule that does not exist. A context
    manager, and an iterator over data sets, one for each repetition; the data set's own exceptions are raised
    there.
    """
    order = SinglePasses(dataset, seed, recompose=recompose)
    tier = FastTier(order, bytes_of(fast), Path(folder) if folder else None)
    try:
        fits = tier.fitting(_TRIED)
        remembered = RememberedRepeats(Path(remember[0]), remember[1]) if remember else None
        rule = (remembered and remembered.rule) or rule_of(repeat)
        wanted = min(size or fits, fits, len(dataset))
        if size and wanted < min(size, len(dataset)):
            log.info("mini-epochs have %d samples instead of %d: two fit into the fast tier", wanted, size)
        return MiniEpochs(tier, RepeatedSlices(tier, order, wanted, rule, passes), augment, remembered)
    except BaseException:
        tier.close()
        raise
