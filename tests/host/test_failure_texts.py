# SPDX-License-Identifier: Apache-2.0
"""Reasons and failures as users read them: a worker is named once, and what helps is said."""

from __future__ import annotations

import math

import pytest

from millpond.aggregate.exact import RefusedUpdate
from millpond.base.errors import ConnectionLost, Refused
from millpond.host.records.failures import advised, diverged, listed, reason_of, too_few
from millpond.linux.limits.process_limits import Shortage

DEVICES = ("csd0", "csd1")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Refused("the worker 'host' on the host", "data", "no folder"), "no folder"),
        (Refused("csd0", "policy", "no such job"), "no such job"),
        (RefusedUpdate("csd0", "a value is not finite"), "update refused: a value is not finite"),
        (ConnectionLost("csd0 closed the connection"), "csd0 closed the connection"),
        (ConnectionLost("csd10: gone"), "csd10: gone"),
    ],
)
def test_a_reason_does_not_name_its_worker(error: Exception, text: str) -> None:
    assert reason_of(error, "csd0") == text


def test_workers_with_one_reason_are_listed_together() -> None:
    reasons = [("host", "no folder"), ("csd0", "not ready"), ("csd1", "no folder")]
    assert listed(reasons) == "host, csd1: no folder; csd0: not ready"
    assert listed([]) == ""


def test_a_worker_that_ran_out_of_memory_has_its_advice() -> None:
    found = advised(
        "no device takes part (csd0: out of memory: the process took more than it may)", 3, DEVICES
    )
    assert "try a smaller batch or model, or fewer workers" in found


def test_a_machine_without_memory_has_another_advice_than_a_job_that_takes_too_much() -> None:
    found = advised(f"no device takes part (csd0: {Shortage.MACHINE_MEMORY.text})", 3, DEVICES)
    assert "a smaller batch" not in found and found.endswith(
        "; end other programs there, or bound jobs by memory of [limits] in agent.toml"
    )


def test_data_that_a_worker_may_not_read_has_its_advice() -> None:
    found = advised("no device takes part (csd0: private/house: Permission denied)", 3, DEVICES)
    assert found.endswith("'chmod -R a+rX' on the device opens it")


@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (-math.inf, "infinite")])
def test_a_model_that_has_diverged_is_named_with_its_round_and_devices(value: float, name: str) -> None:
    """Before: 'its state is not finite', of whatever round and devices."""
    found = diverged(value, "round", 3, ["csd1", "csd0"])
    assert found == (
        f"the model has diverged: its state is {name} after round 3, to which csd0, csd1 contributed; "
        "try a lower learning rate"
    )


def test_diverged_values_have_their_advice() -> None:
    refused = "update refused: its loss is not finite (NaN) in round 3"
    found = advised(f"no device takes part (csd0: {refused}, csd1: {refused})", 3, DEVICES)
    assert found.endswith(
        "; values have left the range of numbers: try a lower learning rate, or look at the samples"
    )
    other = "no device takes part (csd0: update refused: its norm is not as announced)"
    assert advised(other, 3, DEVICES) == other


@pytest.mark.parametrize(
    ("before", "device"),
    [
        ("fewer than 2 devices take part (host: no folder, csd1: KeyError at m.py:3", "csd1"),
        ("fewer than 2 devices take part (csd0: no folder, csd1: KeyError at m.py:3", "csd1"),
        ("csd0: KeyError at m.py:3; Error: what: an error whose text", "csd0"),
        ("fewer than 2 devices take part (csd10: KeyError at m.py:3", "DEVICE"),
        ("KeyError at m.py:3", "DEVICE"),
    ],
)
def test_a_message_that_stays_on_a_device_can_be_read_there(before: str, device: str) -> None:
    text = f"{before}; its message stays on the device"
    assert (
        advised(text, 7, DEVICES) == f"{text}; 'millpond logs --device {device} 7' shows the job's log there"
    )


@pytest.mark.parametrize(
    ("needed", "text"), [(1, "no device takes part"), (2, "fewer than 2 devices take part")]
)
def test_too_few_devices_are_told_in_english(needed: int, text: str) -> None:
    assert too_few(needed) == text
