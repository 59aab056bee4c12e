# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): measures what crosses the tunnels when only adapters of a model train."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.experiment import Run
from bench.fleets import running, trained
from bench.rows import Row, summary
from system.support import Emulation

DEVICES = ("csd0", "csd1")
TITLE = "Bytes of a round when only adapters train, over those of the whole model"
_MODEL = """\
from torch import nn

WIDTH, RANK = 1024, 4


class Adapted(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.linear = nn.Linear(inputs, WIDTH)
        self.down, self.up = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def build(adapters):
    layers = Adapted(64), nn.ReLU(), Adapted(WIDTH), nn.ReLU()
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(WIDTH, 10))
    for layer in layers if adapters else ():
        for parameter in getattr(layer, "linear", nn.Identity()).parameters():
            parameter.requires_grad = False
    return model
"""
_ADAPTERS = 64 * 4 + 1024 * 4 + 2 * 1024 * 4 + 1024 * 10 + 10
_FROZEN = 64 * 1024 + 1024 + 1024 * 1024 + 1024
SHARE = _ADAPTERS / (_ADAPTERS + _FROZEN)
_JOB = """\
name = "adapters"

[data]
private = "private/digits"
test = "{test}"

[model]
factory = "adapters:build"
files = ["adapters.py"]
arguments = {{ adapters = {adapters} }}

[federated]
rounds = {rounds}
quorum = 1.0
"""
_PEER = "the same model and rounds with all parameters trained"
_WHAT = (
    f"bytes that cross the interfaces of {len(DEVICES)} tunnels in a federated round, both ways, with TCP's: "
    f"LoRA of rank 4 at two layers and the head train, {_ADAPTERS} of {_ADAPTERS + _FROZEN} values"
)
_EMULATION = (
    f"a host and {len(DEVICES)} emulated devices on one machine; the tunnels and their bytes are real"
)


def measure(run: Run) -> list[Row]:
    """Rows ``lora_bytes``, ``lora_share``, and the bytes of both kinds of rounds."""
    with running(DEVICES, searched=False) as fleet:
        found = [
            [_bytes(fleet, run.quick, adapters) for adapters in (True, False)] for _ in range(run.repeats)
        ]
    for ours, whole in found:
        run.say(f"{ours:.0f} bytes per round, of the whole model {whole:.0f}: {ours / whole:.4f}")
    ratios = [ours / whole for ours, whole in found]
    return [
        summary("lora_bytes", _WHAT, ratios, "x", peer=_PEER, emulation=_EMULATION),
        Row("lora_share", "trainable values", *3 * (round(SHARE, 5),), "x", "all values", 1, None),
        _row("lora_round_bytes", [ours for ours, _ in found]),
        _row("whole_round_bytes", [whole for _, whole in found]),
    ]


def _row(figure: str, values: Sequence[float]) -> Row:
    return summary(figure, "the round", values, "bytes", emulation=_EMULATION)


def _bytes(fleet: Emulation, quick: bool, adapters: bool) -> float:
    """Return the bytes of a round. Raises RuntimeError."""
    job = _JOB.format(test=fleet.base / "test", adapters=str(adapters).lower(), rounds=3 if quick else 6)
    rounds = trained(fleet, f"adapters-{adapters}", {"adapters.py": _MODEL, "job.toml": job}, DEVICES)
    # The first round's bytes have those of the preparation among them.
    return float(median(sum(to + back for to, back in each.tunnel.values()) for each in rounds[1:]))
