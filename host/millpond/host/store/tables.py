# SPDX-License-Identifier: Apache-2.0
"""Edge (SQLite): the tables of the fleet's database."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

_SCHEMA = """
CREATE TABLE devices (
    name TEXT PRIMARY KEY, boot TEXT NOT NULL, software TEXT NOT NULL, seen REAL NOT NULL) STRICT;
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, job TEXT NOT NULL, files TEXT NOT NULL,
    plan TEXT NOT NULL DEFAULT '', state TEXT NOT NULL, error TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL, ended REAL, pruned REAL, owner INTEGER,
    ended_as INTEGER NOT NULL DEFAULT 0, standing TEXT NOT NULL DEFAULT '') STRICT;
CREATE TABLE results (
    job INTEGER NOT NULL REFERENCES jobs (id), round INTEGER NOT NULL, result TEXT NOT NULL,
    PRIMARY KEY (job, round)) STRICT;
CREATE TABLE profiles (
    worker TEXT NOT NULL, work TEXT NOT NULL, profile TEXT NOT NULL, PRIMARY KEY (worker, work)) STRICT;
"""
_VERSION = 5


def open_database(path: Path) -> tuple[sqlite3.Connection, str]:
    """Open the database at `path`, made if need be.

    Returns it with the reason why it cannot be used, "" for none: the tables of another version stay as they
    are. Raises sqlite3.Error, and leaves nothing open.
    """
    database = _connect(path)
    with contextlib.ExitStack() as unless_it_opens:
        unless_it_opens.callback(database.close)
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if not version:
            database.executescript(f"BEGIN IMMEDIATE;\n{_SCHEMA}\nPRAGMA user_version = {_VERSION};\nCOMMIT;")
        unless_it_opens.pop_all()
    return database, _fault(path, version) if version not in (0, _VERSION) else ""


def _fault(path: Path, version: int) -> str:
    return (
        f"{path}: its tables are of version {version}, and this millpond has version {_VERSION}: "
        "move it away to go on without its jobs"
    )


def _connect(path: Path) -> sqlite3.Connection:
    """Open a database. On a full disk there is no room for the memory that processes share: then this one has
    it alone.
    """
    try:
        return _connected(path, "NORMAL")
    except sqlite3.OperationalError:
        return _connected(path, "EXCLUSIVE")


def _connected(path: Path, locking: str) -> sqlite3.Connection:
    with contextlib.ExitStack() as unless_it_opens:
        database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        unless_it_opens.callback(database.close)
        database.row_factory = sqlite3.Row
        database.execute(f"PRAGMA locking_mode = {locking}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        unless_it_opens.pop_all()
    return database
