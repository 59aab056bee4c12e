# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): importing this module imports all that a worker needs until it is prepared."""

from __future__ import annotations

import torch

torch.use_deterministic_algorithms(True)  # imports torch's compiler, which takes as long as torch
