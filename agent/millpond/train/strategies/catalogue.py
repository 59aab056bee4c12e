# SPDX-License-Identifier: Apache-2.0
"""Pure: the strategies by their names in a job, one module each, and their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from millpond.base.errors import ConfigError
from millpond.base.one_class import class_in, names_in
from millpond.base.schema import load, nearest
from millpond.train import strategies
from millpond.train.strategies.fedavg import FedAvg
from millpond.train.strategies.strategy import Combination, LocalRule, Strategy

_COMMON = ("adaptive", "catalogue", "strategy")
"""Modules here that are no strategy: a name in a job is that of any other, which has one class."""


STRATEGIES: Final[Mapping[str, type[Strategy]]] = {
    name: class_in(strategies, name, Strategy) for name in names_in(strategies, _COMMON)
}


def check(given: str | Mapping[str, Any], where: str) -> Strategy | None:
    """Return the strategy that a job names, None for one of the user's own, which has a ``factory``. Raises
    ConfigError.
    """
    table = as_table(given)
    if "factory" in table:
        module, colon, attribute = str(table["factory"]).partition(":")
        if "name" in table or not (module and colon and attribute):
            raise ConfigError(f"{where}: a strategy has a name, or a factory that is module:class")
        return None
    name = table.pop("name", "fedavg")
    if name not in STRATEGIES:
        raise ConfigError(f"{where}: there is no strategy '{name}'{nearest(str(name), STRATEGIES)}")
    try:
        return load(STRATEGIES[name], table, where)
    except ConfigError as error:  # of a key, which the schema places, or of a value
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None


def as_table(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a strategy that is given as one, or by its name alone."""
    return {"name": given} if isinstance(given, str) else dict(given)


def unfit_for_lateness(combine: Combination, local: LocalRule, *, repeats: bool) -> str:
    """Return why a strategy makes no sense where late updates count, and where devices answer repeatedly in
    one round if ``repeats``; "" if it does.
    """
    if combine.votes:
        return f"the rule '{combine.rule}' takes votes of one round"
    if repeats and local.personal:
        return "personal models are trained from round to round"
    return ""


def beyond_averaging(strategy: Strategy) -> str:
    """Return what a strategy does beyond replacing states by their mean, "" if nothing."""
    if strategy.combine.votes:
        return f"the rule '{strategy.combine.rule}' takes the votes of all devices"
    if strategy.local.normalized:
        return "differences that are normalized by local steps are averaged, not states"
    if (
        not isinstance(strategy, FedAvg)
        or type(strategy).step is not FedAvg.step
        or strategy.learning_rate != 1
        or strategy.torch_optimizer
    ):
        return "the server's step is more than the mean, and devices cannot make that step"
    return ""


def unfit_for_steps(strategy: Strategy) -> str:
    """Return why a strategy makes no sense in synchronous steps, "" if it does."""
    if strategy.combine.votes:
        return "votes of late updates and of parts of an epoch are no votes of devices"
    if strategy.local.normalized:
        return "all workers take the same number of local steps"
    if strategy.local.personal:
        return "personal models are trained and scored from round to round"
    return ""
