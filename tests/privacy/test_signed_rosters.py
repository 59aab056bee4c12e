# SPDX-License-Identifier: Apache-2.0
"""Rosters that owners sign: no host puts another device into a cohort, or takes a roster back."""

from __future__ import annotations

import base64
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millpond.agent.cohort import cohort_roster
from millpond.agent.cohort.cohort_key import make_key
from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.node.masked_update import MaskedUpdates
from millpond.agent.policy.settings import BY_OWNERS, Policy, check_policy
from millpond.aggregate.masking import keys, roster
from millpond.aggregate.masking.messages import Offered
from millpond.base.errors import ConfigError, Refused
from millpond.host.cli.sign import app
from millpond.linux import ssh_signatures
from millpond.wire.control_messages import CohortInForce

from ..identities import issued
from .test_masked_rounds import NAMES, PREPARED, SIZE, exchange_of
from .test_signed_code import new_key, public


@pytest.fixture
def owner(tmp_path: Path) -> Path:
    return new_key(tmp_path, "owner")


def policy(owner: Path) -> Policy:
    return Policy(cohort=BY_OWNERS, owners=(public(owner),), least_devices=2)


def cohort(owner: Path, folder: Path) -> dict[str, AgentConfig]:
    """Return the configurations of devices whose keys are made and whose roster is to be signed."""
    found = {}
    for name in NAMES:
        (folder / name).mkdir()
        make_key(folder / name, name)
        link, state, identity = LinkConfig("10.77.0.2/30", "s"), folder / name, issued(name, folder / name)
        found[name] = AgentConfig(name, link, state=str(state), identity=identity, policy=policy(owner))
    return found


def lines(folder: Path, names: tuple[str, ...]) -> str:
    return "".join((folder / name / "cohort.pub").read_text() for name in names)


def signed(key: Path, number: int, listed: str, namespace: str = roster.NAMESPACE) -> str:
    found = replace(roster.read(listed, "listed")[0], number=number)
    return found.text + ssh_signatures.sign(key, namespace, found.text)


def opened(configs: dict[str, AgentConfig]) -> None:
    """Have all devices open one exchange. Raises Refused."""
    devices = {name: MaskedUpdates(config, PREPARED, SIZE) for name, config in configs.items()}
    exchange = exchange_of(devices)
    for one in devices.values():
        assert isinstance(one.answer(exchange.opening()), Offered)


def test_devices_mask_for_those_of_the_newest_roster_of_their_owners_alone(
    owner: Path, tmp_path: Path
) -> None:
    configs = cohort(owner, tmp_path)
    with pytest.raises(Refused, match=r"policy\.cohort: no roster of its owners is here yet"):
        opened(configs)
    for number, names in ((1, NAMES), (2, NAMES[:2])):
        text = signed(owner, number, lines(tmp_path, names))
        for name, config in configs.items():
            assert cohort_roster.take(config.policy, tmp_path / name, text) == number
        opened({name: configs[name] for name in names})
    with pytest.raises(Refused, match=r"policy\.cohort: 'csd2' is not in roster 2 with this key"):
        opened(configs)
    assert cohort_roster.described(configs["csd0"].policy, tmp_path / "csd0") == CohortInForce(2, 2)


def test_a_roster_that_comes_while_a_job_runs_holds_from_the_next_exchange_on(
    owner: Path, tmp_path: Path
) -> None:
    configs = cohort(owner, tmp_path)
    for name, config in configs.items():
        cohort_roster.take(config.policy, tmp_path / name, signed(owner, 1, lines(tmp_path, NAMES)))
    devices = {name: MaskedUpdates(config, PREPARED, SIZE) for name, config in configs.items()}
    assert isinstance(devices["csd0"].answer(exchange_of(devices).opening()), Offered)
    cohort_roster.take(
        configs["csd0"].policy, tmp_path / "csd0", signed(owner, 2, lines(tmp_path, NAMES[:2]))
    )
    with pytest.raises(Refused, match="'csd2' is not in roster 2"):
        devices["csd0"].answer(exchange_of(devices).opening())


def test_an_older_roster_and_another_one_of_the_same_number_are_refused(owner: Path, tmp_path: Path) -> None:
    configs = cohort(owner, tmp_path)
    state, rules = tmp_path / "csd0", configs["csd0"].policy
    newest, all_of_them = signed(owner, 2, lines(tmp_path, NAMES[:2])), lines(tmp_path, NAMES)
    cohort_roster.take(rules, state, newest)
    for number in (1, 2):
        with pytest.raises(Refused, match=f"roster {number} is not newer, or another one: .* roster 2"):
            cohort_roster.take(rules, state, signed(owner, number, all_of_them))
    assert cohort_roster.take(rules, state, newest) == 2
    assert cohort_roster.take(rules, state, signed(owner, 3, all_of_them)) == 3


@pytest.mark.parametrize("change", ["key", "namespace", "number", "device", "unsigned"])
def test_a_roster_that_no_owner_has_signed_is_refused(change: str, owner: Path, tmp_path: Path) -> None:
    configs = cohort(owner, tmp_path)
    listed, key = lines(tmp_path, NAMES), new_key(tmp_path, "other") if change == "key" else owner
    text = signed(key, 1, listed, "millpond-code" if change == "namespace" else roster.NAMESPACE)
    made_up = base64.b64encode(keys.LastingKey(os.urandom(32)).public).decode()
    changed = {
        "number": text.replace("roster 1", "roster 9"),
        "device": text.replace("csd2 ", f"csd3 {made_up}\ncsd2 "),
        "unsigned": text.partition("-----")[0],
    }.get(change, text)
    with pytest.raises(Refused, match=r"no owner of the device has signed roster") as caught:
        cohort_roster.take(configs["csd0"].policy, tmp_path / "csd0", changed)
    assert caught.value.code == "policy"
    assert not (tmp_path / "csd0" / cohort_roster.FILE).exists()


def test_the_roster_of_an_owner_who_is_none_any_more_does_not_hold(owner: Path, tmp_path: Path) -> None:
    configs = cohort(owner, tmp_path)
    for name, config in configs.items():
        cohort_roster.take(config.policy, tmp_path / name, signed(owner, 1, lines(tmp_path, NAMES)))
    other = policy(new_key(tmp_path, "other"))
    with pytest.raises(Refused, match="no owner of the device has signed roster 1"):
        opened({name: replace(config, policy=other) for name, config in configs.items()})


def test_a_device_with_pins_takes_no_roster(owner: Path, tmp_path: Path) -> None:
    cohort(owner, tmp_path)
    text = signed(owner, 1, lines(tmp_path, NAMES))
    with pytest.raises(Refused, match=r"its cohort is not \['owners'\]"):
        cohort_roster.take(Policy(owners=(public(owner),)), tmp_path, text)
    with pytest.raises(ConfigError, match="'owners' needs keys in owners"):
        check_policy(Policy(cohort=BY_OWNERS), "agent.toml: policy")


def test_a_file_is_signed_in_place_and_its_number_grows(owner: Path, tmp_path: Path) -> None:
    configs = cohort(owner, tmp_path)
    file = tmp_path / "roster"
    file.write_text(lines(tmp_path, NAMES))
    for number in (1, 2):
        found = CliRunner().invoke(app, ["roster", "sign", str(file), "--key", str(owner)])
        assert found.exit_code == 0 and f"is roster {number} of csd0, csd1, csd2" in found.output
        assert cohort_roster.take(configs["csd0"].policy, tmp_path / "csd0", file.read_text()) == number


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "a roster has 1 to"),
        ("csd0 AAAA\n", "is no line of a device's cohort.pub"),
        (f"../csd0 {86 * 'A'}==\n", "is no line of a device's cohort.pub"),
        (f"csd0 {86 * 'A'}==\ncsd1 {86 * 'A'}==\n", "'csd1' or its key is there twice"),
        (f"millpond roster 1e9\ncsd0 {86 * 'A'}==\n", "'1e9' is no number of a roster"),
        ("csd0 " * roster.MOST_BYTES, "more than"),
    ],
)
def test_a_file_that_is_no_roster(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        roster.read(text, "the roster")
