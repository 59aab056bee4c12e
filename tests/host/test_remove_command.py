# SPDX-License-Identifier: Apache-2.0
"""``millpond remove``: with and without a daemon, and again after an attempt that was cut off at any step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import directory, provisioning, renewal
from millpond.host.records.jobs import JobState
from millpond.host.store.store import Store
from millpond.linux.file_lock import locked
from millpond.train.job.file import read as read_job

from .commands import Command
from .daemon_rig import JOB, Rig

Remove = Callable[[], tuple[int, str]]


@pytest.fixture
def remove(tmp_path: Path, command: Command) -> Remove:
    """Makes a fleet whose daemon does not run, and returns 'remove csd1' with its code and errors."""
    provisioning.create(tmp_path, "farm", ("csd0", "csd1"))

    def call() -> tuple[int, str]:
        done = command("remove", "--fleet", tmp_path, "csd1")
        return done.code, done.err

    return call


def devices(fleet: Path) -> list[str]:
    return [device.name for device in directory.read(fleet).config.device]


def hosts(fleet: Path) -> list[str]:
    known = directory.read(fleet).known_hosts
    return [line.split()[0] for line in known.read_text().splitlines()]


def test_a_device_is_removed_where_no_daemon_runs(tmp_path: Path, remove: Remove) -> None:
    """Before: it asked for a daemon to be started."""
    assert remove() == (0, "")
    assert (devices(tmp_path), hosts(tmp_path)) == (["csd0"], ["csd0"])
    code, error = remove()
    assert code == 2 and "no device 'csd1' in this fleet; it has csd0" in error


@pytest.mark.parametrize("is_revoked", [False, True])
def test_a_removed_device_has_a_good_certificate_unless_it_is_revoked(
    tmp_path: Path, command: Command, is_revoked: bool
) -> None:
    provisioning.create(tmp_path, "farm", ("csd0", "csd1"))
    if is_revoked:
        renewal.revoke(directory.read(tmp_path), "csd1")
    done = command("remove", "--fleet", tmp_path, "csd1")
    assert ("Its certificate stays good" in done.out) is not is_revoked


def test_the_certificate_of_a_removed_device_is_revoked_as_that_of_a_removed_one(
    tmp_path: Path, command: Command, remove: Remove
) -> None:
    """Before: it was said that the next daemon refuses a device that no fleet has."""
    assert remove()[0] == 0
    told = "csd1 is not in the fleet any more: a board that has this certificate is refused\n"
    assert command("revoke", "--fleet", tmp_path, "csd1").out.endswith(told)
    of_member = command("revoke", "--fleet", tmp_path, "csd0").out
    assert of_member.endswith("no host daemon that runs knows the device: the next one refuses it\n")


@pytest.mark.parametrize("done", ["fleet.toml", "known_hosts", "both"])
def test_what_was_cut_off_is_done_again(tmp_path: Path, remove: Remove, done: str) -> None:
    """Before: once the device was not in fleet.toml, its host key stayed known for ever."""
    fleet = directory.read(tmp_path)
    if done != "known_hosts":
        (tmp_path / "fleet.toml").write_text(provisioning.without(fleet, "csd1"))
    if done != "fleet.toml":
        lines = fleet.known_hosts.read_text().splitlines(keepends=True)
        fleet.known_hosts.write_text("".join(line for line in lines if line.split()[0] != "csd1"))
    assert remove()[0] == (2 if done == "both" else 0)
    assert (devices(tmp_path), hosts(tmp_path)) == (["csd0"], ["csd0"])


def test_a_job_with_which_the_next_daemon_goes_on_keeps_its_devices(tmp_path: Path, remove: Remove) -> None:
    path = tmp_path / "job.toml"
    (tmp_path / "given").mkdir()
    path.write_text(JOB.format(name="mine"))
    job, _ = read_job(path)
    store = Store(tmp_path / "fleet.db")
    first, second, ended = (
        store.add_job(replace(job, devices=names), {}) for names in (("csd0", "csd1"), (), ("csd1",))
    )
    store.end_job(ended, JobState.STOPPED)
    code, error = remove()
    assert code == 2 and error == f"millpond: csd1 is used by job {first}\n"
    store.end_job(first, JobState.STOPPED)
    store.begin_job(second)
    assert remove() == (2, f"millpond: csd1 is used by job {second}\n")
    assert (devices(tmp_path), hosts(tmp_path)) == (["csd0", "csd1"], ["csd0", "csd1"])
    store.end_job(second, JobState.STOPPED)
    store.close()
    assert remove()[0] == 0


def test_a_daemon_that_is_about_to_answer_is_no_absent_one(tmp_path: Path, remove: Remove) -> None:
    with locked(tmp_path / "host.lock", "taken"):
        code, error = remove()
    assert code == 2 and "starts or ends" in error
    assert devices(tmp_path) == ["csd0", "csd1"]


def test_a_daemon_that_has_forgotten_the_device_already_is_no_obstacle(rig: Rig) -> None:
    """Before: "there is no device 'csd1'", and it stayed in fleet.toml."""
    with DaemonClient(rig.directory) as client:
        client.remove_device("csd1")
    assert rig.command("remove", "csd1")[0] == 0
    assert devices(rig.directory) == ["csd0", "csd2"]


def test_a_daemon_that_knows_a_device_which_fleet_toml_lacks_forgets_it(rig: Rig) -> None:
    path = rig.directory / "fleet.toml"
    path.write_text(path.read_text().replace('[[device]]\nname = "csd1"\n', ""))
    assert rig.command("remove", "csd1")[0] == 0
    code, _, error = rig.command("remove", "csd1")
    assert code == 2 and "no device 'csd1' in this fleet; it has csd0, csd2" in error


def test_a_table_that_cannot_be_cut_out_is_told_before_the_daemon_forgets(rig: Rig) -> None:
    path = rig.directory / "fleet.toml"
    path.write_text('name = "rig"\ndevice = [{ name = "csd0" }, { name = "csd1" }, { name = "csd2" }]\n')
    with pytest.raises(ConfigError):
        provisioning.without(directory.read(rig.directory), "csd1")
    assert rig.command("remove", "csd1")[0] == 2
    with DaemonClient(rig.directory) as client:
        client.remove_device("csd1")  # which it still knows
