# SPDX-License-Identifier: Apache-2.0
"""The data sets of a service: names, links in them, what cannot be read; and what is kept of runs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

import millpond.data
from millpond.base.errors import LocalError, Refused
from millpond.data.streaming import kept_runs, server
from millpond.data.streaming.kept_runs import KeptRuns
from millpond.data.streaming.protocol.leases import EpochState
from millpond.data.streaming.protocol.service import KeptRun
from millpond.data.streaming.served_set import naming
from millpond.train.balance.curve import Ints
from millpond.train.data.columns import Packed

from ..waiting import eventually
from .served import SAMPLES, images, server_of, service


@pytest.mark.parametrize("name", ["./images", "images/", ".//images", "other/../images", "link"])
def test_a_data_set_has_one_name_for_its_runs(folder: Path, name: str) -> None:
    (folder / "other").mkdir()
    (folder / "link").symlink_to("images")
    with service(folder) as where:
        found = []
        for _, batch in millpond.data.stream(f"{where}/images", batch=8, run="shared"):
            found += batch.tolist()
            if len(found) == 48:
                break
        for _, batch in millpond.data.stream(f"{where}/{name}", batch=8, run="shared"):
            found += batch.tolist()
    assert sorted(found) == list(range(SAMPLES))


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "ring", "images/images.npy"])
def test_a_name_that_no_folder_can_have_is_refused(folder: Path, name: str) -> None:
    (folder / "ring").symlink_to("ring")
    with service(folder) as where, pytest.raises(Refused, match="the data service has no folder '"):
        list(millpond.data.stream(f"{where}/{name}", patience=1.0))


@pytest.mark.parametrize("place", ["images.npy", "more", "more/deep.npy"])
def test_a_link_that_leads_out_of_the_services_folder_is_refused(tmp_path: Path, place: str) -> None:
    images(tmp_path / "elsewhere")
    images(tmp_path / "root" / "images")
    link = tmp_path / "root" / "images" / place
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "elsewhere" / ("" if place == "more" else "images.npy"))
    refused = pytest.raises(Refused, match=f"does not follow the link '{link.name}' to elsewhere")
    with service(tmp_path / "root") as where, refused:
        list(millpond.data.stream(f"{where}/images", batch=8))


def test_links_within_the_services_folder_are_followed(folder: Path) -> None:
    (folder / "linked").mkdir()
    for name in ("images.npy", "labels.npy"):
        (folder / "linked" / name).symlink_to(folder / "images" / name)
    (folder / "linked" / "self").symlink_to(folder / "linked")
    with service(folder) as where:
        assert len(list(millpond.data.stream(f"{where}/linked", batch=SAMPLES))) == 1


def test_an_error_of_a_library_names_the_sample() -> None:
    def read(indices: Ints) -> Packed:
        if 7 in indices:
            raise KeyError("pixels")
        return Packed(b"", (), 0)

    assert naming(read)(np.arange(7)) == Packed(b"", (), 0)
    with pytest.raises(LocalError, match=r"^sample 7: KeyError: 'pixels'$"):
        naming(read)(np.arange(32))


def test_a_sample_that_cannot_be_read_is_told_by_name_and_others_go_on(folder: Path) -> None:
    def broken(sample: tuple[Tensor, Tensor]) -> Tensor:
        if int(sample[1]) == 57:
            raise OSError("broken data stream")
        return sample[0]

    with service(folder, transforms={"broken": broken}) as where:
        other = iter(millpond.data.stream(f"{where}/images", batch=8, memory=2000))
        found = next(other)[1].tolist()
        told = r"sample 57: the transform of a sample failed: OSError"
        with pytest.raises(Refused, match=told):
            list(millpond.data.stream(f"{where}/images", batch=8, transform="broken", patience=2.0))
        found += [label for _, batch in other for label in batch.tolist()]
    assert sorted(found) == list(range(SAMPLES))


def test_a_file_that_is_damaged_is_told_by_name(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows").mkdir()
    offsets, text = np.array([0, 1, 2], np.int32), b"a\xff"
    buffers = pyarrow.py_buffer(offsets.tobytes()), pyarrow.py_buffer(text)
    column = pyarrow.StringArray.from_buffers(2, *buffers)
    parquet.write_table(pyarrow.table({"name": column}), tmp_path / "rows" / "0.parquet")
    with service(tmp_path) as where, pytest.raises(Refused, match=r"0\.parquet is not a whole Parquet file"):
        list(millpond.data.stream(f"{where}/rows", batch=8, patience=2.0))


@pytest.mark.expected_log("data service: internal error")
def test_a_set_that_a_library_cannot_open_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: object) -> None:
        raise KeyError("magic")

    monkeypatch.setattr(server, "open_set", fails)
    with service(folder) as where, pytest.raises(Refused, match="has failed: KeyError: 'magic'"):
        list(millpond.data.stream(f"{where}/images", patience=2.0))


def test_a_kept_run_of_a_set_that_has_changed_is_refused_each_time(folder: Path) -> None:
    with service(folder, state=folder / "state") as where:
        next(iter(millpond.data.stream(f"{where}/images", batch=8, run="kept")))
        state = millpond.data.stream(f"{where}/images", run="other").state_dict()
    images(folder / "images", SAMPLES - 20)
    with service(folder, state=folder / "state") as where:
        for _ in range(2):
            with pytest.raises(Refused, match="'images' has changed since the run 'kept' began: it has 180"):
                list(millpond.data.stream(f"{where}/images", batch=8, run="kept"))
            stream = millpond.data.stream(f"{where}/images", batch=8)
            stream.load_state_dict(state)
            with pytest.raises(Refused, match="is of 200 samples; the data set has 180"):
                list(stream)


def test_of_many_sets_the_last_ones_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that opens no more sets would be of no use once somebody has opened its most."""
    opened, open_set = [], server.open_set

    def opens(folder: Path, *arguments: object) -> object:
        opened.append(folder.name)
        return open_set(folder, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(server, "open_set", opens)
    monkeypatch.setattr(server, "_MOST_SETS", 2)
    for name in "abc":
        images(tmp_path / name)
    with service(tmp_path) as where:
        for name in "abacab":
            next(iter(millpond.data.stream(f"{where}/{name}", batch=8)))
    assert "".join(opened) == "abcb"


def run(epoch: int) -> KeptRun:
    return KeptRun(EpochState(epoch), {"one": ((0, 3),)}, {"turn": epoch}, "set")


@pytest.mark.parametrize("in_folder", [True, False])
def test_runs_in_memory_are_bounded_and_those_in_a_folder_are_all_there(
    tmp_path: Path, in_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_runs, "_MOST", 2)
    kept = KeptRuns(tmp_path / "state" if in_folder else None)
    for number, key in enumerate("abca"):
        kept.keep(key, run(number))
    assert kept.get("a") == run(3) and kept.get("c") == run(2)
    assert kept.get("b") == (run(1) if in_folder else None)
    assert kept.get("none") is None
    again = KeptRuns(tmp_path / "state" if in_folder else None)
    assert again.get("a") == (run(3) if in_folder else None)


def test_files_that_changed_first_are_removed_whatever_the_clock_says_and_damaged_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_runs, "_MOST_FILES", 2)
    KeptRuns(tmp_path).keep("old", run(1))
    os.utime(tmp_path / "old.run", (1 << 33, 1 << 33))  # of a clock that was set back since
    KeptRuns(tmp_path).keep("new", run(2))
    kept = KeptRuns(tmp_path)
    assert kept.get("new") == run(2)
    KeptRuns(tmp_path).keep("newest", run(3))
    kept = KeptRuns(tmp_path)
    assert kept.get("old") is None and not (tmp_path / "old.run").exists()
    (tmp_path / "bad.run").write_bytes(b"\xc1")
    with pytest.raises(LocalError, match=r"bad\.run is no state of a run"):
        kept.get("bad")


def test_a_service_forgets_runs_that_all_have_left(tmp_path: Path) -> None:
    images(tmp_path / "images")
    with server_of(tmp_path, grace=0.2) as (where, server):
        for number in range(3):
            stream = millpond.data.stream(f"{where}/images", batch=50, run=f"run {number}")
            assert len(list(stream)) == SAMPLES // 50
        eventually(lambda: not server._runs._runs, "runs without consumers are forgotten")
        first = [label for _, batch in stream for label in batch.tolist()]  # the second epoch goes on
        assert stream.state_dict()["epoch"] == 1 and sorted(first) == list(range(SAMPLES))
