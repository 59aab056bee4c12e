"""Progression of diabetes from ten measurements of a patient, by a small network."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

MEAN, DEVIATION = 152.0, 77.0  # of the figures to predict


class Diabetes:
    def model(self):
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))

    def dataset(self, folder, split):
        table = np.loadtxt(folder / "patients.csv", delimiter=",", dtype=np.float32, ndmin=2)
        return TensorDataset(torch.from_numpy(table[:, :10]), torch.from_numpy(table[:, 10]))

    def predict(self, model, batch):
        return model(batch[0] * 20)[:, 0], (batch[1] - MEAN) / DEVIATION

    def loss(self, model, batch):
        found, wanted = self.predict(model, batch)
        return ((found - wanted) ** 2).sum(), len(wanted)

    def metrics(self, model, batch):
        found, wanted = self.predict(model, batch)
        sums = {"residual": (found - wanted) ** 2, "wanted": wanted, "squared": wanted**2}
        return {name: (values.sum(), len(wanted)) for name, values in sums.items()}

    def summary(self, means):  # R2 is no mean, but follows from three
        return {"r2": 1 - means["residual"] / (means["squared"] - means["wanted"] ** 2)}
