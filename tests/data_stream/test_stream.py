# SPDX-License-Identifier: Apache-2.0
"""Streams of a data service over TCP: each sample once, resumed exactly, whatever ends and comes back."""

from __future__ import annotations

import copy
import os
import runpy
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import millpond.data
from millpond.base.errors import LocalError, Refused, RemoteError
from millpond.data import streaming
from millpond.data.streaming import connection
from millpond.data.streaming.client import StreamClient, StreamSource, TcpAddress
from millpond.data.streaming.dataset import StreamDataset
from millpond.data.streaming.loader import StreamLoader
from millpond.data.streaming.protocol.tuner import StreamTuner
from millpond.data.streaming.served_set import open_set
from millpond.data.streaming.transforms.functions import functions_of, in_process
from millpond.train.data import labelled_images
from millpond.train.data.columns import Packed, unpack

from ..forking import TRAINING, Command, server
from .served import SAMPLES, double, images, service, tars

TRANSFORMS = """\
from pathlib import Path

def inverted(sample):
    return 1 - sample[0], -sample[1]

def _hidden(sample):
    return sample
"""
KNOWN = "what only consumers know"


def labels(stream: Any) -> list[int]:
    """Return the labels of an iteration's batches."""
    return [label for _, batch in stream for label in batch.tolist()]


def test_an_epoch_has_each_sample_once_and_decoded(tmp_path: Path) -> None:
    pixels, _ = images(tmp_path / "images")
    with service(tmp_path) as where:
        stream, seen = millpond.data.stream(f"{where}/images", batch=32), []
        for _ in range(2):
            found = list(stream)
            assert [len(batch) for _, batch in found] == [32] * 6 + [8]
            for inputs, batch in found:
                wanted = torch.from_numpy(pixels[batch].astype(np.float32) / np.float32(255))
                assert torch.equal(inputs, wanted[:, None])
            seen.append([label for _, batch in found for label in batch.tolist()])
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(SAMPLES)) and seen[0] != seen[1]


@pytest.mark.parametrize("batch", [None, 16])
def test_images_decoded_at_the_server_are_the_same(folder: Path, batch: int | None) -> None:
    own = labelled_images.load(folder, "images", "npy")
    for at in ("server", "worker"):
        with service(folder) as where:
            for inputs, label in millpond.data.stream(f"{where}/images", batch=batch, at=at):
                wanted = own[int(label)] if batch is None else own.__getitems__(label.tolist())
                assert torch.equal(inputs, wanted[0])


def test_transforms_are_those_of_the_service(tmp_path: Path) -> None:
    pixels, _ = images(tmp_path / "images")
    with service(tmp_path, transforms={"double": double}) as where:
        for inputs, label in millpond.data.stream(f"{where}/images", transform="double"):
            assert inputs.max() == 2 * np.float32(pixels[int(label)].max()) / np.float32(255)
        with pytest.raises(Refused, match="no transform 'triple'"):
            list(millpond.data.stream(f"{where}/images", transform="triple"))


def test_a_read_that_never_ends_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep-alives alone would have the consumer wait for ever."""
    monkeypatch.setattr(connection, "READ_SECONDS", 0.2)
    go_on = threading.Event()

    def hang(sample: Any) -> Any:
        assert sample[1] == 0 or go_on.wait(60)  # the first one is looked at when the set is opened
        return sample

    with service(folder, transforms={"hang": hang}, keep_alive=0.1) as where:
        with pytest.raises(Refused, match=r"not been read within 0\.2 s: the flash does not answer"):
            list(millpond.data.stream(f"{where}/images", transform="hang"))
        go_on.set()


def test_shards_are_read_from_front_to_back(tmp_path: Path) -> None:
    tars(tmp_path / "tars")
    with service(tmp_path) as where:
        stream = millpond.data.stream(f"{where}/tars", batch=8, shuffle=10)
        found = [int(text) for batch in stream for text in batch["txt"]]
    assert sorted(found) == list(range(SAMPLES))
    places = {shard: [at for at, index in enumerate(found) if index // 20 == shard] for shard in range(10)}
    assert all(max(each) - min(each) <= 40 for each in places.values())


def test_row_groups_of_parquet_files_are_shards(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows").mkdir()
    table = pyarrow.table({"x": [float(index) for index in range(SAMPLES)], "name": list("ab" * 100)})
    parquet.write_table(table, tmp_path / "rows" / "0.parquet", row_group_size=20)
    with service(tmp_path) as where:
        found = list(millpond.data.stream(f"{where}/rows", batch=16, shuffle=5))
    values = [int(value) for batch in found for value in batch["x"].tolist()]
    assert sorted(values) == list(range(SAMPLES))
    assert [name for batch in found for name in batch["name"]] == ["ab"[value % 2] for value in values]
    groups = [[at for at, value in enumerate(values) if value // 20 == group] for group in range(10)]
    assert all(max(each) - min(each) <= 30 for each in groups)


@pytest.mark.parametrize(
    "loader",
    [
        {"batch_size": 7, "num_workers": 2},
        {"batch_size": 7, "num_workers": 2, "persistent_workers": True},
        {"batch_size": None, "num_workers": 1, "multiprocessing_context": "spawn"},
    ],
)
def test_processes_of_a_data_loader_divide_each_epoch(where: str, loader: dict[str, Any]) -> None:
    stream = millpond.data.stream(f"{where}/images", batch=None if loader["batch_size"] else 50)
    batches = DataLoader(stream, **loader)
    for _ in range(2):
        torch.manual_seed(0)
        assert sorted(labels(batches)) == list(range(SAMPLES))


def test_epochs_are_whole_whatever_a_script_seeds_and_copies(where: str) -> None:
    stream = millpond.data.stream(f"{where}/images", batch=16)
    for each, processes in ((stream, 2), (stream, 1), (copy.deepcopy(stream), 2)):
        torch.manual_seed(0)
        loader = DataLoader(each, batch_size=None, num_workers=processes)
        assert sorted(labels(loader)) == list(range(SAMPLES))


def test_a_loader_that_is_left_early_goes_on_with_the_rest_at_once(where: str) -> None:
    loader, seen = StreamLoader(millpond.data.stream(f"{where}/images", batch=16), 2), list[int]()
    for _, batch in loader:
        seen += batch.tolist()
        if len(seen) > 40:
            break
    began = time.monotonic()
    rest = labels(loader)
    assert sorted(seen + rest) == list(range(SAMPLES))
    assert time.monotonic() - began < 8, "leases of processes that have ended wait for nobody"


def test_a_loader_with_processes_and_a_sole_consumer_go_on_from_each_other(where: str) -> None:
    """Two processes, then one, then none, then two: a state is what was trained on, not what was read."""
    found: list[int] = []
    state: dict[str, Any] = {}
    for workers, steps in ((2, 7), (1, 5), (0, 4), (2, 1000)):
        stream = millpond.data.stream(f"{where}/images", batch=8)
        loader: Any = StreamLoader(stream, workers) if workers else stream
        if state:
            loader.load_state_dict(state)
        for step, (_, batch) in enumerate(loader, 1):
            found += batch.tolist()
            state = loader.state_dict()
            if step == steps:
                break
    assert sorted(found) == list(range(SAMPLES))
    loader.load_state_dict(loader.state_dict())
    assert sorted(labels(loader)) == list(range(SAMPLES))  # the next epoch


def test_single_samples_resume_exactly(where: str) -> None:
    stream, found = millpond.data.stream(f"{where}/images"), []
    for _, label in stream:
        found.append(int(label))
        if len(found) == 45:
            break
    other = millpond.data.stream(f"{where}/images")
    other.load_state_dict(stream.state_dict())
    found += [int(label) for _, label in other]
    assert sorted(found) == list(range(SAMPLES))


def test_a_slow_consumer_holds_up_no_other(tmp_path: Path) -> None:
    images(tmp_path / "images", 4000, 64)
    with service(tmp_path, readers=1) as where:
        slow = iter(millpond.data.stream(f"{where}/images", batch=10, memory="100 KiB"))
        next(slow)
        other = millpond.data.stream(f"{where}/images", batch=100)
        assert len(labels(other)) == 4000
        assert len(next(slow)[1]) == 10


def test_several_consumers_of_a_run_share_an_epoch(where: str) -> None:
    found: Counter[int] = Counter()

    def consume(stream: StreamDataset) -> None:
        found.update(labels(stream))

    streams = [millpond.data.stream(f"{where}/images", batch=4, run="shared", chunk=4) for _ in range(3)]
    threads = [threading.Thread(target=consume, args=(each,)) for each in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found and max(found.values()) == min(found.values()) and len(found) == SAMPLES


def test_strangers_and_wrong_names_are_refused(tmp_path: Path) -> None:
    images(tmp_path / "root" / "images")
    images(tmp_path / "secret")
    with service(tmp_path / "root", secret=KNOWN) as where:
        with pytest.raises(Refused, match="the secret is not that"):
            list(millpond.data.stream(f"{where}/images", secret=KNOWN[1:]))
        for name in ("none", "../secret", str(tmp_path / "secret")):
            with pytest.raises(Refused, match="no folder"):
                list(millpond.data.stream(f"{where}/{name}", secret=KNOWN))
        assert len(labels(millpond.data.stream(f"{where}/images", secret=KNOWN, batch=9))) == SAMPLES


def test_a_service_that_is_away_is_an_error_after_a_while() -> None:
    with pytest.raises(RemoteError, match="away"):
        list(millpond.data.stream("127.0.0.1:9/images", patience=0.2))


def test_a_stream_is_closed_while_its_service_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = StreamSource(TcpAddress(*silent.getsockname()), "images")
        with StreamClient(source, None, StreamTuner(1, 1 << 20)):
            connection, _ = silent.accept()
            assert connection.recv(1)
    connection.close()


def serve(root: Path, port: int, state: Path | None, *options: str) -> tuple[Command, str]:
    """Start a process that serves; returns it and its address."""
    kept = ["--state", str(state)] if state else []
    program = Path(streaming.__file__).with_name("__main__.py")
    service = server(*TRAINING).start(program, root, "--listen", f"127.0.0.1:{port}", *kept, *options)
    return service, service.stdout.readline().split()[-1]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_service_that_is_killed_goes_on_where_it_was(folder: Path, keeps: bool) -> None:
    state = folder / "state" if keeps else None
    serving, where = serve(folder, 0, state)
    found: list[int] = []
    try:
        for _, batch in millpond.data.stream(f"{where}/images", batch=8, chunk=8, memory=2000):
            found += batch.tolist()
            if len(found) in (48, 120):
                with serving:
                    serving.kill()
                serving, _ = serve(folder, int(where.split(":")[1]), state)
        assert keeps
    except RemoteError as error:
        assert not keeps and "without the state of its runs" in str(error)
    finally:
        with serving:
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(30) == 0
    assert not keeps or sorted(found) == list(range(SAMPLES))


def test_a_file_of_the_command_has_the_transforms(folder: Path) -> None:
    """The service changes the samples that a job's format names, too."""
    (folder / "mine.py").write_text(TRANSFORMS)
    serving, where = serve(folder, 0, None, "--transforms", str(folder / "mine.py"))
    with serving:
        for name, fails in (
            ("inverted", ""),
            ("_hidden", "no transform '_hidden'"),
            ("Path", "no transform"),
        ):
            stream = millpond.data.stream(f"{where}/images", batch=8, transform=name)
            if fails:
                with pytest.raises(Refused, match=fails):
                    list(stream)
            else:
                assert sorted(labels(stream)) == list(range(-SAMPLES + 1, 1))
        serving.send_signal(signal.SIGTERM)
    named = open_set(
        folder / "images", "worker", in_process(functions_of(folder / "mine.py"))("inverted"), "npy"
    )
    (found,) = unpack(*_joined(named.read(np.array([5])))).batches(0, 1)
    assert found[1].tolist() == [-5]


def test_a_file_of_transforms_may_do_what_a_module_does(tmp_path: Path) -> None:
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    (tmp_path / "mine.py").write_text(f"{head}@dataclass\nclass Size:\n    pixels: int\n{TRANSFORMS}")
    assert "inverted" in functions_of(tmp_path / "mine.py")


def test_files_without_transforms_are_refused(tmp_path: Path) -> None:
    for name, text, told in (
        ("none.py", "from pathlib import Path\n", "defines no function"),
        ("bad.py", "1 / 0\n", "ZeroDivisionError"),
        ("ends.py", "raise SystemExit(3)\n", "ends.py: SystemExit: 3"),
        ("no.txt", TRANSFORMS, "is no Python file of transforms"),
        ("missing.py", None, "is no Python file of transforms"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(LocalError, match=told):
            functions_of(tmp_path / name)


def _joined(packed: Packed) -> tuple[bytes, memoryview]:
    return packed.head, memoryview(bytearray().join(packed.pieces))


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "stream-data.md").read_text()
    example = text.partition("```python\n")[2].partition("```")[0]
    images(tmp_path / "digits")
    with service(tmp_path, secret=KNOWN) as where:
        (tmp_path / "example.py").write_text(example.replace("10.0.0.1:7001", where))
        found = runpy.run_path(str(tmp_path / "example.py"), {"secret": KNOWN})
    assert found["epoch"] == 9 and len(found["labels"]) == SAMPLES - 128


def test_a_service_that_cannot_keep_its_state_says_so(folder: Path) -> None:
    with service(folder, state=folder / "state") as where:
        (folder / "state").rmdir()
        with pytest.raises(Refused, match="the state of a run cannot be kept: No such file"):
            list(millpond.data.stream(f"{where}/images", batch=8))


def test_what_a_killed_consumer_had_comes_to_another(folder: Path) -> None:
    with service(folder, grace=0.3) as where:
        child = os.fork()
        if not child:
            batches = iter(millpond.data.stream(f"{where}/images", batch=8, run="both", memory=2000))
            next(batches)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        began = time.monotonic()
        assert sorted(labels(millpond.data.stream(f"{where}/images", batch=8, run="both"))) == list(
            range(SAMPLES)
        )
        assert time.monotonic() - began >= 0.2
