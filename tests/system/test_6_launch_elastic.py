# SPDX-License-Identifier: Apache-2.0
"""Launches under torch's elastic agents: a script with checkpoints goes on when a device dies and comes."""

from __future__ import annotations

import re
import shutil

import pytest

from .launching import write
from .support import Emulation

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no 'ip' to ask what is forwarded"),
]

CHECKPOINTED = """\
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
path = os.path.join(os.environ["MILLPOND_SHARED"], "state.pt")
first, size = dist.get_rank() == 0, dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
begin = torch.zeros(1, dtype=torch.int64)
if first and os.path.exists(path):
    saved = torch.load(path)
    begin += saved["step"] + 1
    model.load_state_dict(saved["model"])
dist.broadcast(begin, 0)
model = DistributedDataParallel(model)
for step in range(begin.item(), 7):
    if first and step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if size == 3:  # otherwise all are started again when the last one comes
            print("kill", flush=True)
        time.sleep(600)
    if first and step == 5 and size < 3:
        print("alone", flush=True)
        time.sleep(600)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    if first:
        torch.save({"step": step, "model": model.module.state_dict()}, path + ".new")
        os.replace(path + ".new", path)
        print(f"step {step} of {size}: loss {loss.item():.5f}", flush=True)
    dist.barrier()
dist.destroy_process_group()
"""
QUICK = ["--rdzv-conf", "last_call_timeout=10"]


def test_a_script_goes_on_when_a_device_dies_and_comes(ready: Emulation) -> None:
    options = ["--devices", "csd0,csd1", "--nnodes", "2:3", "--max-restarts", "3", *QUICK]
    options += ["--shared", str(ready.base / "kept")]
    script = write(ready, "checkpointed.py", CHECKPOINTED)
    lines = []
    with ready.begin("launch", *options, "--", script) as process:
        for line in process.stdout:
            lines.append(line.rstrip())
            if line == "[host] kill\n":
                ready.agent("csd1").kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, (lines, errors)
    steps = [found.groups() for line in lines if (found := re.search(r"step (\d) of (\d): loss (.*)", line))]
    assert [int(step) for step, _, _ in steps] == list(range(7)), lines
    assert [size for _, size, _ in steps][5:] == ["3"] * 2
    assert any(line.startswith("[all] csd1 is lost: ") for line in lines) and "[all] csd1 is back" in lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nnodes", "x"), "this is neither N nor MIN:MAX"),
        (("--nnodes", "1:2"), "--nnodes 1:2: the launch has 4 workers"),
        (("--nnodes", "5"), "--nnodes 5:5: the launch has 4 workers"),
        (("--rdzv-conf", "a"), "--rdzv-conf a: this is not KEY=VALUE"),
        (("--private", "--max-restarts", "1"), "--private scripts meet nobody"),
    ],
)
def test_a_mistake_gets_one_line(shared_fleet: Emulation, arguments: tuple[str, ...], words: str) -> None:
    result = shared_fleet.millpond("launch", *arguments, "--", write(shared_fleet, "a.py", "pass\n"))
    (line,) = result.err.splitlines()
    assert (result.code, words in line) == (2, True), result
