"""A device's life: what can happen, can; the rest is told."""

from __future__ import annotations

import itertools

import pytest

from millpond.host.lifecycle import Event, State, after

START = State.ABSENT


def test_a_good_life() -> None:
    state = START
    for event, expected in (
        (Event.LOST, State.ABSENT),
        (Event.TUNNEL_UP, State.CONNECTING),
        (Event.GREETED, State.READY),
        (Event.LOST, State.ABSENT),
        (Event.TUNNEL_UP, State.CONNECTING),
    ):
        state = after(state, event)
        assert state is expected


@pytest.mark.parametrize(
    ("event", "state"), [(Event.OTHER_VERSION, State.INCOMPATIBLE), (Event.NOT_TRUSTED, State.REFUSED)]
)
@pytest.mark.parametrize("before", [State.CONNECTING, State.READY])
def test_a_bad_device_is_put_aside_and_tried_again(before: State, event: Event, state: State) -> None:
    assert after(before, event) is state
    assert after(state, Event.TUNNEL_UP) is State.CONNECTING
    assert after(state, Event.LOST) is State.ABSENT


@pytest.mark.parametrize("state", [s for s in State if s is not State.CONNECTING])
def test_whatever_the_state_a_tunnel_may_come_or_a_device_be_lost(state: State) -> None:
    if state is not State.READY:
        assert after(state, Event.TUNNEL_UP) is State.CONNECTING
    assert after(state, Event.LOST) is State.ABSENT


def test_only_a_device_that_connects_becomes_ready() -> None:
    for state in set(State) - {State.CONNECTING}:
        with pytest.raises(ValueError, match="cannot see 'greeted'"):
            after(state, Event.GREETED)


def test_nothing_else_comes_out() -> None:
    for state, event in itertools.product(State, Event):
        try:
            assert after(state, event) in State
        except ValueError as error:
            assert str(state) in str(error)
