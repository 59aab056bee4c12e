# SPDX-License-Identifier: Apache-2.0
"""Launched scripts that train on the public data of one device, streamed to all ranks."""

from __future__ import annotations

import shutil

import numpy as np
import psutil
import pytest

from ..waiting import eventually
from .launching import name, write
from .processes import running
from .support import EXAMPLES, Emulation, Result

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no 'ip' to ask what is forwarded"),
]

STREAMED = """\
import hashlib, os, sys
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
import millpond.data, millpond.train

def digest(image, label):
    pixels = np.rint(image * 255).astype(np.uint8).tobytes()
    return int.from_bytes(hashlib.sha256(pixels + bytes([label])).digest()[:6], "big")

torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with millpond.train.group(model, policy="fixed") as group:
    data = millpond.data.stream("csd0:public/digits")
    if sys.argv[1] == "copy":
        found = data.by_index(256)
        data = TensorDataset(*found.batch(range(len(found))))
    for epoch in range(2):
        taken = total = 0
        for images, labels in group.loader(data, batch=96):
            optimizer.zero_grad()
            step = group.step(cross_entropy(model(images), labels, reduction="sum"))
            optimizer.step()
            if step.batches[group.rank]:
                taken += len(labels)
                total += sum(map(digest, images.numpy(), labels.numpy()))
    print("took", taken, total)
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest())
if os.environ["RANK"] == "0":
    images, labels = (np.load(f"/volumes/csd0/public/digits/{name}.npy") for name in ("images", "labels"))
    print("stored", len(labels), sum(map(digest, images / 255, labels)))
"""


def said_by_all(result: Result, word: str) -> list[tuple[str, ...]]:
    """What the workers said behind a word."""
    assert result.code == 0, result
    return [tuple(line.split()[2:]) for line in result.out.splitlines() if line.split()[1:2] == [word]]


def test_all_ranks_train_on_the_streamed_data_of_one_device(ready: Emulation) -> None:
    script = write(ready, "streamed.py", STREAMED)
    with ready.client() as client:
        before = client.ledgers()["csd0"].sent
    streamed = ready.millpond("launch", "--devices", "csd0,csd1", "--", script, "stream", timeout=180)
    with ready.client() as client:
        after = client.ledgers()["csd0"].sent
    (stored,) = said_by_all(streamed, "stored")
    took = said_by_all(streamed, "took")
    assert len(took) == 3 and all(int(count) > 0 for count, _ in took)
    assert tuple(str(sum(int(each[column]) for each in took)) for column in (0, 1)) == stored
    pixels = 64 * int(stored[0])  # of an epoch: host and csd1 take two thirds of them in each of two
    assert pixels < after["volume"] - before["volume"] < 4 * pixels
    weights = said_by_all(streamed, "weights")
    assert len(weights) == 3 and len(set(weights)) == 1
    copied = ready.millpond("launch", "--devices", "csd0,csd1", "--", script, "copy", timeout=180)
    assert said_by_all(copied, "weights") == weights
    eventually(lambda: not services(ready), "no data service is left", 30, 0.1)


def test_plain_ddp_has_as_many_batches_on_each_rank(ready: Emulation) -> None:
    """Of the 130 public digits or so that three ranks do not share evenly, up to two are left out."""
    argv = ("launch", "--devices", "csd0,csd1", "--", EXAMPLES / "streamed_ddp.py", "csd0:public/digits")
    result = ready.millpond(*argv, "--epochs", "2", "--batch", "8", timeout=180)
    assert result.code == 0, result
    told = [line.partition("] ")[2] for line in result.out.splitlines() if "batches" in line]
    assert len(told) == 6 and len({line.partition(": ")[2] for line in told}) == 1, result
    taken = 3 * int(told[0].split()[-2])
    folder = ready.fleet.device_directory("csd0") / "flash" / "public" / "digits"
    assert 0 <= len(np.load(folder / "labels.npy")) - taken < 3


TRANSFORMED = """\
import sys
import millpond.data
for name in sys.argv[1:]:
    try:
        stream = millpond.data.stream("csd0:public/digits", batch=8, transform=name)
        found = [images.shape[1:] for images, _ in stream]
        print("shape", *found[0], len(set(found)))
    except Exception as error:
        print("refused", str(error).replace(chr(10), " / "))
"""
TRANSFORMS = """\
def cropped(sample):
    return sample[0][:, 2:6, 2:6], sample[1]

def ends(sample):
    print("the last words")
    raise SystemExit(3)
"""


def test_a_launchs_transforms_change_the_samples_of_its_streams(ready: Emulation) -> None:
    script, mine = write(ready, "transformed.py", TRANSFORMED), write(ready, "mine.py", TRANSFORMS)
    argv = ("launch", "--devices", "csd0,csd1", "--transforms", mine, "--", script, "cropped", "ends", "none")
    result = ready.millpond(*argv, timeout=180)
    assert said_by_all(result, "shape") == [("1", "4", "4", "1")] * 3
    refused = [" ".join(words) for words in said_by_all(result, "refused")]
    for told in ("the process of the transform 'ends' has ended: the last words", "no transform 'none'"):
        assert sum(told in line for line in refused) == 3, result
    private = ready.millpond("launch", "--private", "--transforms", mine, "--", script, timeout=60)
    assert private.code and "no --input" in private.err and "--transforms" in private.err


def services(fleet: Emulation) -> list[psutil.Process]:
    """Processes of data services."""
    return running(p for p in fleet.processes() if name(p).startswith("data_service."))


REFUSED = """\
import sys
import millpond.data
for where in sys.argv[1:]:
    try:
        print(len(millpond.data.stream(where, batch=8).by_index(8)))
    except Exception as error:
        print("refused", str(error).replace(chr(10), " / "))
"""


def test_streams_that_a_launch_has_not_are_refused_by_name(ready: Emulation) -> None:
    places = (
        "csd2:public/digits",
        "csd0:public/missing",
        "csd0:private/digits",
        "csd0:public/../private/digits",
    )
    script = write(ready, "refused.py", REFUSED)
    result = ready.millpond("launch", "--devices", "csd0", "--", script, *places, timeout=180)
    words = [
        "csd2: no device of this launch, which has csd0",
        "the data service has no folder 'missing'",
        "'csd0:private/digits' is no address of streamed data: of a device, public folders alone are",
        "the data service has no folder '../private/digits'",
    ]
    for worker in ("host", "csd0"):
        said = [line for line in result.out.splitlines() if line.startswith(f"[{worker}] refused ")]
        assert [words[number] in line for number, line in enumerate(said)] == [True] * 4, result


def test_a_private_launch_has_no_streams(ready: Emulation) -> None:
    code = "import os, time, millpond.data\nif os.environ['RANK'] != '0':\n    time.sleep(600)\n"
    script = write(ready, "none.py", f"{code}millpond.data.stream('csd0:public/digits')\n")
    result = ready.millpond("launch", "--private", "--devices", "csd0", "--", script, timeout=180)
    assert result.code == 3 and "csd0: a script of a private launch has no network" in result.out + result.err
