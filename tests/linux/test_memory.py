# SPDX-License-Identifier: Apache-2.0
"""Memory: shared, sealed and mapped, and what malloc gives back."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from millpond.linux import memory

SIZE = 3 * 4096 + 8
OTHER = """
import sys
from millpond.linux import memory
view = memory.map_first(int(sys.argv[1]), int(sys.argv[2])).data
view[-4:] = b"back"
print("mapped", flush=True)
sys.stdin.readline()
print(bytes(view[:5]).decode(), flush=True)
for size in (0, int(sys.argv[2]) - 1, int(sys.argv[2]) + 1):
    try:
        memory.map_first(int(sys.argv[1]), size)
    except (OSError, ValueError) as error:
        print(type(error).__name__, flush=True)
"""


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = memory.make("of the tests")
    yield made
    os.close(made)


def test_two_processes_see_the_same_until_both_have_gone(descriptor: int) -> None:
    argv = [sys.executable, "-c", OTHER, str(descriptor), str(SIZE)]
    with subprocess.Popen(
        argv, pass_fds=[descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == "mapped\n"
        view = memory.map_second(descriptor, SIZE).data
        assert len(view) == SIZE and view[-4:] == b"back"
        view[:5] = b"there"
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.read().split() == ["there", *(3 * ["PermissionError"])]
    assert view[:5] == b"there"
    view[-1] = 1


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_what_was_mapped_second_keeps_its_size(descriptor: int, size: int) -> None:
    first = memory.map_first(descriptor, SIZE).data
    second = memory.map_second(descriptor, SIZE).data
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, size)
    first[-1] = 7
    assert second[-1] == 7


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1, 2 * SIZE])
def test_memory_of_another_size_is_refused(descriptor: int, size: int) -> None:
    if size:
        memory.map_first(descriptor, size)
    with pytest.raises(ValueError, match=f"the shared memory has {size} bytes, not {SIZE}"):
        memory.map_second(descriptor, SIZE)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memory_that_was_sealed_so_that_it_may_shrink_is_refused(descriptor: int, seals: int) -> None:
    os.ftruncate(descriptor, SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
    for map_ in (memory.map_second, memory.map_read_only):
        with pytest.raises(ValueError, match="cannot be kept from shrinking"):
            map_(descriptor, SIZE)


def test_what_was_mapped_first_keeps_its_size(descriptor: int) -> None:
    memory.map_first(descriptor, SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, SIZE - 1)


def test_memory_that_was_sealed_as_it_should_be_is_taken(descriptor: int) -> None:
    memory.map_first(descriptor, SIZE)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    assert len(memory.map_second(descriptor, SIZE).data) == SIZE


def test_what_is_mapped_to_read_shows_the_others_writes_and_takes_none(descriptor: int) -> None:
    owner = memory.map_first(descriptor, SIZE)
    read = memory.map_read_only(descriptor, SIZE)
    for value in (1, 2):
        owner.data[5000] = value
        assert read[5000] == value and len(read) == SIZE
    with pytest.raises(TypeError):
        read[0] = 1
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)


def test_frozen_memory_is_written_by_nobody_new(descriptor: int) -> None:
    owner = memory.map_first(descriptor, SIZE)
    memory.freeze(descriptor)
    for map_ in (memory.map_first, memory.map_second):
        with pytest.raises(PermissionError):
            map_(descriptor, SIZE)
    owner.data[0] = 9
    assert memory.map_read_only(descriptor, SIZE)[0] == 9


def test_memory_that_was_sealed_cannot_be_frozen(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    with pytest.raises(ValueError, match="cannot be kept from other writers"):
        memory.freeze(descriptor)


def test_the_descriptor_goes_only_to_whom_it_is_passed(descriptor: int) -> None:
    code = f"import os; os.fstat({descriptor})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, close_fds=False)
    assert b"Bad file descriptor" in done.stderr


SCRIPT = """
import os
from pathlib import Path
from millpond.linux.malloc import trim_heap

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])

blocks = [bytes(range(256)) * 32 for _ in range(2000)]  # 16 MB in blocks of the heap
last = bytes(20000)  # above them
blocks.clear()
before = resident()
trim_heap()
print((before - resident()) * os.sysconf("SC_PAGESIZE") > 8 << 20)
"""


def test_what_is_free_goes_back_to_the_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
