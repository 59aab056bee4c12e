# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): a SQLite database that one mount of a volume writes while another reads it."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import traceback
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TextIO

from conformance.results import Kept
from millpond.linux import syscalls

_BUSY_SECONDS = 10.0
_TRIES = 6
_ACCOUNTS, _EACH = 16, 1000
_LONGEST = 20_000
_NAME = "database"
_SCHEMA = """
PRAGMA journal_mode = DELETE;
CREATE TABLE account (id INTEGER PRIMARY KEY, amount INTEGER NOT NULL);
CREATE TABLE entry (number INTEGER PRIMARY KEY, note BLOB NOT NULL);
CREATE INDEX by_note ON entry (note);
"""


def exercise(writing: Path, reading: Path, notes: Path, transactions: int) -> Kept:
    """A process writes through one directory while this one reads through another, both of one volume.

    At all times the accounts' sum is the same, entries are numbered without a gap, and what was committed
    before a look is seen by it.
    """
    kept = Kept(transactions)
    notes.touch()
    try:
        with closing(_connect(writing / _NAME)) as database:
            _create(database)
        with closing(_connect(reading / _NAME)) as database:
            pid = _start(writing / _NAME, notes, transactions)
            while not os.waitpid(pid, os.WNOHANG)[0]:
                _look(database, notes, kept)
            if not kept.looks:
                kept.failures.append("nobody could look at it while it was written")
        for place in (writing, reading):
            with closing(_connect(place / _NAME)) as database:
                _look(database, notes, kept)
    except sqlite3.Error as error:
        kept.failures.append(f"it can't be made or opened: {error}")
    _sum_up(notes.read_text().splitlines(), kept)
    return kept


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
    database.execute("PRAGMA synchronous = FULL")
    return database


def _create(database: sqlite3.Connection) -> None:
    database.executescript(_SCHEMA)
    database.execute("BEGIN")
    accounts = ((number, _EACH) for number in range(_ACCOUNTS))
    database.executemany("INSERT INTO account VALUES (?, ?)", accounts)
    database.execute("COMMIT")


def _start(path: Path, notes: Path, transactions: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    with notes.open("a", buffering=1) as file:
        try:
            syscalls.die_with_parent(signal.SIGKILL)
            _write(path, file, transactions)
        except BaseException:  # noqa: BLE001 - noted; nothing may go on in a copy of the caller
            file.write(f"failed: {traceback.format_exc().splitlines()[-1]}\n")
        finally:
            os._exit(0)


def _write(path: Path, notes: TextIO, transactions: int) -> None:
    chance = random.Random(1)
    with closing(_connect(path)) as database:
        for number in range(1, transactions + 1):
            tries = 0
            while not _commit(database, number, chance):
                notes.write("busy\n")
                if (tries := tries + 1) == _TRIES:
                    raise TimeoutError(f"it was locked for {_TRIES * _BUSY_SECONDS:.0f} s")
            notes.write(f"committed {number}\n")


def _commit(database: sqlite3.Connection, number: int, chance: random.Random) -> bool:
    """An amount goes from one account to another, with a note of any size. False if others kept it locked."""
    amount, (one, other) = chance.randrange(100), chance.sample(range(_ACCOUNTS), 2)
    try:
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE account SET amount = amount - ? WHERE id = ?", (amount, one))
        database.execute("UPDATE account SET amount = amount + ? WHERE id = ?", (amount, other))
        note = chance.randbytes(chance.randrange(_LONGEST))
        database.execute("INSERT INTO entry VALUES (?, ?)", (number, note))
        database.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if not _is_busy(error):
            raise
        if database.in_transaction:
            database.execute("ROLLBACK")
        return False
    return True


def _is_busy(error: sqlite3.Error) -> bool:
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def _look(database: sqlite3.Connection, notes: Path, kept: Kept) -> None:
    """One consistent view of all of it."""
    promised = notes.read_text().count("committed")
    try:
        with database:  # whose end ends the transaction
            database.execute("BEGIN")
            complaints = [line for (line,) in database.execute("PRAGMA integrity_check")]
            ((total,),) = database.execute("SELECT sum(amount) FROM account")
            ((count, last),) = database.execute("SELECT count(*), max(number) FROM entry")
    except sqlite3.Error as error:
        if _is_busy(error):
            kept.busy += 1
        else:
            kept.failures.append(f"a look: {error}")
        return
    kept.looks += 1
    if complaints != ["ok"]:
        kept.failures.append(f"integrity_check: {complaints[0]}")
    if total != _ACCOUNTS * _EACH:
        kept.failures.append(f"the accounts hold {total}, not {_ACCOUNTS * _EACH}")
    if count != (last or 0) or count < promised:
        kept.failures.append(f"{count} entries up to number {last}, when {promised} were committed")


def _sum_up(lines: Sequence[str], kept: Kept) -> None:
    kept.committed = sum(line.startswith("committed") for line in lines)
    kept.busy += lines.count("busy")
    kept.failures += [f"the writer {line}" for line in lines if line.startswith("failed")]
    if kept.committed < kept.wanted and not kept.failures:
        kept.failures.append(f"the writer ended after {kept.committed} transactions")
