# SPDX-License-Identifier: Apache-2.0
"""Log files: rotation, and limits of size."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from millpond.linux.logs import BoundedLog

from ..waiting import eventually


def wait_for(folder: Path, text: bytes) -> None:
    eventually(lambda: any(text in path.read_bytes() for path in folder.iterdir()), f"{text!r} is in a log")


def test_keeps_what_a_process_writes(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "jobs" / "a.log")
    subprocess.run(["sh", "-c", "echo out; echo err >&2"], stdout=log.writer, stderr=log.writer, check=True)
    log.close_writer()
    wait_for(tmp_path / "jobs", b"out\nerr\n")
    assert stat.S_IMODE((tmp_path / "jobs" / "a.log").stat().st_mode) == 0o600


def test_is_never_longer_than_two_files(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", most=10_000)
    for number in range(1000):
        os.write(log.writer, b"%0100d\n" % number)
    os.write(log.writer, b"the end\n")
    log.close_writer()
    wait_for(tmp_path, b"the end")
    eventually(lambda: len(list(tmp_path.iterdir())) == 2, "the last rotation is done")
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 10_000 + (1 << 16)


def test_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "a.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        BoundedLog(tmp_path / "a.log")
    assert not (tmp_path / "elsewhere").exists()


def test_who_logs_waits_for_no_reader(tmp_path: Path) -> None:
    program = """
import logging, os, sys
from millpond.linux.logs import UnblockedHandler
logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[UnblockedHandler()])
for number in range(5000):
    logging.info("%d %s", number, "x" * 100)
sys.stdout.write("all logged\\n"); sys.stdout.flush()
if os.fork() == 0:
    logging.info("from a fork")
    os._exit(0)
os.wait()
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout and process.stdout.readline() == b"all logged\n"  # nobody has read the log
        assert process.stdin and process.stderr
        process.stdin.close()
        lines = process.stderr.read().decode().splitlines()
    assert lines[0].startswith("0 ") and "from a fork" in lines
    told = [line for line in lines if "were lost" in line]  # also before the pipe is full
    assert told and sum(int(line.split()[0]) for line in told) + len(lines) - len(told) - 1 == 5000
