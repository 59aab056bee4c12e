# SPDX-License-Identifier: Apache-2.0
"""Pure: the learning rate of a step by its global batch.

A rate is found for one batch, the base batch; with n times as many samples in a step it is another:

- linear, n times the rate: n steps w <- w - r g_i whose gradients change little are one step of n r times
  their mean (Krizhevsky 2014; Goyal et al. 2017, section 2.1). FireCaffe (section 7.2) went with Network in
  Network from 256 samples at 0.01 to 1024 at 0.04, for 0.3 points of accuracy.
- square root: the mean's standard deviation falls with sqrt(n), so the noise of a step, rate times deviation,
  stays as it was (Krizhevsky 2014). For large n: FireCaffe's GoogLeNet (section 7.3), 32 samples at 0.01, did
  not learn with 1024 at the linear 0.32, and reached its accuracy at 0.08 in 72 epochs instead of 64; the
  square root gives 0.057. It is also the rule for Adam (Malladi et al. 2022).
- none: the rate as given.

Warm-up (Goyal et al., section 2.2): at first weights change too fast for the linear rule, so the rate begins
as given and rises by the same amount each step. A rate that is less than the given one needs none.

Momentum: torch's SGD keeps v <- m v + g of gradients alone and steps by r v. A mean gradient has the same
expectation for any batch, so a batch that changes, by a re-tune or with late sums, leaves v valid. A new rate
holds at once for all gradients in v; forms that keep r g in v need a correction to do the same (Goyal et al.,
section 3). The rest in v is the noise of earlier batches, for about 1 / (1 - m) steps: ten with m = 0.9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The learning rate by batch. ``base_batch``: samples of a step for which the rate was found; without
    it every batch has the rate as given. ``warmup``: steps until the full rate.

    Every worker computes the rate for itself: +, -, *, / and sqrt, which IEEE 754 rounds alike everywhere.
    """

    scaling: Literal["linear", "sqrt", "none"] = "linear"
    base_batch: int | None = None
    warmup: int = 0

    def at(self, step: int, samples: int, base: float) -> float:
        """Return the rate of step ``step``, from 0, with ``samples`` in it over all workers, at least 1;
        ``base`` is the rate for ``base_batch``.
        """
        full = base * self._factor(samples)
        if step >= self.warmup or full <= base:
            return full
        return base + (full - base) * (step / self.warmup)

    def _factor(self, samples: int) -> float:
        if self.scaling == "none" or self.base_batch is None:
            return 1.0
        times = samples / self.base_batch
        return times if self.scaling == "linear" else math.sqrt(times)
