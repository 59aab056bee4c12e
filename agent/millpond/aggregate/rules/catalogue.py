# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the rules by their names."""

from __future__ import annotations

from millpond.aggregate import rules
from millpond.aggregate.rules.rule import CombinationRule
from millpond.base.errors import ConfigError
from millpond.base.one_class import class_in, names_in
from millpond.base.schema import nearest

_COMMON = ("catalogue", "rule")


def rule_of(name: str, share: float = 0.0, block: int = 1) -> CombinationRule:
    """Return a rule by its name, for vectors that come in blocks of ``block`` values. Raises ConfigError."""
    if name not in (known := names_in(rules, _COMMON)):
        raise ConfigError(f"there is no rule '{name}'{nearest(name, known)}")
    found = class_in(rules, name, CombinationRule)
    if share and not found.takes_share:
        raise ConfigError(f"share: the rule '{name}' has none")
    return found(share, block)
