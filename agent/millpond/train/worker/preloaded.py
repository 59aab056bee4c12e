# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): importing this module imports all that a worker needs until it is prepared."""

from __future__ import annotations

import torch

from millpond.train.worker import roles as roles  # and with it all that a job of images needs

torch.use_deterministic_algorithms(True)  # imports torch's compiler, which takes as long as torch
