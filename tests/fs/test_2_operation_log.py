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
from millpond.fs.vfs.inode_api import ROOT, Node
from millpond.fs.vfs.path_api import causes, os_error

from .support import Server

pytestmark = pytest.mark.expected_log("by process 77|more operations")


NOW = [1000.0]


def path_of(node: Node) -> str:
    if node == 9:
        raise os_error(errno.ESTALE)
    return f"dir/file{node}"


@pytest.fixture
def operations(caplog: pytest.LogCaptureFixture) -> OperationLog:
    caplog.set_level(logging.INFO, operation_log.__name__)
    return OperationLog(path_of, lambda: NOW[0])


def answered(
    operations: OperationLog, code: Code, error: int, took: float = 0.0, cause: object = None, node: int = 5
) -> None:
    failure: Exception | None = os_error(error) if error else None
    if failure and isinstance(cause, RemoteError):
        failure.__cause__ = cause
    elif isinstance(cause, Exception):
        failure = cause
    operations.answered(Header(0, code, 1, node, 0, 0, 77), error, NOW[0] - took, failure)


@pytest.mark.parametrize(
    ("code", "error", "took", "cause", "node", "line"),
    [
        (
            Code.FSYNC,
            errno.EIO,
            0.25,
            RemoteError("it hung up"),
            5,
            "fsync of 'dir/file5': EIO, it hung up, after 0.25 s",
        ),
        (
            Code.READ,
            errno.ETIMEDOUT,
            3,
            None,
            9,
            "read of node 9: ETIMEDOUT, Connection timed out, after 3 s",
        ),
        (Code.READ, errno.EIO, 0, RuntimeError("a\nb"), 5, "read of 'dir/file5': EIO, a b, after 0 s"),
        (Code.FSYNC, 0, 12, None, 5, "fsync of 'dir/file5': it succeeded, after 12 s"),
        (Code.FSYNC, 0, 9.9, None, 5, ""),
        (Code.LOOKUP, errno.ENOENT, 0, None, 5, ""),
        (Code.CREATE, errno.ESTALE, 0, None, 5, ""),
    ],
)
def test_what_fails_or_takes_long_is_a_line(
    operations: OperationLog,
    caplog: pytest.LogCaptureFixture,
    code: Code,
    error: int,
    took: float,
    cause: object,
    node: int,
    line: str,
) -> None:
    answered(operations, code, error, took, cause, node)
    assert caplog.messages == ([line.replace(":", " by process 77:", 1)] if line else [])
    assert operations.errors == ({(code.name.lower(), errno.errorcode[error]): 1} if error else {})
    assert sum(operations.latencies.kinds[code.name.lower()]) == 1


def test_lines_are_limited(operations: OperationLog, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        answered(operations, Code.READ, errno.EIO)
    assert len(caplog.messages) == 20
    NOW[0] += 11
    answered(operations, Code.READ, errno.EIO)
    assert caplog.messages[20] == "80 more operations failed or took long" and len(caplog.messages) == 22
    assert operations.errors == {("read", "EIO"): 101}


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
    server.restart()
    with server.tree.refusing(errno.ESTALE, "getattr"), pytest.raises(OSError, match="Stale") as caught:
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
