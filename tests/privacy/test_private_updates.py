# SPDX-License-Identifier: Apache-2.0
"""Updates with noise: what leaves a device, what it costs, and what is refused when nothing is left."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from millpond.agent import job_worker
from millpond.agent.policy.budget_ledger import BudgetLedger
from millpond.agent.policy.settings import Budget, Policy
from millpond.base.errors import Refused
from millpond.linux.zygote.client import Zygote
from millpond.privacy.accounting import epsilon_of, rho_of
from millpond.privacy.spec import PrivacySpec
from millpond.train.protocol import DataTiming, Folder, Update, Work

from .support import Device, Host, Volume, device, model, soon, states

EPSILON, DELTA, ROUNDS, CLIP = 3.0, 1e-5, 4, 0.5
ALL = ((0, 48),)
DIGITS = "private/digits"
ANY = Policy(answers_per_state=0)


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path, samples=48)


def noisy(
    volume: Volume,
    zygote: Zygote,
    budget: Budget | None,
    unit: Literal["device", "group"] = "device",
    epsilon: float = EPSILON,
    clip: float = CLIP,
) -> AbstractContextManager[Device]:
    """A device whose job has noise."""
    spec, policy = PrivacySpec(epsilon, DELTA, unit), Policy(budget=budget, answers_per_state=0)
    return device(volume, zygote, policy=policy, privacy=spec, rounds=ROUNDS, clip=clip, passes=1, batch=8)


def test_a_job_spends_its_epsilon_and_no_more(volume: Volume, zygote: Zygote) -> None:
    """The whole budget is for one job: its rounds are answered, and nothing after them, nor by a new
    worker.
    """
    with noisy(volume, zygote, Budget(EPSILON, DELTA)) as made:
        with made.host() as host:
            for number in range(ROUNDS):
                update = host.ask(ALL, state=number, epoch=number)
                assert update.metrics == {"loss": (0.0, 0.0)} and update.weight == 1
                planned = rho_of(EPSILON, DELTA) * (number + 1) / ROUNDS
                assert planned <= made.ledger.spent(DIGITS) <= planned * (1 + 1e-9)
            with pytest.raises(Refused, match="the job has spent its epsilon"):
                host.ask(ALL, state=9, epoch=9)
        spent = epsilon_of(made.ledger.spent(DIGITS), DELTA)
        assert EPSILON * 0.999 < spent < EPSILON * (1 + 1e-6)
        again = BudgetLedger(volume.base / "state" / "budget")
        assert again.shares(Budget(EPSILON, DELTA).rho)[DIGITS] > 1 - 1e-9
    with pytest.raises(Refused, match=r"policy\.budget: the privacy budget of 'private/digits' is spent"):
        noisy(volume, zygote, Budget(EPSILON, DELTA), epsilon=0.1).__enter__()


def test_a_job_that_costs_more_than_is_left_does_not_begin(volume: Volume, zygote: Zygote) -> None:
    with pytest.raises(Refused, match=r"'private/digits' has 100.0% of its privacy budget left, less than"):
        noisy(volume, zygote, Budget(1.0, DELTA)).__enter__()


def test_a_budget_refuses_what_is_not_charged(volume: Volume, zygote: Zygote) -> None:
    with pytest.raises(Refused, match=r"policy\.budget: .* for jobs with \[privacy\]"):
        device(volume, zygote, policy=Policy(budget=Budget(8.0))).__enter__()
    with pytest.raises(Refused, match='the job has noise for unit = "group"'):
        noisy(volume, zygote, Budget(8.0), "group").__enter__()


def test_noise_is_as_wide_as_planned(volume: Volume, zygote: Zygote) -> None:
    """One device alone adds all of the noise: its width is that of the plan, and the clip bounds the rest."""
    with noisy(volume, zygote, None) as made, made.host() as host:
        values = host.values(ALL)
    width = CLIP * PrivacySpec(EPSILON, DELTA).multiplier(ROUNDS)
    assert len(values) > 100
    assert abs(float(values.std()) / width - 1) < 6 / math.sqrt(2 * len(values)) + 0.05


def test_no_refusal_tells_of_samples_at_a_state_that_the_host_has_chosen(
    volume: Volume, zygote: Zygote
) -> None:
    """Its weights make values overflow if a picture is bright."""
    with noisy(volume, zygote, None) as made, made.host() as host:
        found = host.ask_at(np.full(host.size, 1e38, np.float32), ALL)
    width = CLIP * PrivacySpec(EPSILON, DELTA).multiplier(ROUNDS)
    assert 0 < np.abs(found).max() < 8 * width


def test_an_update_is_clipped_and_else_as_it_was(volume: Volume, zygote: Zygote) -> None:
    """At an epsilon that hides nothing the update is that of a job without noise, over its samples."""
    with (
        device(volume, zygote, policy=Policy(answers_per_state=0), passes=1, batch=8) as made,
        made.host() as host,
    ):
        plain = host.values(ALL).astype(np.float64) / 48
    norm = float(np.linalg.norm(plain))
    for clip in (10 * norm, norm / 3):
        with noisy(volume, zygote, None, epsilon=1e9, clip=clip) as made, made.host() as host:
            found = host.values(ALL)
        expected = plain * min(1.0, clip / norm)
        assert np.linalg.norm(found - expected) < 0.02 * clip


def test_each_group_is_clipped_alone(volume: Volume, zygote: Zygote) -> None:
    """The sum of the groups' differences, each scaled down, and another group changes it by the clip at
    most.
    """
    groups = []
    with (
        device(volume, zygote, policy=Policy(answers_per_state=0), passes=1, batch=8) as made,
        made.host() as host,
    ):
        for start in range(0, 48, 8):
            groups.append(host.values(((start, start + 8),)).astype(np.float64) / 8)
    norms = [float(np.linalg.norm(each)) for each in groups]
    clip = sorted(norms)[3]
    expected = sum(each * min(1.0, clip / norm) for each, norm in zip(groups, norms, strict=True))
    with noisy(volume, zygote, None, "group", epsilon=1e9, clip=clip) as made, made.host() as host:
        update = host.ask(ALL)
        found = host.fetch()
    assert update.weight == 6
    assert np.linalg.norm(found - expected) < 0.02 * clip


PUBLIC = Folder("public/digits", "csd0", public=True)
MASKS = {"secure": "cohort", "clip": CLIP, "passes": 1, "batch": 8}
NOISE = {"privacy": PrivacySpec(EPSILON, DELTA), "rounds": ROUNDS, "clip": CLIP, "passes": 1, "batch": 8}
TELL = """
def forward(model, images):
    from millpond.train.protocol import DataTiming, Update, WorkProgress
    from millpond.wire.framing import encode
    asked = request()
    say(encode(WorkProgress(47)))
    more = dict(local_steps=1.5, shift=4711.0, unused=(0,), data=DataTiming(17, 17, 4711.0))
    floats = (asked.samples, 1.0, 1.0, 4711.0, 0.4711)
    head = Update(asked.exchange, asked.samples, *floats, 4711, {"loss": (4711.0, 1.0)}, **more)
    say_and_wait(encode(head))
"""
TELL_HELD = """
def build(model):
    from millpond.train.protocol import Ready
    from millpond.wire.framing import encode
    say_and_wait(encode(Ready((40,), (8,))))
"""


@pytest.mark.parametrize("policy", [Policy(budget=Budget(8.0)), Policy(cohort=3 * (f"csd1 {86 * 'A'}==",))])
def test_no_later_job_of_the_name_has_what_an_earlier_one_kept(
    policy: Policy, volume: Volume, zygote: Zygote
) -> None:
    """A job on public folders alone has no noise: samples that an earlier job left could be its update."""
    images = np.load(volume.path / DIGITS / "images.npy")
    volume.save(PUBLIC.path, images, volume.labels)
    with device(volume, zygote, folders=(PUBLIC,), policy=policy):
        assert not (volume.path / "private" / ".millpond" / "attack").exists()


def asked(host: Host, request: Work) -> Update:
    host.channel.send(request, soon(), states(host.size, 0).tobytes())
    return host.channel.expect(Update, soon())


@pytest.mark.parametrize(
    ("bound", "synthetic"), [(NOISE, 0), (NOISE, 8), (MASKS, 8)], ids=["noise", "made up", "masks"]
)
def test_no_figure_by_the_workers_word_leaves(
    bound: dict[str, Any],
    synthetic: int,
    volume: Volume,
    zygote: Zygote,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_worker, "PROGRESS_SECONDS", 0.0)
    with device(volume, zygote, model(TELL), policy=ANY, **bound) as made, made.host() as host:
        found = asked(host, Work(7, 0, 0, (() if synthetic else ALL,), synthetic))
        assert (
            0 < found.seconds < 60
            and math.isnan(found.busy)
            and found.seconds == float(f"{found.seconds:.1e}")
        )
        assert (found.peak, found.shift, found.unused, found.local_steps) == (0, 0.0, (), 1.0)
        assert found.data == DataTiming() and found.metrics["loss"][0] == 0.0


@pytest.mark.parametrize("bound", [NOISE, MASKS], ids=["noise", "masks"])
def test_no_score_leaves_a_device_with_noise_or_masks(
    bound: dict[str, Any], volume: Volume, zygote: Zygote
) -> None:
    with device(volume, zygote, policy=ANY, **bound) as made, made.host() as host:
        for request in (Work(7, 0, 0, ((),), held_out=True), Work(7, 0, 0, ((),))):
            with pytest.raises(Refused, match=r"no scores of samples|update of no samples"):
                asked(host, request)
    with pytest.raises(Refused, match="no scores of samples"):
        device(volume, zygote, model(TELL_HELD), policy=ANY, **bound).__enter__()
