# SPDX-License-Identifier: Apache-2.0
"""Tickets: valid once, for a limited time, and over TLS where that is required."""

from __future__ import annotations

import itertools

import pytest

from millpond.agent.tickets import VALID_SECONDS, Tickets


@pytest.fixture
def tickets() -> Tickets[str]:
    numbers = itertools.count()
    return Tickets(lambda: b"%032d" % next(numbers))


def test_a_ticket_is_good_once(tickets: Tickets[str]) -> None:
    token = tickets.issue("volume", tls=False, now=100.0)
    assert tickets.redeem(token, tls=False, now=101.0) == "volume"
    assert tickets.redeem(token, tls=False, now=101.0) is None


def test_each_ticket_has_its_own_purpose(tickets: Tickets[str]) -> None:
    tokens = {purpose: tickets.issue(purpose, tls=False, now=0.0) for purpose in ("a", "b", "c")}
    assert [tickets.redeem(tokens[purpose], tls=False, now=1.0) for purpose in "cab"] == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("after", "good"), [(VALID_SECONDS - 0.001, True), (VALID_SECONDS, False), (1e6, False)]
)
def test_a_ticket_expires(tickets: Tickets[str], after: float, good: bool) -> None:
    token = tickets.issue("volume", tls=False, now=5.0)
    assert (tickets.redeem(token, tls=False, now=5.0 + after) == "volume") is good


def test_a_ticket_for_tls_is_no_good_in_plain_and_is_used_up_by_trying(tickets: Tickets[str]) -> None:
    token = tickets.issue("volume", tls=True, now=0.0)
    assert tickets.redeem(token, tls=False, now=1.0) is None
    assert tickets.redeem(token, tls=True, now=1.0) is None
    assert tickets.redeem(tickets.issue("volume", tls=True, now=0.0), tls=True, now=1.0) == "volume"
    assert tickets.redeem(tickets.issue("volume", tls=False, now=0.0), tls=True, now=1.0) == "volume"


@pytest.mark.parametrize("token", [b"", b"x", b"0" * 31, b"0" * 33, b"\xff" * 32])
def test_other_tokens_are_no_tickets(tickets: Tickets[str], token: bytes) -> None:
    good = tickets.issue("volume", tls=False, now=0.0)
    assert tickets.redeem(token, tls=False, now=1.0) is None
    assert tickets.redeem(good, tls=False, now=1.0) == "volume"


def test_tickets_that_nobody_redeems_are_forgotten(tickets: Tickets[str]) -> None:
    for number in range(1000):
        tickets.issue("volume", tls=False, now=float(number))
    assert len(tickets._issued) <= VALID_SECONDS + 1
