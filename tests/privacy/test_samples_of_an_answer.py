# SPDX-License-Identifier: Apache-2.0
"""Attacks on single samples: a host that asks for what it must not get, and what it can get all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from millpond.agent.policy import StateAnswers
from millpond.agent.policy_settings import Policy
from millpond.base.errors import ConnectionLost, Refused
from millpond.linux.zygote.client import Zygote
from millpond.train.balance.ranges import Ranges
from millpond.train.protocol import Fetch, Folder
from millpond.train.state.layout import Tensor

from .support import DIGITS, SIZE, Device, Volume, device, gradients, model, soon, states

LEAST = Policy().least_samples


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


@pytest.mark.parametrize(
    "ranges",
    [
        ((4, 5),),
        ((0, LEAST - 1),),
        ((0, 1), (10, 11), (20, 21)),
        ((0, LEAST), (0, 1)),
        ((-LEAST, 1),),
        ((49, 49 + LEAST),),
        ((0, 30), (49, 20)),
        ((0, LEAST), (5, 5)),
    ],
)
def test_one_chosen_sample_is_refused(volume: Volume, zygote: Zygote, ranges: Ranges) -> None:
    with device(volume, zygote) as csd0, csd0.host() as host:
        with pytest.raises(Refused, match=r"policy\.least_samples|samples -?\d+ to \d+ are wanted") as caught:
            host.ask(ranges)
        assert caught.value.code in ("policy", "data")
        assert csd0.sent["parameters"] == 0
        whole = host.values(((0, LEAST),))
        expected = gradients(volume, states(SIZE, 0))[csd0.order(0)[:LEAST]].sum(0)
        np.testing.assert_allclose(whole, expected, rtol=1e-3, atol=1e-5)


def test_a_folder_of_few_samples_is_refused(tmp_path: Path, zygote: Zygote) -> None:
    few = Volume(tmp_path, samples=LEAST - 1)
    with pytest.raises(Refused, match=r"policy\.least_samples: 'private/digits' has 7 samples"):
        Device(few, zygote)


@pytest.mark.parametrize("path", ["private/./digits", "private//digits", "private/digits/", "./private"])
def test_a_folder_has_one_name(volume: Volume, zygote: Zygote, path: str) -> None:
    with pytest.raises(Refused, match="must be written 'private"):
        Device(volume, zygote, folders=[Folder(path, "csd0")])


def test_a_folder_cannot_be_named_twice(volume: Volume, zygote: Zygote) -> None:
    with pytest.raises(Refused, match="named twice"), device(volume, zygote, folders=[DIGITS, DIGITS]):
        pass


@pytest.mark.parametrize("link", ["../../private/digits/{}", "{volume}/private/digits/{}"])
def test_a_private_sample_cannot_pass_for_a_public_one(volume: Volume, zygote: Zygote, link: str) -> None:
    """The host makes links in public/, to a private folder that the job may read."""
    folder = volume.path / "public/set"
    folder.mkdir()
    for name in ("images.npy", "labels.npy"):
        (folder / name).symlink_to(link.format(name, volume=volume.path))
    whole = volume.path / "public/whole"
    whole.symlink_to(Path(link.format("", volume=volume.path)).as_posix().removeprefix("../"))
    assert (folder / "images.npy").exists() and whole.is_dir()  # outside of the sandbox they lead there
    for path in ("public/set", "public/whole"):
        with pytest.raises(Refused, match=f"{path}") as caught:
            Device(volume, zygote, folders=[DIGITS, Folder(path, "csd0", public=True)])
        assert caught.value.code == "data"


def test_made_up_samples_show_no_private_data(tmp_path: Path, zygote: Zygote) -> None:
    found = []
    for seed in (1, 2):
        with device(Volume(tmp_path / str(seed), seed=seed), zygote) as csd0, csd0.host() as host:
            real = host.values(((0, LEAST),))
            update = host.ask((), synthetic=1)
            head = update.metrics, update.largest, update.norm
            found.append((head, host.fetch().tobytes(), real.tobytes()))
    assert found[0][:2] == found[1][:2]
    assert found[0][2] != found[1][2]


def test_values_leave_with_their_own_update_alone(volume: Volume, zygote: Zygote) -> None:
    """Otherwise an answer would leave uncounted, behind a request that is refused or fails."""
    ranges = ((0, LEAST),)
    with device(volume, zygote) as csd0:
        for between in ({}, {"epoch": -1}, {"synthetic": 1 << 60}, {"synthetic": -1}):
            with csd0.host() as host:
                if between:
                    host.ask(ranges)
                    with pytest.raises(Refused):
                        host.ask(ranges, **between)
                host.channel.send(Fetch(0, SIZE), soon())
                with pytest.raises(ConnectionLost):
                    host.channel.receive(soon())
            assert "an update that was not answered" in str(csd0.error)
        assert csd0.sent["parameters"] == 0


def test_batches_that_overlap_are_refused(volume: Volume, zygote: Zygote) -> None:
    with device(volume, zygote) as csd0, csd0.host() as host:
        first = host.values(((0, LEAST),))
        for ranges in (((0, LEAST + 1),), ((LEAST - 1, 2 * LEAST),), ((20, 30), (3, 4))):
            with pytest.raises(Refused, match=r"policy\.least_samples: .* wanted twice in epoch 0"):
                host.ask(ranges)
        with pytest.raises(Refused, match=r"policy\.least_samples"):
            host.ask(((0, LEAST),), seed=1)  # with other random draws
        assert host.values(((0, LEAST),)).tobytes() == first.tobytes()  # the same request repeated
        assert host.values(((LEAST, 2 * LEAST),)).any()
        host.values(((0, LEAST),), epoch=1)
        with pytest.raises(Refused, match=r"policy\.least_samples: epoch 0 is wanted after epoch 1"):
            host.ask(((0, LEAST + 1),))


def test_answers_at_one_state_are_bounded(volume: Volume, zygote: Zygote) -> None:
    policy = Policy(answers_per_state=3)
    with device(volume, zygote, policy=policy) as csd0, csd0.host() as host:
        for epoch in range(3):
            host.values(((0, LEAST),), epoch=epoch)
        for ranges, epoch in ((((0, LEAST),), 2), (((LEAST, 20),), 2), (((0, LEAST),), 3)):
            with pytest.raises(Refused, match=r"policy\.answers_per_state: .* has given 3 answers") as caught:
                host.ask(ranges, epoch=epoch)
            assert caught.value.code == "state"
        host.values(((0, LEAST),), epoch=4, state=1)


def test_known_limit_a_new_worker_forgets_the_epoch(volume: Volume, zygote: Zygote) -> None:
    """Two answers of two workers differ by one sample, unless a state has one answer only."""
    found = []
    answers = StateAnswers(2)
    for stop in (LEAST, LEAST + 1):
        with device(volume, zygote, answers=answers) as csd0, csd0.host() as host:
            found.append(host.values(((0, stop),)))
            victim = csd0.order(0)[LEAST]
    expected = gradients(volume, states(SIZE, 0))[victim]
    np.testing.assert_allclose(found[1] - found[0], expected, rtol=0.01, atol=1e-4)
    with (
        device(volume, zygote, answers=answers) as csd0,
        csd0.host() as host,
        pytest.raises(Refused) as caught,
    ):
        host.ask(((0, LEAST),))
    assert "policy.answers_per_state" in caught.value.text


def test_known_limit_the_head_of_an_update_that_is_not_fetched_counts_for_nothing(
    volume: Volume, zygote: Zygote
) -> None:
    """The losses of two updates differ by one sample's. A host whose quorum was not reached asks again."""
    with device(volume, zygote, policy=Policy(answers_per_state=1)) as csd0, csd0.host() as host:
        losses = [host.ask(((0, stop),)).metrics["loss"] for stop in (LEAST, LEAST + 1)]
        assert csd0.sent["parameters"] == 0
        victim = csd0.order(0)[LEAST]
    bias = gradients(volume, states(SIZE, 0))[victim, SIZE - 8 :]
    assert losses[1] - losses[0] == pytest.approx(-np.log(1 + bias.min()), rel=1e-3)


def test_known_limit_many_epochs_are_a_linear_system(
    tmp_path: Path, zygote: Zygote, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each answer is the sum of samples that the host can name, at states that differ by an ulp: as many
    answers as samples show the gradient of each.
    """
    volume = Volume(tmp_path, samples=12)
    rows: list[NDArray[np.float64]] = []
    sums: list[NDArray[np.float32]] = []
    with device(volume, zygote, policy=Policy(answers_per_state=1)) as csd0, csd0.host() as host:
        while len(rows) < 12 or np.linalg.matrix_rank(np.array(rows)) < 12:
            epoch = len(rows)
            sums.append(host.values(((0, LEAST),), epoch=epoch, state=epoch))
            rows.append(np.isin(np.arange(12), csd0.order(epoch)[:LEAST]).astype(float))
    found = np.linalg.lstsq(np.array(rows), np.array(sums, np.float64), rcond=None)[0]
    np.testing.assert_allclose(found, gradients(volume, states(SIZE, 0)), rtol=0.05, atol=1e-4)
    with capsys.disabled():
        print(f"\n12 private samples, {LEAST} in an answer: {len(rows)} answers show each one's gradient")


TRAP = {
    "net.py": """
from torch import nn

def Net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.ReLU(), nn.Linear(1, 8))
"""
}
TRAP_TENSORS = (
    Tensor("1.weight", (1, 64), "float32"),
    Tensor("1.bias", (1,), "float32"),
    Tensor("3.weight", (8, 1), "float32"),
    Tensor("3.bias", (8,), "float32"),
)


def test_known_limit_a_chosen_state_shows_one_sample_of_an_answer(volume: Volume, zygote: Zygote) -> None:
    """A neuron that only the brightest image excites: the sum over all samples is that image times a number.
    The host finds the threshold by bisection.
    """
    brightness = np.sort(volume.images.sum(1))
    state = np.zeros(64 + 1 + 8 + 8, np.float32)
    state[:64], state[64], state[65:73] = 1.0, -brightness[-2:].mean(), np.arange(8)
    with device(volume, zygote, TRAP, tensors=TRAP_TENSORS) as csd0, csd0.host() as host:
        found = host.ask_at(state, ((0, len(volume.images)),))
    image = found[:64] / found[64]
    np.testing.assert_allclose(image, volume.images[volume.images.sum(1).argmax()], rtol=1e-4)


def test_known_limit_a_model_remembers_what_it_saw(volume: Volume, zygote: Zygote) -> None:
    """What a hostile model has seen leaves with made-up samples, which no rule counts."""
    code = model("""
        seen = []

        def forward(model, images):
            if len(images) > 1:
                seen.append(images.detach().clone().flatten())
            else:
                model.linear.weight.register_hook(lambda g: seen[0][:512].view(8, 64))
    """)
    with device(volume, zygote, code, policy=Policy(answers_per_state=1)) as csd0, csd0.host() as host:
        host.ask(((0, LEAST),))
        stolen = host.values((), synthetic=1)[:512].reshape(8, 64)
        np.testing.assert_array_equal(stolen, volume.images[csd0.order(0)[:8]])
