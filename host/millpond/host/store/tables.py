# SPDX-License-Identifier: Apache-2.0
"""Edge (SQLite): the tables of the fleet's database: made, or brought up to date beside a copy of the old."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from millpond.linux.files import replace_durably

_SCHEMA = """
CREATE TABLE IF NOT EXISTS devices (
    name TEXT PRIMARY KEY, boot TEXT NOT NULL, software TEXT NOT NULL, seen REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, job TEXT NOT NULL, files TEXT NOT NULL,
    plan TEXT NOT NULL DEFAULT '', state TEXT NOT NULL, error TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL, ended REAL, pruned REAL, owner INTEGER,
    ended_as INTEGER NOT NULL DEFAULT 0, standing TEXT NOT NULL DEFAULT '') STRICT;
CREATE TABLE IF NOT EXISTS results (
    job INTEGER NOT NULL REFERENCES jobs (id), round INTEGER NOT NULL, result TEXT NOT NULL,
    PRIMARY KEY (job, round)) STRICT;
CREATE TABLE IF NOT EXISTS profiles (
    worker TEXT NOT NULL, work TEXT NOT NULL, profile TEXT NOT NULL, PRIMARY KEY (worker, work)) STRICT;
"""
# Of version 1, whose jobs had the text of their files, a target for each kind of job and an optimizer of the
# server with other keys, and whose rounds had one score, of accuracy and loss on the host.
_ONE_SCORE = """
ALTER TABLE jobs RENAME code TO files;
UPDATE jobs SET files = '{}';
INSERT OR IGNORE INTO results SELECT job, round, json_set(detail, '$.round', round, '$.seconds', seconds,
    '$.samples', samples, '$.scores', json_object('host', json_object('accuracy', accuracy, 'loss', loss)))
    FROM rounds;
DROP TABLE rounds;
UPDATE jobs SET job = json_set(job, '$.federated.server', json(json_remove(json_object(
        'name', job ->> '$.federated.server.optimizer',
        'learning_rate', job ->> '$.federated.server.learning_rate',
        'momentum', job ->> '$.federated.server.momentum'),
        iif(job ->> '$.federated.server.optimizer' = 'adam', '$.momentum', '$.none'))),
    '$.evaluate', json_object('target',
        iif(job ->> '$.synchronous' IS NULL, job ->> '$.federated.target', job ->> '$.synchronous.target')));
UPDATE jobs SET job = json_remove(job, '$.federated') WHERE job ->> '$.synchronous' IS NOT NULL;
"""
# Of version 2, whose jobs had an optimizer of the server in place of a strategy.
_STRATEGIES = """
UPDATE jobs SET job = json_set(json_remove(job, '$.federated.server'), '$.federated.strategy', json_object(
        'name', 'fedopt', 'learning_rate', coalesce(job ->> '$.federated.server.learning_rate', 1.0),
        'optimizer',
        json_remove(json_patch('{"name": "SGD"}', job -> '$.federated.server'), '$.learning_rate')))
    WHERE job -> '$.federated.server' IS NOT NULL;
"""
# Of version 3, whose jobs kept their files for ever and belonged to nobody.
_PRUNED = """
ALTER TABLE jobs ADD COLUMN pruned REAL;
ALTER TABLE jobs ADD COLUMN owner INTEGER;
"""
# Of version 4, whose jobs were ordered by the time of their end, and had their scores with the rounds alone.
_ENDED_AS = """
ALTER TABLE jobs ADD COLUMN ended_as INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN standing TEXT NOT NULL DEFAULT '';
UPDATE jobs SET ended_as = ends.place FROM
    (SELECT id, row_number() OVER (ORDER BY ended, id) AS place FROM jobs WHERE ended IS NOT NULL) AS ends
    WHERE ends.id = jobs.id;
"""
_MIGRATIONS = {1: _ONE_SCORE, 2: _STRATEGIES, 3: _PRUNED, 4: _ENDED_AS}
"""What makes the tables of a version those of the next."""
_VERSION = 5


def open_database(path: Path) -> tuple[sqlite3.Connection, str]:
    """Open the database at ``path``, made if need be, and return it with the reason why it cannot be used, ""
    for none. Raises sqlite3.Error, and leaves nothing open. Jobs of version 1 lose their files, whose texts
    were in their rows.
    """
    database = _connect(path)
    with contextlib.ExitStack() as unless_it_opens:
        unless_it_opens.callback(database.close)
        version = database.execute("PRAGMA user_version").fetchone()[0]
        fault = _fault(database, path, version) if version > _VERSION else _update(database, path, version)
        unless_it_opens.pop_all()
    return database, fault


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


def _update(database: sqlite3.Connection, path: Path, version: int) -> str:
    """Bring the tables of a ``version`` up to date. Returns why that cannot be done, "" if it is."""
    if version == _VERSION:
        return ""
    try:
        if version:
            _copy(database, path.with_name(f"{path.name}.v{version}"))
        steps = [_MIGRATIONS[number] for number in range(version or _VERSION, _VERSION)]
        changes = "\n".join([_SCHEMA, *steps, f"PRAGMA user_version = {_VERSION};"])
        database.executescript(f"BEGIN IMMEDIATE;\n{changes}\nCOMMIT;")
    except (sqlite3.Error, OSError) as error:
        if database.in_transaction:
            database.execute("ROLLBACK")
        return f"{path}: its tables of version {version} cannot become those of {_VERSION}: {error}"
    return ""


def _copy(database: sqlite3.Connection, path: Path) -> None:
    """Copy the whole database to ``path``, whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with contextlib.closing(sqlite3.connect(new)) as copy:
        database.backup(copy)
    replace_durably(new, path)


def _fault(database: sqlite3.Connection, path: Path, version: int) -> str:
    """Return why tables of a newer version cannot be used, "" if they have all columns of this one."""
    with contextlib.closing(sqlite3.connect(":memory:")) as known:
        known.executescript(_SCHEMA)
        tables = [name for (name,) in known.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        lacking = [
            f"{name}.{column}"
            for name in tables
            for column in _columns(known, name) - _columns(database, name)
        ]
    if not lacking:
        return ""
    return (
        f"{path}: its schema {version} is of a newer version of millpond, this one knows {_VERSION} and "
        f"finds no {', '.join(sorted(lacking))}"
    )


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
