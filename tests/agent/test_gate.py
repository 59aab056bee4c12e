# SPDX-License-Identifier: Apache-2.0
"""The gate: every byte is counted by kind and searched for patterns, also across the borders of sends."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.agent.config import Privacy
from millpond.agent.gate import (
    KINDS,
    CanaryError,
    Gate,
    LedgerCounters,
    Pattern,
    ledger,
    open_ledger,
    patterns,
)
from millpond.base.deadline import Deadline
from millpond.base.errors import ConfigError, LocalError
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Kind

CANARY, TRACER = b"the-canary", b"tr"


def counters() -> LedgerCounters:
    return LedgerCounters.in_memory()


def gate(*found: Pattern) -> Gate:
    return Gate(found, counters())


def both() -> Gate:
    return gate(Pattern("c", CANARY, True), Pattern("t", TRACER, False))


def test_bytes_are_counted_by_kind() -> None:
    plain = gate()
    first, second = plain.outlet(), plain.outlet()
    first.passing(Kind.METRICS, b"12345", payload=False)
    second.passing(Kind.PARAMETERS, memoryview(bytearray(1000)), payload=False)
    first.passing(Kind.METRICS, b"678", payload=False)
    sent, seen = ledger(plain, [])
    assert sent == {"control": 0, "metrics": 8, "parameters": 1000, "volume": 0, "launched": 0}
    assert seen == {}


def test_a_canary_is_stopped_counted_and_not_among_the_bytes_sent() -> None:
    guarded = both()
    with pytest.raises(CanaryError, match="'c'"):
        guarded.outlet().passing(Kind.VOLUME, b"xx" + CANARY + b"xx", payload=False)
    sent, seen = ledger(guarded, [])
    assert sent["volume"] == 0
    assert seen == {"c": 1, "t": 0}


@given(st.integers(0, 40), st.lists(st.integers(1, 7), min_size=1, max_size=60))
def test_a_canary_is_found_however_it_is_cut(before: int, sizes: list[int]) -> None:
    guarded = both()
    outlet = guarded.outlet()
    data = b"." * before + CANARY + b"." * 500
    sent = b""
    with pytest.raises(CanaryError):
        for size in (*sizes, len(data)):
            part, data = data[:size], data[size:]
            outlet.passing(Kind.VOLUME, part, payload=True)
            sent += part
    assert CANARY not in sent
    assert ledger(guarded, [])[1]["c"] == 1


@given(st.lists(st.sampled_from([b"t", b"r", b"tr", b"x", b"the-canar"]), max_size=30))
def test_tracers_are_counted_as_in_one_piece(parts: list[bytes]) -> None:
    counting = both()
    outlet = counting.outlet()
    for part in parts:
        outlet.passing(Kind.CONTROL, part, payload=False)
    sent, seen = ledger(counting, [])
    assert seen == {"c": 0, "t": b"".join(parts).count(TRACER)}
    assert sent["control"] == len(b"".join(parts))


def test_a_canary_is_found_across_the_payloads_of_two_messages() -> None:
    guarded = both()
    outlet = guarded.outlet()
    outlet.passing(Kind.CONTROL, b"head", payload=False)
    outlet.passing(Kind.VOLUME, b"file" + CANARY[:4], payload=True)
    outlet.passing(Kind.CONTROL, b"the next head", payload=False)
    with pytest.raises(CanaryError):
        outlet.passing(Kind.VOLUME, CANARY[4:] + b"file", payload=True)
    assert ledger(guarded, [])[1]["c"] == 1


def test_what_leaves_in_another_form_is_searched_and_not_counted() -> None:
    guarded = both()
    outlet = guarded.outlet()
    outlet.examine(CANARY[4:] + b"tr" + CANARY[:4])
    outlet.passing(Kind.PARAMETERS, CANARY[4:], payload=True)  # what does not leave is not before it
    with pytest.raises(CanaryError):
        outlet.examine(memoryview(CANARY[4:]))
    sent, seen = ledger(guarded, [])
    assert (sent["parameters"], seen) == (len(CANARY) - 4, {"c": 1, "t": 1})


def test_an_agent_that_starts_again_goes_on_counting(tmp_path: Path) -> None:
    found = (Pattern("c", CANARY, True),)
    for total in (5, 10, 15):
        again = Gate(found, open_ledger(tmp_path / "ledger", "agent", found))
        again.outlet().passing(Kind.METRICS, b"12345", payload=False)
        assert ledger(again, [])[0]["metrics"] == total
        os.close(again.tally.descriptor)
    others = (Pattern("d", CANARY, True),)
    new = Gate(others, open_ledger(tmp_path / "ledger", "agent", others))
    assert ledger(new, []) == (dict.fromkeys(KINDS, 0), {"d": 0})
    os.close(new.tally.descriptor)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ledger").iterdir()} == {0o600}


def test_connections_do_not_mix() -> None:
    """What leaves in parts by several connections has no order: a canary cut so passes, as an encoded one."""
    guarded = both()
    first, second = guarded.outlet(), guarded.outlet()
    first.passing(Kind.CONTROL, CANARY[:4], payload=False)
    second.passing(Kind.CONTROL, CANARY[4:], payload=False)
    assert ledger(guarded, [])[1]["c"] == 0


def test_many_threads_lose_no_count() -> None:
    counting = both()

    def send() -> None:
        outlet = counting.outlet()
        for _ in range(500):
            outlet.passing(Kind.CONTROL, b"tr.", payload=False)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sent, seen = ledger(counting, [])
    assert (sent["control"], seen["t"]) == (6000, 2000)


def test_another_process_counts_into_the_same_ledger() -> None:
    counting = both()
    other = counters()
    index = KINDS.index(Kind.VOLUME)
    code = (
        f"from millpond.agent.gate import LedgerCounters; LedgerCounters({other.descriptor}).add({index}, 42)"
    )
    subprocess.run([sys.executable, "-c", code], pass_fds=[other.descriptor], check=True, timeout=30)
    counting.outlet().passing(Kind.VOLUME, b"12", payload=False)
    assert ledger(counting, [other])[0]["volume"] == 44


def test_processes_that_share_counters_lose_no_count() -> None:
    """Several nodes, and several data services, add to one share of the ledger."""
    shared, times = counters(), 100_000
    code = f"""
import sys
from millpond.agent.gate import LedgerCounters
found = LedgerCounters({shared.descriptor})
print("ready", flush=True)
sys.stdin.read(1)
for _ in range({times}):
    found.add(0, 1)
"""
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    processes = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[shared.descriptor]) for _ in range(2)
    ]
    for process in processes:
        assert process.stdout and process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write(b"x")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    assert shared[0] == 2 * times


def test_a_channel_sends_nothing_of_a_message_with_a_canary() -> None:
    ours, theirs = socket.socketpair()
    with theirs, Channel(ours, "host", outlet=both().outlet()) as channel:
        with pytest.raises(CanaryError):
            channel.send(Failure("x", CANARY.decode()), Deadline.after(30))
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def test_patterns_are_in_one_order_in_all_processes() -> None:
    one = patterns(
        Privacy(
            canaries={"b": "second..", "a": "first..."},
            tracers={"d": "hex:0102030405060708", "c": "third..."},
        )
    )
    assert [(p.name, p.forbidden) for p in one] == [("a", True), ("b", True), ("c", False), ("d", False)]
    assert one[3].data == bytes(range(1, 9))


@pytest.mark.parametrize("text", ["short", "hex:01", "hex:not hexadecimal"])
def test_patterns_that_prove_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="privacy: a: "):
        patterns(Privacy(canaries={"a": text}))


@pytest.mark.expected_log("ledger cannot be kept")
def test_where_no_ledger_can_be_kept_it_is_counted_all_the_same(
    tmp_path: Path,
) -> None:
    (tmp_path / "ledger").write_text("not a folder")
    tally = open_ledger(tmp_path / "ledger" / "below", "agent", ())
    tally.add(0, 7)
    assert tally[0] == 7


def test_more_patterns_than_counters_are_refused() -> None:
    with pytest.raises(LocalError, match="too many"):
        gate(*(Pattern(str(n), b"x%d" % n, False) for n in range(600)))
