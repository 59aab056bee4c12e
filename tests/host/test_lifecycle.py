# SPDX-License-Identifier: Apache-2.0
"""A device's life cycle: legal transitions happen, illegal ones are reported."""

from __future__ import annotations

import itertools

import pytest

from millpond.host.fleet.lifecycle import DeviceEvent, DeviceState, after

START = DeviceState.ABSENT


def test_a_good_life() -> None:
    state = START
    for event, expected in (
        (DeviceEvent.LOST, DeviceState.ABSENT),
        (DeviceEvent.TUNNEL_UP, DeviceState.CONNECTING),
        (DeviceEvent.GREETED, DeviceState.READY),
        (DeviceEvent.LOST, DeviceState.ABSENT),
        (DeviceEvent.TUNNEL_UP, DeviceState.CONNECTING),
    ):
        state = after(state, event)
        assert state is expected


@pytest.mark.parametrize(
    ("event", "state"),
    [(DeviceEvent.OTHER_VERSION, DeviceState.INCOMPATIBLE), (DeviceEvent.NOT_TRUSTED, DeviceState.REFUSED)],
)
@pytest.mark.parametrize("before", [DeviceState.CONNECTING, DeviceState.READY])
def test_a_bad_device_is_put_aside_and_tried_again(
    before: DeviceState, event: DeviceEvent, state: DeviceState
) -> None:
    assert after(before, event) is state
    assert after(state, DeviceEvent.TUNNEL_UP) is DeviceState.CONNECTING
    assert after(state, DeviceEvent.LOST) is DeviceState.ABSENT


@pytest.mark.parametrize("state", [s for s in DeviceState if s is not DeviceState.CONNECTING])
def test_whatever_the_state_a_tunnel_may_come_or_a_device_be_lost(state: DeviceState) -> None:
    if state not in (DeviceState.READY, DeviceState.FAULTY):
        assert after(state, DeviceEvent.TUNNEL_UP) is DeviceState.CONNECTING
    assert after(state, DeviceEvent.LOST) is DeviceState.ABSENT


def test_a_device_that_can_run_no_job_is_not_ready() -> None:
    """Before: 'devices' said ready as long as the agent answered, and jobs failed there."""
    assert after(DeviceState.CONNECTING, DeviceEvent.FAULT) is DeviceState.FAULTY
    assert after(DeviceState.READY, DeviceEvent.FAULT) is DeviceState.FAULTY
    assert after(DeviceState.FAULTY, DeviceEvent.GREETED) is DeviceState.READY


@pytest.mark.parametrize("state", DeviceState)
def test_any_device_can_be_revoked_and_must_connect_anew_then(state: DeviceState) -> None:
    assert after(state, DeviceEvent.REVOKED) is DeviceState.REVOKED
    assert after(DeviceState.REVOKED, DeviceEvent.LOST) is DeviceState.ABSENT


def test_only_a_device_that_connects_or_has_recovered_becomes_ready() -> None:
    for state in set(DeviceState) - {DeviceState.CONNECTING, DeviceState.FAULTY}:
        with pytest.raises(ValueError, match="cannot see 'greeted'"):
            after(state, DeviceEvent.GREETED)


def test_nothing_else_comes_out() -> None:
    for state, event in itertools.product(DeviceState, DeviceEvent):
        try:
            assert after(state, event) in DeviceState
        except ValueError as error:
            assert str(state) in str(error)
