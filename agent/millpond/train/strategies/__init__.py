# SPDX-License-Identifier: Apache-2.0
"""Strategies of federated training, one file each; one of the user's own is a subclass of ``Strategy``."""

from millpond.train.strategies.strategy import Combination, LocalRule, Strategy

__all__ = ["Combination", "LocalRule", "Strategy"]
