# SPDX-License-Identifier: Apache-2.0
"""The files of launched scripts: those that they see, those that they were sent, those that they save."""

from __future__ import annotations

import os

import pytest

from .launching import write
from .support import Emulation

pytestmark = pytest.mark.timeout(240)

LOOKING = """\
import os, sys
from pathlib import Path
print("uid", os.getuid())
print("beside", *sorted(os.listdir(".")), *sys.argv[1:])
print("volume", *(sorted(os.listdir("/volume")) if Path("/volume").exists() else ["none"]))
print("public", Path("/volume/public/README.txt").exists())
for path in sys.argv[1:]:
    try:
        print(path, "read", Path(path).stat() and os.listdir(path))
    except OSError as error:
        print(path, type(error).__name__)
try:
    Path("/volume/public/written").write_text("x")
    print("public written")
except OSError as error:
    print("public not written")
Path("scratch").write_text("x")
"""


def test_a_script_sees_its_files_and_public_data_only(ready: Emulation) -> None:
    keys, private = str(ready.directory), "/volume/private"
    (ready.base / "extra.txt").write_text("x")
    script = write(ready, "looking.py", LOOKING)
    paths = [private, "/flash", "/var/lib/millpond", "/etc/millpond", keys]
    result = ready.millpond("launch", "--file", ready.base / "extra.txt", "--", script, *paths)
    assert result.code == 0, result
    said: dict[str, list[str]] = {}
    for line in result.out.splitlines():
        said.setdefault(line[1 : line.index("]")], []).append(line[line.index("]") + 2 :])
    beside = f"beside extra.txt looking.py {' '.join(paths)}"
    nothing = [f"{path} FileNotFoundError" for path in paths]
    for name in ("csd0", "csd1"):
        assert said[name] == [
            "uid 64004",
            beside,
            "volume public",
            "public True",
            *nothing,
            "public not written",
        ]
    assert said["host"] == ["uid 64008", *said["csd0"][1:]]  # it sees csd0's public part
    assert said["csd2"][0] == "uid 64002" and "volume private public" in said["csd2"]
    assert any("digits" in line for line in said["csd2"] if line.startswith(f"{private} read"))


SAVING = """\
import os, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
Path("run").mkdir()
Path("run/model.bin").write_bytes(bytes([rank]) * 300_000)
os.symlink("/etc/passwd", "link")
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # all have saved
print("begun", flush=True)
if rank == 1:
    sys.exit(4)
time.sleep(600 if "fail" in sys.argv else 0)
"""


def test_what_is_saved_comes_back_also_after_a_failure(ready: Emulation) -> None:
    folder, script = ready.base / "saved", write(ready, "saving.py", SAVING)
    folder.mkdir()
    (folder / "csd1").mkdir()
    (folder / "csd1" / "run").mkdir()
    (folder / "csd1" / "run" / "model.bin").symlink_to(ready.base / "untouched")
    result = ready.millpond("launch", "--devices", "csd0,csd1", "--output", folder, "--", script, "fail")
    *notes, error = result.err.splitlines()
    assert (result.code, error) == (
        3,
        "millpond: csd0 (rank 1): it ended with exit code 4; the others were ended",
    )
    assert notes[0] == f"millpond: 3 files (900.0 kB) came back to {folder}", result
    assert sorted(notes[1:]) == [
        f"millpond: {name}: left out, as too much or no plain files: link"
        for name in ("csd0", "csd1", "host")
    ]
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}
    assert sorted(found) == [f"{name}/run/model.bin" for name in ("csd0", "csd1", "host")]
    for rank, name in enumerate(("host", "csd0", "csd1")):
        assert found[f"{name}/run/model.bin"].read_bytes() == bytes([rank]) * 300_000
    assert not (ready.base / "untouched").exists() and not found["csd1/run/model.bin"].is_symlink()
    gone = ready.millpond("launch", "--no-host", "--devices", "csd0", "--", script)
    told = "1 file (300.0 kB) written by the script on csd0: gone; --output DIR brings such files back"
    assert (gone.code, gone.err) == (0, f"millpond: {told}\n")


SENT = """\
from pathlib import Path
from data.names import NAMES
print(*sorted(str(path) for path in Path(".").rglob("*") if path.is_file() and path.suffix != ".pyc"))
print(Path("data/bytes").read_bytes() == bytes(range(256)), NAMES)
print(sorted(p.name for p in Path("/volume/public/digits").iterdir()))
"""


def test_files_keep_their_paths_and_public_data_have_one_path(
    ready: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ready, "sent.py", SENT)
    (ready.base / "data" / "deep").mkdir(parents=True)
    (ready.base / "data" / "bytes").write_bytes(bytes(range(256)))
    write(ready, "data/names.py", "NAMES = 'names'\n")
    write(ready, "data/deep/a.txt", "x")
    write(ready, "alone.txt", "x")
    monkeypatch.chdir(ready.base)
    result = ready.millpond("launch", "--devices", "csd0", "--file", "data", "--file", "alone.txt", "sent.py")
    assert result.code == 0, result
    said = ["alone.txt data/bytes data/deep/a.txt data/names.py sent.py", "True names"]
    said.append("['images.npy', 'labels.npy']")
    for name in ("host", "csd0"):
        assert [line for line in result.out.splitlines() if line.startswith(f"[{name}]")] == [
            f"[{name}] {line}" for line in said
        ]


SHARING = """\
import os
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

shared = Path(os.environ["MILLPOND_SHARED"])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if rank == 0:
    (shared / "data").mkdir()
    (shared / "data" / "words").write_bytes(bytes(range(256)) * 4096)
dist.barrier()
assert (shared / "data" / "words").read_bytes() == bytes(range(256)) * 4096
(shared / os.environ["MILLPOND_WORKER"]).write_text(str(rank))
mesh, weights = init_device_mesh("cpu", (size,)), torch.arange(size * 50_000.0)
dcp.save({"w": distribute_tensor(weights, mesh, [Shard(0)])}, checkpoint_id=shared / "ckpt")
fresh = {"w": distribute_tensor(torch.zeros_like(weights), mesh, [Replicate()])}
dcp.load(fresh, checkpoint_id=shared / "ckpt")
assert torch.equal(fresh["w"].to_local(), weights)
print("loaded", sorted(path.name for path in shared.iterdir()), oct(shared.stat().st_mode & 0o777))
dist.barrier()
dist.destroy_process_group()
"""


def test_a_sharded_checkpoint_is_loaded_in_the_launch_that_wrote_it(ready: Emulation) -> None:
    folder, script = ready.base / "shared" / "run", write(ready, "sharing.py", SHARING)
    with ready.client() as client:
        before = client.ledgers()
        result = ready.millpond("launch", "--shared", folder, "--", script)
        assert result.code == 0, f"{result}\n{ready.logs()}"
        after = client.ledgers()
    sent = [after[name].sent["launched"] - before[name].sent["launched"] for name in before]
    assert min(sent) > 200_000  # each device's shard of the checkpoint
    names = ["ckpt", "csd0", "csd1", "csd2", "data", "host"]
    assert result.out.count(f"loaded {names}") == 4, result
    assert sorted(path.name for path in folder.iterdir()) == names
    assert {path.stat().st_uid for path in folder.rglob("*")} == {os.geteuid()}
    shards = [path.name for path in (folder / "ckpt").glob("*.distcp")]
    assert sorted(shards) == [f"__{rank}_0.distcp" for rank in range(4)]
