# SPDX-License-Identifier: Apache-2.0
"""Masked rounds on a fleet: the model's bits, a device that dies, pinned cohorts, privacy budgets."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from millpond.base.errors import MillpondError
from millpond.host.api.outer import OuterAnswer
from millpond.host.client.outer_client import OuterClient
from millpond.privacy.accounting import rho_of
from millpond.train.job import file
from millpond.train.job.signed_code import digest

from ..waiting import eventually
from .conftest import _switched_on
from .support import SLOW_MODEL, Emulation, create, millpond

pytestmark = pytest.mark.timeout(300)

NAMES = ("csd0", "csd1", "csd2", "csd3")
WAITING = SLOW_MODEL.replace(
    """if self.training and not told("hurry"):
            time.sleep(0.1)""",
    """while self.training and FOLDERS[0].exists() and not told("hurry"):  # on a device
            print("it trains", flush=True)
            time.sleep(0.1)""",
)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulation]:
    emulation = create(tmp_path_factory.mktemp("cohort"), NAMES, lan=True)
    for name in NAMES:
        own = emulation.fleet.device_directory(name) / "etc" / "agent.toml"
        own.write_text(f"{own.read_text()}\n[policy]\nplain_lan = true\n")
    with _switched_on(emulation):
        emulation.wait_ready()
        yield emulation


def job(
    fleet: Emulation,
    name: str,
    secure: str,
    rounds: int = 2,
    code: str = SLOW_MODEL,
    bits: str = '"auto"',
    shape: str = "",
) -> Path:
    path = fleet.write_job(name, rounds=rounds, code=code)
    own = f'[federated]\nsecure = "{secure}"\nsum_bits = {bits}\n'
    text = path.read_text().replace("[federated]\n", own)
    root = f'aggregate = "csd1"\ntopology = "{shape}"\n' if shape else 'aggregate = "host"\n'
    path.write_text(f"{root}{text}\n[limits]\nclip = 0.05\n")
    return path


def model_of(fleet: Emulation, number: int) -> dict[str, bytes]:
    tensors = load_file(fleet.directory / "jobs" / str(number) / "model.safetensors")
    return {name: values.tobytes() for name, values in tensors.items()}


def training(fleet: Emulation, name: str) -> int:
    """The number of devices whose worker trains for a job."""
    logs = fleet.directory.glob(f"devices/*/flash/private/.millpond-logs/*{name}*.log")
    return sum("it trains" in log.read_text() for log in logs)


@pytest.mark.parametrize(("bits", "shapes"), [("64", ("", "tree", "udp")), ('"auto"', ("", "ring", "star"))])
def test_the_model_has_the_same_bits_as_without_masks(
    cohort: Emulation, bits: str, shapes: tuple[str, ...]
) -> None:
    """Whether the host adds the updates, or devices do."""
    kinds = [("", ""), *(("cohort", shape) for shape in shapes)]
    with cohort.pace() as pace:
        pace.hurry()
        paths = [
            job(cohort, f"bits-{n}", each, bits=bits, shape=shape) for n, (each, shape) in enumerate(kinds)
        ]
        numbers = [cohort.submit(path) for path in paths]
        ended = [cohort.wait_for_end(number) for number in numbers]
    plain, expected = ended[0][1], model_of(cohort, numbers[0])
    for (_, shape), number, (info, rounds) in zip(kinds, numbers, ended, strict=True):
        assert info.state == "done", f"{info.error}\n{cohort.logs()}"
        assert [set(round_.workers) for round_ in rounds] == [set(NAMES)] * 2
        assert model_of(cohort, number) == expected
        for one, other in zip(plain, rounds, strict=True):
            assert other.metrics["training_loss"] == pytest.approx(one.metrics["training_loss"], abs=1e-5)
        log = (cohort.directory / "jobs" / str(number) / "job.log").read_text()
        assert ("devices add the updates" in log) == bool(shape) and "cannot add among themselves" not in log
    log = (cohort.directory / "host.log").read_text()
    assert "updates are masked: the host learns sums of 3 devices and more; against a curious host" in log


def test_a_device_dies_in_mid_round_and_the_bits_are_those_of_the_others(cohort: Emulation) -> None:
    models = []
    for each in ("", "cohort"):
        cohort.wait_ready()
        with cohort.pace() as pace:
            number = cohort.submit(job(cohort, f"dies-{each}", each, 1, WAITING))
            eventually(lambda each=each: training(cohort, f"dies-{each}") == 4, "all of them train", 120)
            cohort.pid_one("csd3").kill()
            pace.hurry()
            info, (round_,) = cohort.wait_for_end(number)
        assert info.state == "done", f"{info.error}\n{cohort.logs()}"
        assert set(round_.workers) == set(NAMES) - {"csd3"}
        models.append(model_of(cohort, number))
    assert models[0] == models[1]


def outer(fleet: Emulation, secure: str) -> tuple[OuterAnswer, bytes]:
    """Return what a resident job answers to an outer round."""
    read, files = file.read(job(fleet, f"outer-{secure}", secure), ["outer.every=2"])
    with fleet.client() as client:
        number = client.submit(read, files)
    with OuterClient(fleet.directory) as client:
        _, state = client.outer_model(number)
        answer, changed = client.outer_round(number, "train", "1", state)
        with pytest.raises(MillpondError):
            client.outer_round(number, "end", "end", state)
    eventually(lambda: fleet.progress(number)[0].state == "done", "the end of the job", 60, 0.1)
    return answer, changed.tobytes()


def test_an_outer_round_is_of_masked_rounds(cohort: Emulation) -> None:
    """The fleet's mean differences over a resident job are sums, too."""
    cohort.wait_ready()
    with cohort.pace() as pace:
        pace.hurry()
        (plain, values), (masked, same) = (outer(cohort, secure) for secure in ("", "cohort"))
    assert (masked.rounds, masked.samples) == (plain.rounds, plain.samples) == (2, plain.samples)
    assert same == values


def set_policy(fleet: Emulation, text: str) -> None:
    """Give all devices this policy, and restart them."""
    for name in NAMES:
        own = fleet.fleet.device_directory(name) / "etc" / "agent.toml"
        own.write_text(f"{own.read_text().partition('[policy]')[0]}\n[policy]\n{text}")
        fleet.pid_one(name).kill()
    fleet.wait_ready()


def pins(fleet: Emulation) -> str:
    """Return the items of ``policy.cohort`` for all devices."""
    folders = [fleet.fleet.device_directory(name) for name in NAMES]
    return ", ".join(f'"{next(folder.rglob("cohort.pub")).read_text().strip()}"' for folder in folders)


def private(fleet: Emulation, name: str, secure: str, epsilon: float) -> Path:
    """Return a job of two rounds with noise."""
    path = job(fleet, name, secure)
    path.write_text(f"{path.read_text()}\n[privacy]\nepsilon = {epsilon}\n")
    return path


def test_a_budget_is_kept_over_jobs_and_restarts_and_then_the_folder_is_silent(cohort: Emulation) -> None:
    budget = "budget = { epsilon = 8 }\n"
    set_policy(cohort, budget)
    with cohort.pace() as pace:
        pace.hurry()
        plain, _ = cohort.wait_for_end(cohort.submit(job(cohort, "no-privacy", "cohort")))
        assert "policy.budget: private folders have a privacy budget" in plain.error
        shared, _ = cohort.wait_for_end(cohort.submit(private(cohort, "unpinned", "cohort", 4.0)))
        assert "policy.budget: devices share the noise of a masked sum" in shared.error
        for name, secure in (("noisy-star", ""), ("noisy", "cohort")):
            if secure:
                set_policy(cohort, f"{budget}cohort = [{pins(cohort)}]\n")
            ended, rounds = cohort.wait_for_end(cohort.submit(private(cohort, name, secure, 4.0)))
            assert ended.state == "done", f"{ended.error}\n{cohort.logs()}"
            assert [set(round_.workers) for round_ in rounds] == [set(NAMES)] * 2
            assert "training_loss" not in rounds[0].metrics
        silent, _ = cohort.wait_for_end(cohort.submit(private(cohort, "silent", "cohort", 8.0)))
    assert "of its privacy budget left, less than this costs" in silent.error
    loads = [info.load for info in cohort.devices().values()]
    assert all(load and dict(load.budgets)["private/digits"] > 0.5 for load in loads)
    log = (cohort.directory / "host.log").read_text()
    assert "privacy: 2 rounds are (4, 1e-05)-private for each device" in log


def spent(fleet: Emulation) -> list[float]:
    """Return what each device has spent of its folder, as its ledger says."""
    ledgers = ([*fleet.fleet.device_directory(name).rglob("privacy-budget.json")] for name in NAMES)
    return [sum(json.loads(one.read_text())["spent"]["private/digits"] for one in found) for found in ledgers]


def test_groups_are_the_unit_of_noise_in_listed_code_alone(cohort: Emulation) -> None:
    """The worker clips each group, which the agent cannot see: a budget for groups is for code it knows."""
    paths = [job(cohort, f"groups-{secure}", secure) for secure in ("", "cohort")]
    for path in paths:
        path.write_text(f'{path.read_text()}\n[privacy]\nepsilon = 4.0\nunit = "group"\n')
    read, files = file.read(paths[0])
    listed = digest(read.work, file.describe(files, "job"))
    policy = f'budget = {{ epsilon = 50, unit = "group" }}\ncode = "listed"\nlisted = ["{listed}"]\n'
    for path, pinned in zip(paths, ("", f"cohort = [{pins(cohort)}]\n"), strict=True):
        set_policy(cohort, policy + pinned)
        before = spent(cohort)
        with cohort.pace() as pace:
            pace.hurry()
            ended, rounds = cohort.wait_for_end(cohort.submit(path))
        assert ended.state == "done", f"{ended.error}\n{cohort.logs()}"
        assert [set(round_.workers) for round_ in rounds] == [set(NAMES)] * 2
        for old, new in zip(before, spent(cohort), strict=True):
            assert new - old == pytest.approx(rho_of(4.0, 1e-5), rel=1e-6)
    assert "(4, 1e-05)-private for each group" in (cohort.directory / "host.log").read_text()


def test_pinned_devices_take_part_in_masked_jobs_of_their_cohort_alone(cohort: Emulation) -> None:
    cohort.wait_ready()
    set_policy(cohort, f"cohort = [{pins(cohort)}]\nleast_devices = 4\n")
    with cohort.pace() as pace:
        pace.hurry()
        plain, _ = cohort.wait_for_end(cohort.submit(job(cohort, "unmasked", "", 1)))
        masked, _ = cohort.wait_for_end(cohort.submit(job(cohort, "pinned", "cohort", 1)))
    assert "policy.cohort: private folders are for jobs with federated.secure alone" in plain.error
    assert masked.state == "done", f"{masked.error}\n{cohort.logs()}"
    assert (
        "sums of 4 devices and more, of cohorts that the devices have pinned"
        in (cohort.directory / "host.log").read_text()
    )
    table = cohort.millpond("devices").out
    assert table.count("4 pinned") == 4, table


def test_devices_mask_for_those_of_a_roster_that_their_owner_has_signed(
    cohort: Emulation, tmp_path: Path
) -> None:
    cohort.wait_ready()
    key, roster = tmp_path / "owner", tmp_path / "roster"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    owner = key.with_suffix(".pub").read_text().strip()
    set_policy(cohort, f'cohort = ["owners"]\nowners = ["{owner}"]\nleast_devices = 4\n')
    folders = (cohort.fleet.device_directory(name) for name in NAMES)
    roster.write_text("".join(next(folder.rglob("cohort.pub")).read_text() for folder in folders))
    signed = millpond("roster", "sign", roster, "--key", key)
    assert "is roster 1 of csd0, csd1, csd2, csd3" in signed.out, signed.err
    assert cohort.millpond("devices").out.count("no roster") == 4
    with cohort.pace() as pace:
        pace.hurry()
        early, _ = cohort.wait_for_end(cohort.submit(job(cohort, "early", "cohort", 1)))
        sent = millpond("roster", "send", "--fleet", cohort.directory, roster)
        assert sent.code == 0 and sent.out.count("has roster 1") == 4, sent
        masked, _ = cohort.wait_for_end(cohort.submit(job(cohort, "rostered", "cohort", 1)))
    assert "policy.cohort: no roster of its owners is here yet" in early.error
    assert masked.state == "done", f"{masked.error}\n{cohort.logs()}"
    log = (cohort.directory / "host.log").read_text()
    assert "sums of 4 devices and more, of roster 1, which owners of the devices have signed" in log
    eventually(lambda: cohort.millpond("devices").out.count("roster 1: 4") == 4, "the next loads", 60)
    roster.write_text(roster.read_text().replace("roster 1", "roster 9"))
    refused = millpond("roster", "send", "--fleet", cohort.directory, roster)
    assert refused.code == 1 and refused.out.count("no owner of the device has signed roster 9") == 4
