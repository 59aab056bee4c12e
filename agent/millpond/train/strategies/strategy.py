# SPDX-License-Identifier: Apache-2.0
"""Pure: a strategy: what local training adds, how updates are combined, how the outcome is applied.

A strategy of the user's own is a class in the job's module, made in the parameter server's process::

    class Sign(Strategy):
        combine = Combination("median")

        def __init__(self, rate: float = 0.01) -> None:
            self.rate = rate

        def step(self, value, mean, kept):
            kept["trend"] = 0.9 * kept.get("trend", 0 * mean) + mean
            value -= self.rate * kept["trend"].sign()

``mean`` is the mean of what local training took away from a parameter: ``value -= mean`` averages. Tensors
in ``kept`` are in checkpoints, other attributes are not. Running statistics (BatchNorm) move by their mean
change whatever a strategy does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millpond.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

MOST = 1e9


def check_within(key: str, value: float, least: float, most: float) -> None:
    """Raise ConfigError for a value outside of [least, most], and for NaN."""
    if not least <= value <= most:
        raise ConfigError(f"{key}: {value:g} is not between {least:g} and {most:g}")


def check_rate(value: float) -> None:
    """Raise ConfigError for what is no learning rate."""
    if not 0 < value <= MOST:
        raise ConfigError(f"learning_rate: {value:g} is not greater than 0 and at most {MOST:g}")


@dataclass(frozen=True, slots=True)
class LocalRule:
    """The addition to local training: ``proximal`` times half the squared distance from the round's state is
    added to the loss. If ``normalized``, differences are divided by their local steps.

    With ``alpha`` above 0, each device also trains a personal model, of which so large a share is mixed with
    the round's, see ``strategies.apfl``; ``adaptive``: this is the share to begin with. With ``inner_rate``
    above 0, gradients are those after a step at this rate, see ``strategies.perfedavg``; ``delta`` is 0 for
    the first order, else the step of the differences that stand for the Hessian.
    """

    proximal: float = 0.0
    normalized: bool = False
    alpha: float = 0.0
    adaptive: bool = False
    inner_rate: float = 0.0
    delta: float = 0.0

    def __post_init__(self) -> None:
        check_within("mu", self.proximal, 0.0, MOST)
        check_within("alpha", self.alpha, 0.0, 1.0)
        check_within("inner_learning_rate", self.inner_rate, 0.0, MOST)
        check_within("delta", self.delta, 0.0, 1.0)
        if self.alpha and self.inner_rate:
            raise ConfigError("alpha: a mixed model takes no inner steps: set inner_rate or alpha to 0")
        if (self.adaptive and not self.alpha) or (self.delta and not self.inner_rate):
            raise ConfigError("alpha, inner_rate: greater than 0 where adaptive or delta is set")

    @property
    def personal(self) -> bool:
        """Whether devices score models of their own."""
        return bool(self.alpha or self.inner_rate)


@dataclass(frozen=True, slots=True)
class Combination:
    """The rule by which updates are combined, a module of ``aggregate.rules``: their exact ``mean`` by
    samples, or coordinate by coordinate the ``median``, or the ``trimmed`` mean without a ``share`` of the
    least and of the greatest values. In all but the mean each device has one vote, whatever it says of its
    samples.
    """

    rule: str = "mean"
    share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise ConfigError(f"share: {self.share:g} is not between 0 and 0.5")

    @property
    def votes(self) -> bool:
        """Whether each device has one vote."""
        return self.rule != "mean"


class Strategy:
    """Federated averaging with the exact mean, for strategies to change."""

    __slots__ = ()

    @property
    def local(self) -> LocalRule:
        """The addition to local training."""
        return LocalRule()

    @property
    def combine(self) -> Combination:
        """The rule by which updates are combined."""
        return Combination()

    @property
    def torch_optimizer(self) -> dict[str, Any]:
        """An optimizer of torch.optim that makes the step instead of ``step``: a table with ``name``,
        arguments and, unless it is its own, ``learning_rate``; empty for none.
        """
        return {}

    def step(self, value: Tensor, mean: Tensor, kept: dict[str, Tensor]) -> None:  # noqa: ARG002
        """Change a parameter's ``value`` in place by the combined difference ``mean``, which may also be
        changed. ``kept`` has the parameter's own tensors by name, float32.
        """
        value -= mean
