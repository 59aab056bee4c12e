# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): scripts of torch.distributed over two hosts, beside torchrun with as many ranks.

PyTorch's own scripts, its DDP tutorial series and minGPT-ddp, are read from a clone of pytorch/examples,
which PYTORCH_EXAMPLES names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.experiment import Experiment, Run, Unmeasured
from bench.rows import Row, summary
from system.joined import JoinedHosts, joined
from system.support import why_not

EXAMPLES = "PYTORCH_EXAMPLES"
SHIM = Path(__file__).with_name("on_cpu.py")
EMULATION = (
    "both hosts and their devices are processes of one machine, in namespaces of their own; the hosts are "
    "joined by a veth pair, without encryption"
)
PEER = "torchrun --nproc-per-node 4"
SECONDS = 240.0
DEVICES = "csd0.a,csd0.b"
_CHARACTERS = 3000
_GPT = {
    "data_config": {"path": "input.txt", "block_size": 32, "train_split": 0.9, "truncate": 1.0},
    "gpt_config": {"n_layer": 2, "n_head": 2, "n_embd": 32},
    "trainer_config": {
        "max_epochs": 2,
        "batch_size": 32,
        "data_loader_workers": 0,
        "grad_norm_clip": 1.0,
        "snapshot_path": "gpt_snapshot.pt",
        "save_every": 1,
        "use_amp": False,
    },
    "optimizer_config": {"weight_decay": 0.1, "learning_rate": 3e-4},
}
RESTARTED = """\
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
begin = torch.zeros(1, dtype=torch.int64)
if rank == 0 and os.path.exists("snapshot.pt"):
    saved = torch.load("snapshot.pt")
    begin += saved["EPOCHS_RUN"]
    model.load_state_dict(saved["MODEL_STATE"])
dist.broadcast(begin, 0)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for epoch in range(int(begin), 6):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if rank == 0 and epoch == 3 and first and os.environ.get("WAITS"):
        print("kill", flush=True)
        time.sleep(600)
    generator = torch.Generator().manual_seed(100 * epoch + rank)
    for _ in range(8):
        inputs = torch.randn(32, 20, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save({"MODEL_STATE": model.module.state_dict(), "EPOCHS_RUN": epoch + 1}, "new.pt")
        os.replace("new.pt", "snapshot.pt")
dist.barrier()  # gloo aborts a rank whose peer has closed its connections while it still works
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class Script:
    """A script, the files that it needs beside it, its words, and the snapshot that it leaves."""

    figure: str
    what: str
    files: tuple[Path, ...]
    words: tuple[str, ...]
    snapshot: str
    key: str = "MODEL_STATE"
    settings: str = "{}"
    kills: bool = False


@dataclass(slots=True)
class _Found:
    difference: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)


def measure(run: Run) -> list[Row]:
    """Return rows of each script: the largest difference of a parameter to torchrun's, and seconds."""
    if complaint := why_not():
        raise Unmeasured(f"no fleet: {complaint}")
    if not all(map(shutil.which, ("ip", "nsenter"))):
        raise Unmeasured("there is no 'ip' or no 'nsenter' to join two hosts")
    rows, found = list[Row](), dict[str, _Found]()
    with tempfile.TemporaryDirectory(prefix="millpond-launch-") as base:
        scripts = _scripts(Path(base))
        with joined(Path(base), (("csd0",), ("csd0",))) as hosts:
            run.say("two hosts with one device each are ready")
            for number in range(1 if run.quick else run.repeats):
                for script in scripts:
                    one = found.setdefault(script.figure, _Found())
                    _compare(hosts, script, Path(base, f"{script.figure}-{number}"), one)
                    run.say(f"{script.figure}: {one.seconds[-1]:.1f} s, torchrun {one.theirs[-1]:.1f} s")
    for script in scripts:
        rows += _rows(script, found[script.figure])
    if not os.environ.get(EXAMPLES):
        why = f"not measured: {EXAMPLES} names no clone of github.com/pytorch/examples"
        rows += [summary(f"launch_hosts_{name}_difference", why, [], "") for name in ("tutorial", "mingpt")]
    return rows


def _rows(script: Script, found: _Found) -> list[Row]:
    name, about = f"launch_hosts_{script.figure}", script.what
    largest = f"{about}: largest difference of a parameter to torchrun's"
    return [
        summary(f"{name}_difference", largest, found.difference, "", peer=PEER, emulation=EMULATION),
        summary(f"{name}_s", f"{about}: seconds", found.seconds, "s", emulation=EMULATION),
        summary(f"{name}_torchrun_s", f"{about}: seconds under torchrun", found.theirs, "s", peer=PEER),
    ]


def _scripts(base: Path) -> list[Script]:
    own = base / "restarted.py"
    own.write_text(RESTARTED)
    what = "a script with a snapshot, of which a device is killed with --max-restarts 3"
    found = [Script("restart", what, (own,), (own.name,), "snapshot.pt", kills=True)]
    if not (clone := os.environ.get(EXAMPLES)):
        return found
    shim = Path(shutil.copy(SHIM, base))  # a file below this folder would keep its path
    tutorial = _copied(Path(clone), "ddp-tutorial-series", ("multigpu_torchrun.py", "datautils.py"), base)
    modules = ("main.py", "model.py", "trainer.py", "char_dataset.py", "data/input.txt")
    gpt = _copied(Path(clone), "minGPT-ddp/mingpt", modules, base)
    text = gpt[-1].read_text()[:_CHARACTERS]
    gpt[-1].write_text(text)
    settings = json.dumps(_GPT)
    return [
        *found,
        Script("tutorial", "multigpu_torchrun.py of PyTorch's DDP tutorial, 5 epochs", (shim, *tutorial),
               (shim.name, "multigpu_torchrun.py", "5", "1"), "snapshot.pt"),
        Script("mingpt", f"minGPT-ddp with 2 layers, 2 epochs of {_CHARACTERS} characters", (shim, *gpt),
               (shim.name, "main.py"), "gpt_snapshot.pt", "model_state", settings),
    ]  # fmt: skip


def _copied(clone: Path, folder: str, names: Sequence[str], base: Path) -> list[Path]:
    """Copy files of the clone, which may be a bare one."""
    found = []
    for name in names:
        path = base / folder.partition("/")[0] / Path(name).name
        path.parent.mkdir(exist_ok=True)
        show = ["git", "-C", str(clone), "show", f"HEAD:distributed/{folder}/{name}"]
        path.write_bytes(subprocess.run(show, check=True, capture_output=True).stdout)
        found.append(path)
    return found


def _compare(hosts: JoinedHosts, script: Script, folder: Path, found: _Found) -> None:
    folder.mkdir()
    began = time.monotonic()
    theirs = _under_torchrun(script, folder / "torchrun")
    found.theirs.append(time.monotonic() - began)
    began = time.monotonic()
    ours = _launched(hosts, script, folder / "launched")
    found.seconds.append(time.monotonic() - began)
    found.difference.append(max(_difference(theirs, each) for each in ours))


def _under_torchrun(script: Script, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    for file in script.files:
        shutil.copy(file, folder)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = os.environ | {"SETTINGS": script.settings}
    command = [*torchrun, *script.words]
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"torchrun has failed: {done.stdout[-2000:]}{done.stderr[-8000:]}")
    return _state(script, folder)


def _launched(hosts: JoinedHosts, script: Script, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return the states of the workers that have left one."""
    options: list[str | Path] = [
        "--devices",
        DEVICES,
        "--output",
        folder,
        "--env",
        f"SETTINGS={script.settings}",
    ]
    for file in script.files[1:]:
        options += ["--file", file]
    if script.kills:
        options += ["--max-restarts", "3", "--env", "WAITS=1"]
    program: list[str | Path] = [script.files[0], *script.words[1:]]
    with hosts.begin(*options, "--", *program) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "[host.a] kill\n":
                hosts.fleets[1].agent("csd0").kill()
        _, errors = process.communicate(timeout=60)
    if process.returncode:
        raise RuntimeError(f"the launch has failed: {''.join(lines[-20:])}{errors}")
    return [_state(script, each) for each in sorted(folder.iterdir()) if (each / script.snapshot).exists()]


def _state(script: Script, folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / script.snapshot, weights_only=True)[script.key]
    return found


def _difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    if one.keys() != other.keys():
        return float("inf")
    return max((one[name] - other[name]).abs().max().item() for name in one)


EXPERIMENT = Experiment(
    "launch_hosts",
    "Scripts of torch.distributed over two hosts, beside torchrun",
    measure,
    figures=("launch_hosts_restart_difference",),
)
