# SPDX-License-Identifier: Apache-2.0
"""What a mount's log and statistics say of operations that fail or take long."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from millpond.base.errors import RemoteError
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.fuse import operation_log
from millpond.fs.fuse.abi import Code, Header
from millpond.fs.fuse.operation_log import OperationLog
from millpond.fs.vfs.inode_api import ROOT, CachedAttributes, Node
from millpond.fs.vfs.path_api import causes, os_error

from .support import Server

pytestmark = pytest.mark.expected_log("by process 77|more operations")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def path_of(node: Node) -> str:
    if node == 9:
        raise os_error(errno.ESTALE)
    return f"dir/file{node}"


def header(code: Code, node: int = 5) -> Header:
    return Header(0, code, 1, node, 0, 0, 77)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def operations(clock: Clock, caplog: pytest.LogCaptureFixture) -> OperationLog:
    caplog.set_level(logging.INFO, operation_log.__name__)
    return OperationLog(path_of, clock)


def failed(code: int, cause: BaseException | None = None) -> OSError:
    error = os_error(code)
    error.__cause__ = cause
    return error


def test_an_error_that_a_program_sees_is_a_line(
    operations: OperationLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    cause = RemoteError("csd0 closed the connection")
    operations.answered(header(Code.FSYNC), errno.EIO, clock.now - 0.25, failed(errno.EIO, cause))
    operations.answered(header(Code.READ, 9), errno.ETIMEDOUT, clock.now - 3, failed(errno.ETIMEDOUT))
    assert caplog.messages == [
        "fsync of 'dir/file5' by process 77: EIO, csd0 closed the connection, after 0.25 s",
        "read of node 9 by process 77: ETIMEDOUT, Connection timed out, after 3 s",
    ]
    assert operations.errors == {("fsync", "EIO"): 1, ("read", "ETIMEDOUT"): 1}


def test_what_is_no_failure_is_counted_alone(
    operations: OperationLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    operations.answered(header(Code.LOOKUP), errno.ENOENT, clock.now, failed(errno.ENOENT))
    operations.answered(header(Code.CREATE), errno.ESTALE, clock.now, failed(errno.ESTALE))
    operations.answered(header(Code.LOOKUP), 0, clock.now - 0.5)
    assert caplog.messages == []
    assert operations.errors == {("lookup", "ENOENT"): 1, ("create", "ESTALE"): 1}
    assert sum(operations.latencies.kinds["lookup"]) == 2


def test_a_slow_operation_is_a_line(
    operations: OperationLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    operations.answered(header(Code.FSYNC), 0, clock.now - 9.9)
    operations.answered(header(Code.FSYNC), 0, clock.now - 12)
    assert caplog.messages == ["fsync of 'dir/file5' by process 77: it succeeded, after 12 s"]


def test_lines_are_limited(operations: OperationLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        operations.answered(header(Code.READ), errno.EIO, clock.now, failed(errno.EIO))
    assert len(caplog.messages) == 20
    clock.now += 11
    operations.answered(header(Code.READ), errno.EIO, clock.now, failed(errno.EIO))
    assert caplog.messages[20] == "80 more operations failed or took long" and len(caplog.messages) == 22
    assert operations.errors == {("read", "EIO"): 101}


def test_a_request_that_fails_in_other_ways_is_a_line_too(
    operations: OperationLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    operations.answered(header(Code.READ), errno.EIO, clock.now, RuntimeError("line\nbreak"))
    assert caplog.messages == ["read of 'dir/file5' by process 77: EIO, line break, after 0 s"]
    operations.answered(header(Code.READ), errno.EIO, clock.now)
    assert "no cause is known" in caplog.messages[1]


def test_a_file_has_a_path_on_both_sides(tree: RemoteFs, server: Server, top: Path) -> None:
    (top / "d").mkdir()
    (top / "d" / "f").touch()
    for each in (tree, server.tree):
        assert each.path_of(ROOT) == "/"
        assert each.path_of(each.walk(ROOT, (b"d", b"f")).node) == "d/f"
        with pytest.raises(OSError, match="Stale"):
            each.path_of(Node(1000))


def test_an_error_has_its_cause_from_below(tree: RemoteFs, server: Server) -> None:
    tree.statfs()
    server.drop()
    server.refusing = True
    with pytest.raises(OSError, match="Input/output") as caught:
        tree.statfs()
    assert causes(caught.value) == "nobody there"


def test_a_file_that_stays_stale_says_whose_word_that_is(tree: RemoteFs, server: Server, top: Path) -> None:
    (top / "f").touch()
    node = tree.lookup(ROOT, b"f").node

    def stale(_node: Node) -> CachedAttributes:
        raise os_error(errno.ESTALE)

    server.restart()
    server.tree.getattr = stale  # type: ignore[method-assign]
    server.forget()
    with pytest.raises(OSError, match="Stale") as caught:
        tree.getattr(node)
    assert causes(caught.value) == "the device's server said so to 'fs.getattr'"


def test_a_file_that_is_gone_says_so(tree: RemoteFs, server: Server, top: Path) -> None:
    (top / "f").touch()
    node = tree.lookup(ROOT, b"f").node
    server.restart()
    (top / "f").unlink()
    with pytest.raises(OSError, match="Stale") as caught:
        tree.getattr(node)
    assert causes(caught.value) == "its name: No such file or directory"
