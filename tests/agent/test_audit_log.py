# SPDX-License-Identifier: Apache-2.0
"""The audit log of a device: its chain, its files after kills and rotations, and what its recorder writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.agent.audit import log_file, recorder
from millpond.agent.audit.log_file import AuditLog, write_whole
from millpond.agent.audit.recorder import AuditRecorder
from millpond.agent.audit.sessions import AuditSession
from millpond.agent.audit.signer import DeviceSigner
from millpond.agent.config import AgentConfig, LinkConfig, Privacy
from millpond.agent.gate import KINDS, Gate, LedgerCounters
from millpond.base.errors import ProtocolError, Refused
from millpond.wire.audit_log import (
    Answered,
    ChainReader,
    Cut,
    Dropped,
    Entry,
    Event,
    InForce,
    LogHead,
    Refusals,
    Signed,
    Started,
    Stopped,
    encode,
)
from millpond.wire.messages import Kind
from millpond.wire.tls import Identity

from ..waiting import eventually
from ..wire.test_tls import Authority

NONCE = "a-nonce-of-tests"
ANSWERED = Answered(
    "job", "digits", 3, samples={"private/digits": 64}, sent={"parameters": 4096}, exchanges=1
)
EVENTS: tuple[Event, ...] = (Started("0.2.0", {"control": 5}), InForce("AAAA", "ab"), ANSWERED)
texts = st.text(max_size=20)
counts = st.integers(0, (1 << 63) - 1)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Started, texts, st.dictionaries(texts, counts, max_size=3)),
    st.builds(InForce, texts, texts, st.dictionaries(texts, st.one_of(counts, texts, st.none()), max_size=3)),
    st.builds(Answered, st.just("job"), texts, counts, samples=st.dictionaries(texts, counts, max_size=3)),
    st.builds(Refusals, counts, st.lists(texts, max_size=3).map(tuple)),
    st.builds(Signed, counts, texts, texts),
    st.builds(Cut, counts, texts),
    st.builds(Dropped, counts, texts),
    st.builds(Stopped),
)


def lines_of(events: tuple[Event, ...] | list[Event]) -> list[str]:
    reader, found = ChainReader(LogHead()), list[str]()
    for number, event in enumerate(events):
        assert reader.head
        found.append(encode(reader.head, 1000.0 + number, event))
        reader.take(found[-1])
    return found


def read(lines: list[str], head: LogHead | None = LogHead()) -> list[Entry]:  # noqa: B008 - it is frozen
    reader = ChainReader(head)
    return [reader.take(line) for line in lines]


@given(st.lists(events, max_size=6))
def test_what_was_encoded_is_read(written: list[Event]) -> None:
    assert [entry.event for entry in read(lines_of(written))] == written


def tampered() -> Iterator[tuple[str, Any]]:
    """Each field of an entry that can be another one, and the entry's own."""
    document = json.loads(lines_of(EVENTS)[2])
    for key, value in document["about"].items():
        other = {str: "x", int: 7, dict: {"x": 1}}[type(value)]
        if key not in ("role", "state"):
            yield f"about.{key}", {**document, "about": {**document["about"], key: other}}
    yield "about.role", {**document, "about": {**document["about"], "role": "launch"}}
    yield "about.state", {**document, "about": {**document["about"], "state": "ends"}}
    for key, other in (("number", 9), ("time", 1.0), ("previous", "0" * 64), ("event", "cut")):
        yield key, {**document, key: other}


@pytest.mark.parametrize("changed", [pytest.param(found, id=name) for name, found in tampered()])
def test_a_changed_field_breaks_the_chain(changed: dict[str, Any]) -> None:
    """In the middle it no longer is what the next entry continues; at the end the head is another."""
    lines = lines_of((*EVENTS, Stopped()))
    other = json.dumps(changed, separators=(",", ":"))
    assert other != lines[2]
    with pytest.raises(ProtocolError, match="audit log"):
        read([*lines[:2], other, *lines[3:]])


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[1:],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[1], lines[0], lines[2]],
        lambda lines: [lines[0], lines[0], *lines[1:]],
        lambda lines: [lines[0], "", *lines[1:]],
    ],
)
def test_entries_that_are_missing_or_moved_break_the_chain(
    change: Callable[[list[str]], list[str]],
) -> None:
    with pytest.raises(ProtocolError):
        read(change(lines_of(EVENTS)))


def nested_rules(depth: int) -> str:
    """Return an entry that json reads, and that what goes down by Python's recursion does not survive."""
    rules = '{"a": ' * depth + "1" + "}" * depth
    about = f'{{"certificate": "", "policy": "", "rules": {rules}}}'
    return f'{{"number": 1, "time": 0, "previous": "", "event": "in force", "about": {about}}}'


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "{}",
        "[" * 5000,
        '{"number": 1e999, "time": 0, "previous": "", "event": "stopped", "about": {}}',
        '{"number": 1, "time": 1e999, "previous": "", "event": "stopped", "about": {}}',
        '{"number": 1, "time": NaN, "previous": "", "event": "stopped", "about": {}}',
        '{"number": 1, "time": "0", "previous": "", "event": "stopped", "about": {}}',
        '{"number": true, "time": 0, "previous": "", "event": "stopped", "about": {}}',
        '{"number": 1, "time": 0, "previous": "", "event": ["stopped"], "about": {}}',
        '{"number": 1, "time": 0, "previous": "", "event": "stopped", "about": []}',
        '{"number": 1, "time": 0, "previous": "", "event": "refusals", "about": {"count": -1}}',
        '{"number": 1, "time": 0, "previous": "x", "event": "stopped", "about": {}}',
        "9" * 140000,
        nested_rules(20),
        nested_rules(700),
    ],
)
def test_a_hostile_line_is_no_entry(line: str) -> None:
    with pytest.raises(ProtocolError):
        ChainReader(None).take(line)


def log_in(folder: Path, **sizes: int) -> AuditLog:
    return AuditLog(folder, lambda: (EVENTS[1],), clock=lambda: 1000.0, **sizes)


def all_of(log: AuditLog) -> list[str]:
    found = list[str]()
    while len(found) <= log.head.number - log.oldest:
        found += log.lines(log.oldest + len(found))
    return found


def test_a_log_goes_on_after_the_agent_starts_again(tmp_path: Path) -> None:
    for _ in range(3):
        log = log_in(tmp_path / "audit")
        log.append(ANSWERED)
        log.close()
    log = log_in(tmp_path / "audit")
    assert [entry.number for entry in read(all_of(log))] == [1, 2, 3]
    assert log.head.number == 3 and log.lines(4) == ()
    assert (tmp_path / "audit").stat().st_mode & 0o077 == 0
    log.close()


def test_the_chain_goes_on_over_files_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    log = log_in(tmp_path, file_bytes=2000, files=3)
    before = LogHead()
    for _ in range(60):
        log.append(ANSWERED)
        before = before if before.number else log.head
    found = read(all_of(log), None)
    assert len(list(tmp_path.glob("*.jsonl"))) == 3
    assert log.oldest > before.number and found[0].number == log.oldest
    assert found[-1].number == log.head.number
    dropped = [entry.event for entry in found if isinstance(entry.event, Dropped)]
    assert dropped[-1].last == log.oldest - 1
    assert json.loads(all_of(log)[0])["previous"] == dropped[-1].digest
    firsts = {int(path.stem) for path in tmp_path.glob("*.jsonl")}
    begins = [entry.event for entry in found if entry.number in firsts or entry.number - 1 in firsts]
    assert sum(isinstance(event, InForce) for event in begins) == 3
    log.close()
    again = log_in(tmp_path, file_bytes=2000, files=3)
    assert again.head == log.head
    again.close()


@pytest.mark.parametrize("keep", [0, 1, 50, -1])
def test_a_torn_record_is_cut_and_told(tmp_path: Path, keep: int) -> None:
    log = log_in(tmp_path)
    for event in EVENTS:
        log.append(event)
    log.close()
    path = tmp_path / "000000000001.jsonl"
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    torn = whole[last:][: keep or None] if keep else b"\0" * 100
    path.write_bytes(whole[:last] + torn)
    log = log_in(tmp_path)
    assert log.head.number == 2
    log.append(ANSWERED)
    found = [entry.event for entry in read(all_of(log))]
    assert isinstance(found[2], Cut) and found[2].size == len(torn)
    assert found[3] == ANSWERED
    assert (tmp_path / "cut").read_bytes() == torn
    log.close()


def test_a_kill_in_the_middle_of_a_rotation_leaves_the_chain(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    for event in EVENTS:
        log.append(event)
    log.close()
    (tmp_path / "000000000004.jsonl").touch()
    log = log_in(tmp_path)
    log.append(ANSWERED)
    assert [entry.number for entry in read(all_of(log))] == [1, 2, 3, 4]
    log.close()


def partly(descriptor: int, data: bytes) -> None:
    os.write(descriptor, data[:20])
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_in(tmp_path)
    log.append(ANSWERED)
    monkeypatch.setattr(log_file, "write_whole", partly)
    with pytest.raises(OSError, match="No space left"):
        log.append(ANSWERED)
    monkeypatch.undo()
    log.append(ANSWERED)
    assert len(read(all_of(log))) == 2
    log.close()


_WRITER = """
import itertools, sys
from pathlib import Path
from millpond.agent.audit.log_file import AuditLog
from millpond.wire.audit_log import Answered
log = AuditLog(Path(sys.argv[1]), file_bytes=3000)
for number in itertools.count():
    log.append(Answered("job", "x" * 100, number))
    if number == 100:
        print("many", flush=True)
"""


def test_a_log_survives_kill_9(tmp_path: Path) -> None:
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, tmp_path], stdout=subprocess.PIPE)
        assert writer.stdout and writer.stdout.readline() == b"many\n"
        writer.kill()
        writer.wait()
        writer.stdout.close()
    log = log_in(tmp_path)
    log.append(Stopped())
    found = read(all_of(log), None)
    assert found[-1].event == Stopped() and found[-1].number == log.head.number
    log.close()


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    found = Authority("fleet").identity(tmp_path / "identity", "csd0")
    found.key.chmod(0o600)
    return found


def config(base: Path) -> AgentConfig:
    privacy = Privacy(canaries={"secret": "never-to-leave"})
    return AgentConfig("csd0", LinkConfig("s", "10.77.0.2/30"), state=str(base / "state"), privacy=privacy)


def entries_of(audit: AuditRecorder) -> list[Entry]:
    head = audit.head("")
    lines = list[str]()
    while len(lines) < head.number:
        lines += audit.entries(len(lines) + 1).lines
    return read(lines[: head.number])


def test_a_recorder_tells_what_a_session_has_sent(tmp_path: Path, identity: Identity) -> None:
    audit = AuditRecorder(config(tmp_path), DeviceSigner(identity))
    control = audit.standing("control", LedgerCounters.in_memory())
    gate = Gate((), LedgerCounters.in_memory(), control.counters)
    audit.start("0.2.0", {"control": 7})
    about = Answered("job", "digits", run="3 of 4.0", peer="host (ab)", code="c" * 64)
    with audit.session(about) as session:
        worker = gate.charging(session.counters)
        worker.outlet().passing(Kind.PARAMETERS, bytes(100), payload=True)
        gate.outlet().passing(Kind.METRICS, bytes(9), payload=False)
        session.exchange({"private/digits": 64})
        session.exchange({"private/digits": 32})
        session.refuse()
    audit.refused("digits", "policy.folders: no")
    audit.stop()
    found = [entry.event for entry in read_all(tmp_path)]
    answered = [event for event in found if isinstance(event, Answered)]
    begins, ends = (event for event in answered if event.role == "job")
    assert (begins.state, begins.sent, ends.state) == ("begins", {}, "ends")
    assert ends.sent == {"parameters": 100} and ends.samples == {"private/digits": 96}
    assert (ends.exchanges, ends.refused, ends.policy) == (2, 1, audit.policy)
    assert replace(ends, state="begins", exchanges=0, refused=0, samples={}, sent={}) == begins
    assert next(event for event in answered if event.role == "control").sent == {"metrics": 9}
    assert Refusals(1, ("digits: policy.folders: no",)) in found
    assert gate.tally[KINDS.index(Kind.PARAMETERS)] == 100  # the ledger counts all the same
    assert isinstance(found[0], Started) and isinstance(found[-1], Signed) and Stopped() in found
    rules = next(event for event in found if isinstance(event, InForce)).rules
    assert rules["privacy"]["canaries"] == ["secret"] and "never-to-leave" not in json.dumps(rules)


def read_all(base: Path) -> list[Entry]:
    paths = sorted((base / "state" / "audit").glob("*.jsonl"))
    return read([line for path in paths for line in path.read_text().splitlines()])


@given(st.lists(st.tuples(st.text(min_size=1), st.integers(-(1 << 63), 1 << 64)), max_size=60))
def test_what_a_host_asks_for_makes_no_entry_that_cannot_be_read(asked: list[tuple[str, int]]) -> None:
    """Names and numbers are the host's: whatever they are, the chain goes on."""
    long = "\U0001f600" * 300
    session = AuditSession(Answered("job", long, run=long, peer=long))
    for number, (folder, samples) in enumerate(asked):
        session.exchange({f"{number}{folder}": samples, f"{number}{long}": samples})
    line = encode(LogHead(), 0.0, session.taken())
    (entry,) = read([line])
    assert isinstance(entry.event, Answered) and entry.event.exchanges == len(asked)


@pytest.mark.expected_log("the audit log")
def test_no_job_begins_that_the_log_cannot_tell(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "RETRY", 0.05)
    audit = AuditRecorder(config(tmp_path), DeviceSigner(identity))
    audit.standing("control", told := LedgerCounters.in_memory())
    audit.start("0.2.0", {})
    with audit.session(Answered("job", "early")) as session:
        session.counters.add(0, 11)
        monkeypatch.setattr(log_file, "write_whole", partly)
        with pytest.raises(Refused, match="the audit log cannot be written: No space left"):
            audit.session(Answered("job", "late")).__enter__()
        assert audit.fault
    assert audit.fault
    told.add(0, 1)
    monkeypatch.setattr(log_file, "write_whole", write_whole)
    eventually(lambda: audit.fault == "", "there is room again", 20, 0.02)
    audit.stop()
    events = [entry.event for entry in read_all(tmp_path)]
    ends = next(event for event in events if isinstance(event, Answered) and event.state == "ends")
    assert ends.sent == {str(KINDS[0]): 11}  # what could not be written has not been lost
    assert "late" not in str(events)


def test_what_is_new_is_written_each_minute(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MINUTE", 0.05)
    monkeypatch.setattr(recorder, "MANY_BYTES", 50)
    audit = AuditRecorder(config(tmp_path), DeviceSigner(identity))
    volume, other = LedgerCounters.in_memory(), LedgerCounters.in_memory()
    volume.add(0, 1000)  # before this agent was started
    audit.standing("volume", volume)
    audit.standing("control", other)
    audit.start("0.2.0", {})
    with audit.session(Answered("job", "digits")) as session:
        session.exchange({"private/digits": 64})
        volume.add(0, 60)
        other.add(0, 40)
        eventually(lambda: len(read_all(tmp_path)) >= 5, "the minute's entries are there", 10, 0.02)
    events = [entry.event for entry in read_all(tmp_path) if isinstance(entry.event, Answered)]
    assert [event.sent for event in events if event.role == "volume"] == [{str(KINDS[0]): 60}]
    assert not [event for event in events if event.role == "control"]
    assert [event.state for event in events if event.role == "job"] == ["begins", "goes on", "ends"]
    audit.stop()


def test_a_new_certificate_has_an_entry_and_signs(tmp_path: Path, identity: Identity) -> None:
    audit = AuditRecorder(config(tmp_path), DeviceSigner(identity))
    audit.start("0.2.0", {})
    first = audit.head(NONCE)
    fresh = Authority("fleet").identity(tmp_path / "fresh", "csd0")
    identity.next_key.write_bytes(fresh.key.read_bytes())  # a renewal that is under way
    identity.next_key.chmod(0o600)
    identity.certificate.write_bytes(fresh.certificate.read_bytes())
    second = audit.head(NONCE)
    assert second.number == first.number + 1 and second.signature and second.signature != first.signature
    found = [entry.event for entry in entries_of(audit) if isinstance(entry.event, InForce)]
    assert len({event.certificate for event in found}) == 2
    audit.stop()
