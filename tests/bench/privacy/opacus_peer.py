# SPDX-License-Identifier: Apache-2.0
"""Entry: trains the demo's model by Opacus. ``opacus_peer.py DIGITS TEST MODE EPSILON DELTA SEED`` prints its
accuracy as JSON. MODE "full": all samples in each of 20 steps; "drawn": batches of 64 on average in 20
epochs.
"""

from __future__ import annotations

import json
import sys
import warnings

import numpy as np
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

from millpond.train.zoo.models import digits_cnn

_EPOCHS, _BATCH, _RATES = 20, 64, {"full": 1.0, "drawn": 0.25}


def main() -> None:
    """Train and tell."""
    file, test, mode, epsilon, delta, seed = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.manual_seed(int(seed))
    data = np.load(file)
    images, labels = torch.from_numpy(data["images"]).view(-1, 1, 8, 8), torch.from_numpy(data["labels"])
    train = TensorDataset(images[: -int(test)], labels[: -int(test)])
    model = digits_cnn()
    loader = DataLoader(train, batch_size=len(train) if mode == "full" else _BATCH)
    model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=_RATES[mode]),
        data_loader=loader,
        target_epsilon=float(epsilon),
        target_delta=float(delta),
        epochs=_EPOCHS,
        max_grad_norm=1.0,
        poisson_sampling=mode == "drawn",
    )
    for _ in range(_EPOCHS):
        for batch, wanted in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), wanted).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        right = model.eval()(images[-int(test) :]).argmax(1) == labels[-int(test) :]
    print(json.dumps({"accuracy": 100 * right.float().mean().item()}))


if __name__ == "__main__":
    main()
