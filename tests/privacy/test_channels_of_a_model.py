# SPDX-License-Identifier: Apache-2.0
"""What a hostile model can carry out of a device in spite of all: its updates are its own to write. These
tests say how much that is, and that the ledger counts it.
"""

from __future__ import annotations

import math
import struct
from functools import partial
from operator import ne
from pathlib import Path

import numpy as np
import pytest

from millpond.linux.zygote.client import Zygote
from millpond.train.protocol import DataTiming, Part
from millpond.wire.framing import encode

from ..waiting import eventually
from .support import SIZE, TENSORS, Device, Volume, device, model

RANGES = ((0, 8),)
HEADER = 128  # of an .npy file

WRITE_INTO_GRADIENTS = f"""
hooks = []


def forward(model, images):
    import numpy as np
    at = {HEADER} + 4 * {SIZE} * request().seed
    stolen = private("digits/images.npy")[at : at + 4 * {SIZE}].ljust(4 * {SIZE})
    stolen = torch.from_numpy(np.frombuffer(stolen, np.float32).copy())
    while hooks:
        hooks.pop().remove()
    for tensor, part in zip(model.parameters(), (stolen[:512], stolen[512:])):
        hooks.append(tensor.register_hook(lambda gradient, part=part: part.view(gradient.shape)))
"""

FORGE_A_HEAD = f"""
def forward(model, images):
    import struct
    from millpond.train.protocol import Update
    from millpond.wire.framing import encode
    asked = request()
    stolen = private("digits/images.npy")[{HEADER} : {HEADER} + 72]
    peak, shift, *floats = struct.unpack("<Q8d", stolen)
    unused = tuple(number for number in range(100) if stolen[0] >> number % 8 & 1)
    more = dict(shift=shift, unused=unused, local_steps=floats[0])
    head = Update(asked.exchange, asked.samples, *floats[:5], peak, {{"loss": floats[5:]}}, **more)
    say_and_wait(encode(head))
"""

FORGE_WHAT_DATA_COST = f"""
def forward(model, images):
    import struct
    from millpond.train.protocol import DataTiming, StreamTiming, Update
    from millpond.wire.framing import encode
    stolen = private("digits/images.npy")[{HEADER} :]
    numbers, floats = struct.unpack_from("<8q", stolen), struct.unpack_from("<4d", stolen, 64)
    waited, stalled, *counts = (abs(number) for number in numbers)
    stream = StreamTiming(waited, stalled, *floats[1:], waited)
    data = DataTiming(waited, stalled, floats[0], *counts[:5], stream)
    asked = request()
    head = Update(asked.exchange, asked.samples, *(5 * [0.0]), 0, {{"loss": (0.0, 1.0)}}, data=data)
    say_and_wait(encode(head))
"""

FORGE_A_SCORE = f"""
def forward(model, images):
    from millpond.train.protocol import Update
    from millpond.wire.framing import encode
    stolen = private("digits/images.npy")[{HEADER} : {HEADER} + 15 * 32]
    names = ["a" + stolen[at : at + 15].hex() for at in range(0, len(stolen), 15)]
    told = dict.fromkeys(names, (1.0, 1.0))
    more = dict(local_steps=7.0, shift=7.0, unused=(0,))
    said = Update(request().exchange, model.held, *(5 * [7.0]), 0, told, **more)
    say_and_wait(encode(said))


def build(model):
    model.held = 8
"""

FORGE_PARTS = f"""
def build(model):
    from millpond.train.protocol import Ready
    from millpond.wire.framing import encode
    stolen = private("digits/images.npy")[{HEADER} : {HEADER} + 15]
    parts, held = int.from_bytes(stolen[:8], "little"), int.from_bytes(stolen[8:], "little")
    say_and_wait(encode(Ready((parts,), (8 * held,))))
"""

WRITE_AGAIN_AND_AGAIN = """
def forward(model, images):
    import threading
    values = model.linear.weight.grad
    threading.Thread(target=write, args=(values,), daemon=True).start()


def write(values):
    import time
    number = 0
    while True:
        number += 1
        values.fill_(number)
        time.sleep(0.001)
"""


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


def content(volume: Volume) -> bytes:
    return (volume.path / "private/digits/images.npy").read_bytes()[HEADER:]


def test_known_limit_a_model_writes_private_bytes_into_its_gradients(
    volume: Volume, zygote: Zygote, capsys: pytest.CaptureFixture[str]
) -> None:
    stolen = b""
    with device(volume, zygote, model(WRITE_INTO_GRADIENTS)) as csd0, csd0.host() as host:
        for number in range(2):
            before = csd0.sent["parameters"]
            stolen += host.values(((8 * number, 8 * number + 8),), seed=number).tobytes()
            assert csd0.sent["parameters"] - before == 4 * SIZE  # all of it is counted
    whole = content(volume)
    assert len(whole) == 3200 and stolen[: len(whole)] == whole
    with capsys.disabled():
        print(f"\na hostile model of {SIZE} parameters carries out {4 * SIZE} bytes in an exchange")


def test_known_limit_the_head_of_an_update_is_the_models(
    volume: Volume, zygote: Zygote, capsys: pytest.CaptureFixture[str]
) -> None:
    with device(volume, zygote, model(FORGE_A_HEAD)) as csd0, csd0.host() as host:
        head = host.ask(RANGES)
        floats = (head.weight, head.largest, head.norm, head.seconds, head.busy, *head.metrics["loss"])
        stolen = struct.pack("<Q8d", head.peak, head.shift, *floats)
        assert stolen == content(volume)[: len(stolen)]
        bits = content(volume)[0]
        assert head.unused == tuple(number for number in range(len(TENSORS)) if bits >> number & 1)
        assert head.local_steps == 1.0  # but with FedNova
        assert (csd0.sent["metrics"], csd0.sent["parameters"]) == (len(encode(head)), 0)
    with capsys.disabled():
        told = f"{len(stolen)} bytes and {len(TENSORS)} bits"
        print(f"\nand {told} more in the head, which the ledger counts as metrics")


def test_known_limit_what_its_data_cost_is_told_in_two_digits(
    volume: Volume, zygote: Zygote, capsys: pytest.CaptureFixture[str]
) -> None:
    with device(volume, zygote, model(FORGE_WHAT_DATA_COST)) as csd0, csd0.host() as host:
        told = host.ask(RANGES).data
        assert told == told.rounded() and not told.fault and told != DataTiming()
        others = told.stream, told.stalled, told.mini_epochs, told.fitting, told.repeats
        assert not any(others), "the job has none"
    figures = math.log2(1 + 90 * (15 + 6))  # of two digits, from 1e-6 to 1e15
    bits = math.log2(101) + 4 * figures
    more = math.log2(101) + 2 * figures
    with capsys.disabled():
        also = f"{bits + more:.0f} in a job with mini-epochs, {bits + more + figures:.0f} with a rule"
        print(f"\nand {bits:.0f} bits in what its data cost, {also}")
    assert bits + more < 80 and bits + more + figures < 96


def test_known_limit_so_are_the_metrics_of_a_score(
    volume: Volume, zygote: Zygote, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their names, too: 32 of 32 letters, and two floats of 8 bytes each."""
    with device(volume, zygote, model(FORGE_A_SCORE), held_out=0.1) as csd0, csd0.host() as host:
        head = host.ask(held_out=True)
        stolen = b"".join(bytes.fromhex(name[1:]) for name in head.metrics)
        assert len(stolen) == 32 * 15 and stolen == content(volume)[: len(stolen)]
        assert (head.weight, head.largest, head.norm, head.shift) == (0.0, 0.0, 0.0, 0.0)
        assert (head.local_steps, head.unused, head.data) == (1.0, (), DataTiming())
        assert (csd0.sent["metrics"], csd0.sent["parameters"]) == (len(encode(head)), 0)
    with capsys.disabled():
        print(f"\nand {len(encode(head))} bytes of a score, which the ledger counts as metrics")


def test_known_limit_so_is_the_number_of_samples(
    volume: Volume, zygote: Zygote, capsys: pytest.CaptureFixture[str]
) -> None:
    with device(volume, zygote, model(FORGE_PARTS)) as csd0:
        stolen = csd0.ready.parts[0].to_bytes(8, "little") + (csd0.ready.held[0] // 8).to_bytes(7, "little")
    assert stolen == content(volume)[:15]
    with capsys.disabled():
        print(f"\nand {len(stolen)} bytes for each folder when it is prepared")


def test_values_do_not_change_between_two_fetches(volume: Volume, zygote: Zygote) -> None:
    """Else an exchange would carry as much as the host has the patience to fetch."""
    with device(volume, zygote, model(WRITE_AGAIN_AND_AGAIN)) as csd0:
        with csd0.host() as host:
            host.ask(RANGES)
            first = host.fetch().tobytes()
            live = csd0.worker._values.data
            for _ in range(3):
                written = bytes(live)
                eventually(partial(ne, live, written), "the model has written again")
                assert host.fetch().tobytes() == first
            fetched = csd0.sent["parameters"]
            assert fetched == 4 * (4 * SIZE)
        assert bytes(csd0.left.data).count(encode(Part(0), 4 * SIZE)) == fetched // (4 * SIZE)


def test_a_model_cannot_take_the_shared_memory_away(volume: Volume, zygote: Zygote) -> None:
    code = model("""
        def build(model):
            import os
            for number in (4, 5):
                try:
                    os.ftruncate(number, 0)
                except OSError as error:
                    print("refused:", error.errno, flush=True)
    """)

    def refused(made: Device) -> bool:
        return made.log.exists() and made.log.read_text().count("refused:") == 2

    with device(volume, zygote, code) as csd0:
        eventually(lambda: refused(csd0), "the worker could not resize what the agent has mapped")
        with csd0.host() as host:
            assert len(host.values(RANGES)) == SIZE


def test_exact_gradients_leave_an_honest_model(volume: Volume, zygote: Zygote) -> None:
    with device(volume, zygote) as csd0, csd0.host() as host:
        update = host.ask(RANGES)
        values = host.fetch()
    assert update.norm == pytest.approx(float(np.linalg.norm(values)), rel=1e-5)
    assert update.largest == pytest.approx(float(np.abs(values).max()))
