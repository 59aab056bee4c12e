# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): a job's task: the user's hooks, and the defaults of those that the user has left out.

All hooks but ``model`` are optional; the defaults classify labelled images:

- ``model()`` returns the torch module.
- ``dataset(folder, split)`` returns a torch map-style data set of a folder; ``split`` is "train" or "test".
  ``train.data.parquet`` and ``train.data.tar`` have such of Parquet and tar files.
  It is read as needed, by ``__getitems__`` where there is one. That may return a whole batch, any tree of
  tensors, instead of a list of samples. One thread reads it, unless it has ``thread_safe = True``.
- ``collate(samples)`` returns a batch of a list of samples, see torch's ``default_collate``.
- ``loss(model, batch)`` returns the sum of the losses of a batch, a tensor, and their count: of samples, or
  of tokens. So batches of any size add up exactly.
- ``metrics(model, batch)`` returns sums and counts by name.
- ``summary(means)`` returns the final figures of the means over all samples, such as a perplexity.
- ``optimizer(parameters)`` and ``scheduler(optimizer, total)`` return torch's; the scheduler makes a step
  after each round or epoch, of ``total``.
- ``state()`` returns an object with ``state_dict`` and ``load_state_dict`` that the device keeps for itself
  between the exchanges and restarts of a job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, default_collate

from millpond.base.errors import LocalError
from millpond.train import error_texts
from millpond.train.balance.curve import Ints
from millpond.train.data import labelled_images
from millpond.train.data.columns import joined
from millpond.train.data.errors import DataError
from millpond.train.data.labelled_images import LabelledImages, described
from millpond.train.determinism import generators
from millpond.train.job.variation import Variation
from millpond.train.state.private_state import Stateful
from millpond.train.task.sums import LOSS, Sums, checked, means

Batch = Any
"""Any tree of tensors."""


class SampleSet(Protocol):
    """A torch map-style data set."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample."""


class Task:
    """The hooks of ``user``, an object or a module, with the defaults for those that it lacks. The default
    data set reads images in ``format_`` with the labels of ``classes``, varied as ``variation`` says.
    """

    def __init__(
        self,
        user: object,
        format_: str = "npy",
        classes: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
        variation: Variation | None = None,
    ) -> None:
        self._user, self._arguments, self._variation = user, arguments or {}, variation
        self._format, self._classes = format_, classes
        self._figures: tuple[str, ...] = ()  # of the hook 'summary', once it has been called
        if not callable(getattr(user, "model", None)):
            raise LocalError("the task has no hook 'model'")
        if self.has("dataset") and (variation or Variation()) != Variation():
            text = "this task has a data set of its own, which varies its samples itself"
            raise LocalError(f"data: resize, crop and flip are for labelled images; {text}")

    def _hook(self, name: str) -> Callable[..., Any] | None:
        found: Callable[..., Any] | None = getattr(self._user, name, None)
        return found if callable(found) else None

    def has(self, name: str) -> bool:
        """Return whether the user's task has a hook of this name."""
        return self._hook(name) is not None

    @property
    def classifies_images(self) -> bool:
        """Whether samples and loss are the default ones."""
        return not any(self._hook(name) for name in ("dataset", "collate", "loss"))

    def model(self) -> nn.Module:
        """Return a new model. Raises LocalError for something else."""
        made = getattr(self._user, "model")(**self._arguments)  # noqa: B009 - mypy knows no attribute of object
        if not isinstance(made, nn.Module):
            raise LocalError(f"the task's model is a {type(made).__name__}, not a torch.nn.Module")
        for name, value in (*made.named_parameters(), *made.named_buffers()):
            if is_lazy(value):
                raise LocalError(
                    f"the model's tensor '{name}' has no shape yet, as it is of a lazy module: have the hook"
                    " 'model' run a batch through it"
                )
        return made

    def dataset(self, root: Path, folder: str, split: str) -> SampleSet:
        """Return the samples of a folder (absolute or below ``root``). Raises DataError."""
        hook = self._hook("dataset")
        if hook is None:
            return labelled_images.load(root, folder, self._format, self._classes, self._variation)
        if not (root / folder).is_dir():
            raise DataError(error_texts.NO_FOLDER(folder))
        with generators.planted(0):  # not the job's seed: random parts of a folder are the same in all jobs
            found = hook(root / folder, split)
        lacks = getattr(type(found), "__getitem__", None) in (None, Dataset.__getitem__)
        if lacks or not hasattr(found, "__len__"):
            raise LocalError(error_texts.NO_ITEMS())
        return found  # type: ignore[no-any-return]

    def is_thread_safe(self, parts: Sequence[SampleSet]) -> bool:
        """Return whether several threads may read samples of ``parts`` at once: each data set, and the hook
        ``collate`` where there is one, says so by an attribute ``thread_safe``. Few of torch's style are
        made for that: two threads that seek in one file read each other's samples.
        """
        hook = self._hook("collate")
        return all(getattr(each, "thread_safe", False) for each in (*parts, *([hook] if hook else ())))

    def fetch(self, wanted: Sequence[tuple[SampleSet, Ints]]) -> Batch:
        """Return the batch of some samples of each data set. Raises DataError, and any exception of the
        user's.
        """
        found = [items_of(part, indices) for part, indices in wanted]
        if not isinstance(found[0], list):
            return joined(found)
        return self.collated([sample for part in found for sample in part])

    def collated(self, samples: list[Any]) -> Batch:
        """Return the batch of a list of samples."""
        return (self._hook("collate") or default_collate)(samples)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """Return the summed loss of a batch, and its count. Raises LocalError for something else."""
        found = (self._hook("loss") or _cross_entropy)(model, batch)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise LocalError(error_texts.NO_LOSS())
        total, count = found
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise LocalError(error_texts.NO_LOSS())
        return total, float(count)

    def metrics(self, model: nn.Module, batch: Batch) -> Sums:
        """Return the metrics of a batch, among them the loss. Raises LocalError."""
        hook = self._hook("metrics") or (None if self._hook("loss") else _accuracy)
        found = checked(hook(model, batch)) if hook else {}
        if LOSS not in found:
            total, count = self.loss(model, batch)
            found[LOSS] = total.item(), count
        return found

    def summary(self, sums: Sums) -> dict[str, float]:
        """Return the figures of all samples, NaN for those that are too large for the hook: one device can
        report such sums. Raises any exception of the hook; an overflow only at first, when the names of its
        figures are not known.
        """
        found = means(sums)
        if hook := self._hook("summary"):
            try:
                figures = {name: float(value) for name, value in hook(dict(found)).items()}
            except ArithmeticError:
                if not self._figures:
                    raise
                figures = dict.fromkeys(self._figures, math.nan)
            self._figures, found = tuple(figures), found | figures
        return found

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """Return the task's optimizer, None without one."""
        hook = self._hook("optimizer")
        return hook(parameters) if hook else None

    def scheduler(
        self, optimizer: torch.optim.Optimizer, total: int
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return the task's scheduler, None without one."""
        hook = self._hook("scheduler")
        return hook(optimizer, total) if hook else None

    def state(self) -> Stateful | None:
        """Return what the device keeps for itself, None without such a hook. Raises LocalError."""
        hook = self._hook("state")
        found = hook() if hook else None
        if found is not None and not (hasattr(found, "state_dict") and hasattr(found, "load_state_dict")):
            raise LocalError(error_texts.NO_STATE())
        return found

    def check(self, parts: Sequence[SampleSet], model: nn.Module) -> None:
        """Raise DataError for images whose shapes differ, or whose labels the model cannot have."""
        images = [part for part in parts if isinstance(part, LabelledImages)]
        for part in images[1:]:
            if part.shape != images[0].shape:
                first = images[0].name, described(images[0].shape)
                raise DataError(error_texts.OTHER_SHAPES(part.name, described(part.shape), *first))
        if not images or not self.classifies_images:
            return
        with torch.no_grad():
            outputs = logits(model.eval()(images[0].__getitems__([0, 0])[0]))
        for part in images if outputs.ndim == 2 else ():
            if part.labels.max() >= outputs.shape[1]:
                raise DataError(error_texts.LARGE_LABEL(part.name, outputs.shape[1]))


def is_task(found: object) -> bool:
    """Return whether an object or a module has the hooks of a task."""
    return not isinstance(found, nn.Module) and callable(getattr(found, "model", None))


def logits(outputs: Any) -> Tensor:
    """Return the logits among the outputs of a model: themselves, or their attribute of that name."""
    found: Tensor = getattr(outputs, "logits", outputs)
    return found


def items_of(part: SampleSet, indices: Ints) -> Any:
    """Return some samples of a data set: a list, or a batch if its ``__getitems__`` returns one."""
    wanted = indices.tolist()
    getitems = getattr(part, "__getitems__", None)
    return getitems(wanted) if callable(getitems) else [part[index] for index in wanted]


def _cross_entropy(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    inputs, labels = batch
    return cross_entropy(logits(model(inputs)), labels, reduction="sum"), labels.numel()


def _accuracy(model: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
    inputs, labels = batch
    outputs = logits(model(inputs))
    loss = cross_entropy(outputs, labels, reduction="sum").item()
    right = int((outputs.argmax(1) == labels).sum())
    return {"accuracy": (right, labels.numel()), LOSS: (loss, labels.numel())}
