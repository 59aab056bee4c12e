# SPDX-License-Identifier: Apache-2.0
"""A cgroup for the benchmark takes a whole tree of processes, and is gone afterwards. No speed is judged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .balance import load
from .balance.cgroups import PERIOD_US, Cgroup, cgroup
from .experiment import Unmeasured

TREE = """
import subprocess, sys
with subprocess.Popen(["sleep", "60"]) as child:
    print(child.pid, flush=True)
    sys.stdin.read()
    child.kill()
"""


@pytest.fixture
def group() -> Iterator[Cgroup]:
    try:
        with cgroup("millpond-test") as made:
            yield made
    except Unmeasured as error:
        pytest.skip(str(error))


def quota(group: Cgroup) -> str:
    if group.version == 2:
        return (group.folder / "cpu.max").read_text().split()[0].replace("max", "-1")
    return (group.folder / "cpu.cfs_quota_us").read_text().strip()


def test_a_limit_is_set_and_taken_back(group: Cgroup) -> None:
    for processors, expected in ((0.5, PERIOD_US // 2), (1.5, PERIOD_US * 3 // 2), (0.0, PERIOD_US // 10)):
        group.limit(processors)
        assert quota(group) == str(expected)
    group.unlimit()
    assert quota(group) == "-1"


def test_a_tree_moves_in_and_goes_home_after_a_failure(group: Cgroup) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tree:
        assert tree.stdout is not None
        pids = {tree.pid, int(tree.stdout.readline())}
        with pytest.raises(ZeroDivisionError), cgroup("millpond-inner") as inner:
            inner.limit(0.5)
            inner.add(tree.pid)
            assert inner.members() == pids
            raise ZeroDivisionError
        assert not inner.folder.exists()
        assert tree.poll() is None
        assert pids <= {int(pid) for pid in (inner.home / "cgroup.procs").read_text().split()}
        tree.communicate("")


def test_gzip_runs_in_the_group_and_ends_with_its_context(group: Cgroup) -> None:
    with load.gzip(2, group) as running:
        assert group.members() == {process.pid for process in running.processes}
        while running.cpu_seconds() < 0.02:
            assert all(process.is_running() for process in running.processes)
    assert not any(Path(f"/proc/{process.pid}").exists() for process in running.processes)


HOLDS = """
import sys
sys.stdin.readline()
held = b"x" * (32 << 20)
print(len(held), flush=True)
sys.stdin.readline()
held = held + b"x" * (64 << 20)
"""


def test_a_group_tells_what_it_holds_and_ends_what_holds_more_than_its_limit() -> None:
    argv = [sys.executable, "-c", HOLDS]
    try:
        with (
            cgroup("millpond-test", "memory") as group,
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            group.limit_memory(64 << 20)
            group.add(process.pid)
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline()
            assert 32 << 20 <= group.held_memory() < 64 << 20
            assert group.out_of_memory() == 0
            process.communicate(b"\n")
            assert process.returncode == -9
            assert group.out_of_memory() == 1
            assert 32 << 20 < group.most_memory() <= 64 << 20
    except Unmeasured as error:
        pytest.skip(str(error))


def test_so_many_gzip_take_that_share() -> None:
    assert [load.count_for(share) for share in (0.0, 0.5, 0.75)] == [0, 1, 3]
    assert load.count_for(0.75, threads=2) == 6
