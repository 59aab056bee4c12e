# SPDX-License-Identifier: Apache-2.0
"""Attacks on single samples: a host that asks for what it must not get, and what it can get all the same."""

from __future__ import annotations

import mmap
import runpy
from pathlib import Path

import numpy as np
import pytest

from millpond.agent.policy.rules import StateAnswers
from millpond.agent.policy.settings import Policy
from millpond.base.errors import ConnectionLost, Refused
from millpond.linux import memory
from millpond.linux.zygote.client import Zygote
from millpond.train.balance.ranges import Ranges
from millpond.train.protocol import Fetch, Folder
from millpond.train.state import flat, layout
from millpond.train.state.layout import Tensor

from .support import DIGITS, SIZE, Device, Volume, device, gradients, model, soon, states

LEAST = Policy().least_samples


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


ONE_SAMPLE: list[Ranges] = [
    ((4, 5),),
    ((0, LEAST - 1),),
    ((0, LEAST + 1),),
    ((1, LEAST + 1),),
    ((40, 48),),
    ((0, 1), (10, 11), (20, 21)),
    ((0, LEAST), (0, LEAST)),
    ((-LEAST, 1),),
    ((49, 49 + LEAST),),
    ((0, 24), (48, 16)),
    ((0, LEAST), (8, 8)),
]


def test_one_chosen_sample_is_refused(volume: Volume, zygote: Zygote) -> None:
    with device(volume, zygote) as csd0, csd0.host() as host:
        for ranges in ONE_SAMPLE:
            refused = r"policy\.least_samples|samples -?\d+ to \d+ are wanted"
            with pytest.raises(Refused, match=refused) as caught:
                host.ask(ranges)
            assert caught.value.code in ("policy", "data"), ranges
        assert csd0.sent["parameters"] == 0
        whole = host.values(((0, LEAST),))
        expected = gradients(volume, states(SIZE, 0))[csd0.order(0)[:LEAST]].sum(0)
        np.testing.assert_allclose(whole, expected, rtol=1e-3, atol=1e-5)


def test_a_folder_of_few_samples_is_refused(tmp_path: Path, zygote: Zygote) -> None:
    few = Volume(tmp_path, samples=LEAST - 1)
    with pytest.raises(Refused, match=r"policy\.least_samples: 'private/digits' has 7 samples"):
        Device(few, zygote)


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


def test_no_link_in_public_leads_to_what_the_worker_has_open(volume: Volume, zygote: Zygote) -> None:
    """A file of private samples that stays open has a number which the host can guess."""
    for number in range(100):
        (volume.path / f"public/{number}").symlink_to(f"/proc/self/fd/{number}")
    (volume.path / "public/near").symlink_to("file")
    (volume.path / "public/file").write_text("public")
    look = """
    def build(model):
        import errno, glob, os
        (public,) = glob.glob("PUBLIC")
        private = open(glob.glob("/*/private/digits/images.npy")[0])
        open(f"/proc/self/fd/{private.fileno()}").close()
        for name in sorted(os.listdir(public)):
            try:
                open(f"{public}/{name}").close()
                assert name == "file"
            except OSError as error:
                assert (name != "file", error.errno) == (True, errno.ELOOP)
    """.replace("PUBLIC", str(volume.path / "public"))
    with device(volume, zygote, model(look)):
        pass


def test_made_up_samples_show_no_private_data(volume: Volume, zygote: Zygote) -> None:
    """They have the shape of a real sample, and a task may put more of it into them: nothing that is computed
    from them leaves.
    """
    with device(volume, zygote) as csd0, csd0.host() as host:
        update = host.ask((), synthetic=1)
        assert (update.metrics, update.weight) == ({"loss": (0.0, 1.0)}, 1.0)
        assert (update.largest, update.norm) == (0.0, 0.0)
        host.channel.send(Fetch(SIZE), soon())
        with pytest.raises(ConnectionLost):
            host.channel.receive(soon())


def test_values_leave_with_their_own_update_alone(volume: Volume, zygote: Zygote) -> None:
    """Otherwise an answer would leave uncounted, behind a request that is refused or fails."""
    ranges = ((0, LEAST),)
    with device(volume, zygote) as csd0:
        for between in ({}, {"synthetic": 1 << 60}, {"synthetic": -1}):
            with csd0.host() as host:
                if between:
                    host.ask(ranges)
                    with pytest.raises(Refused):
                        host.ask(ranges, **between)
                host.channel.send(Fetch(SIZE), soon())
                with pytest.raises(ConnectionLost):
                    host.channel.receive(soon())
            assert "an update that was not answered" in str(csd0.error)
        assert csd0.sent["parameters"] == 0


def test_answers_of_any_epochs_workers_and_jobs_are_sums_over_the_same_groups(
    tmp_path: Path, zygote: Zygote
) -> None:
    """The differences of all that a host can ask for tell of groups, as does the answer about one."""
    volume, answers, found, members = Volume(tmp_path, samples=20), StateAnswers(0), [], []
    for seed in (0, 1):
        with device(volume, zygote, answers=answers, seed=seed) as csd0, csd0.host() as host:
            for epoch in range(3):
                for ranges in (((0, LEAST),), ((0, 20),), ((LEAST, 20),)):
                    found.append(host.values(ranges, epoch=epoch))
                    members.append(np.isin(np.arange(20), csd0.order(epoch)[slice(*ranges[0])]))
    group = csd0.order(0)[:LEAST]
    assert {bool(all_[group].all()) for all_ in members} == {bool(all_[group].any()) for all_ in members}
    assert np.linalg.matrix_rank(np.array(members, float)) == 2  # numbers of groups
    own = gradients(volume, states(SIZE, 0))
    expected = np.array([own[all_].sum(0) for all_ in members])
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-3, atol=1e-4)


def test_a_score_is_of_whole_groups_that_no_answer_covers(volume: Volume, zygote: Zygote) -> None:
    state = states(SIZE, 0)
    weight, bias = state[:-8].reshape(8, -1), state[-8:]
    logits = volume.images @ weight.T + bias
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), volume.labels]
    held = set(range(len(losses)))
    for seed in (0, 1):
        with device(volume, zygote, held_out=0.3, seed=seed) as csd0:
            assert (csd0.ready.parts, csd0.ready.held) == ((34,), (2 * LEAST,))
            with csd0.host() as host:
                scored = held.difference(*(csd0.order(epoch).tolist() for epoch in range(3)))
                assert len(scored) == 2 * LEAST
                update = host.ask(held_out=True)
                expected = losses[sorted(scored)].sum()
                assert update.metrics["loss"] == (pytest.approx(expected, rel=1e-4), 2 * LEAST)
                with pytest.raises(Refused, match="samples 32 to 50 are wanted; there are 34"):
                    host.ask(((32, 50),))
                host.ask(held_out=True)
                host.channel.send(Fetch(SIZE), soon())
                with pytest.raises(ConnectionLost):
                    host.channel.receive(soon())
            assert "an update that was not answered" in str(csd0.error)
            assert csd0.sent["parameters"] == 0
        held = scored


def test_answers_at_one_state_are_bounded(volume: Volume, zygote: Zygote) -> None:
    policy = Policy(answers_per_state=3)
    with device(volume, zygote, policy=policy) as csd0, csd0.host() as host:
        for epoch in range(3):
            host.ask(((0, LEAST),), epoch=epoch)  # the head, with its loss, counts as the values do
        for ranges, epoch in ((((0, LEAST),), 2), (((LEAST, 24),), 2), (((0, LEAST),), 3)):
            with pytest.raises(Refused, match=r"policy\.answers_per_state: .* has given 3 answers") as caught:
                host.ask(ranges, epoch=epoch)
            assert caught.value.code == "state"
        host.values(((0, LEAST),), epoch=4, state=1)


DROPOUT = model("""
    def build(model):
        model.dropout = nn.Dropout(0.5)

    def forward(model, images):
        model.linear.register_forward_pre_hook(lambda _, given: (model.dropout(given[0]),))
""")


def test_the_order_of_local_training_shows_groups_alone(tmp_path: Path, zygote: Zygote) -> None:
    """With batches of 3, 3 and 2 samples of a group, whose weights differ, 8 seeds would show each sample."""
    volume, answers = Volume(tmp_path, samples=20), StateAnswers(0)
    with device(volume, zygote, answers=answers, passes=1, batch=3) as csd0, csd0.host() as host:
        found = {host.values(((0, LEAST),), seed=seed).tobytes() for seed in range(6)}
    assert len(found) == 1


def test_what_a_model_draws_is_not_known_to_the_host(tmp_path: Path, zygote: Zygote) -> None:
    """Else the masks of dropout give each sample known weights. The same request has the same draws."""
    found = []
    for name in ("one", "two"):
        volume = Volume(tmp_path / name)
        with device(volume, zygote, DROPOUT) as csd0, csd0.host() as host:
            first, other = (host.values(((0, LEAST),), seed=seed) for seed in (1, 2))
        with device(volume, zygote, DROPOUT) as csd0, csd0.host() as host:
            assert host.values(((0, LEAST),), seed=1).tobytes() == first.tobytes()
        assert first.tobytes() != other.tobytes()
        found.append(first)
    assert found[0].tobytes() != found[1].tobytes()  # of two devices with the same samples


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


def test_a_model_cannot_send_what_it_saw_with_samples_that_no_rule_counts(
    volume: Volume, zygote: Zygote
) -> None:
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
        with pytest.raises(ConnectionLost):
            host.values((), synthetic=1)


COUPLED = {
    "batch-norm": "self.norm = nn.BatchNorm1d(64)",
    "layer-norm": "self.norm = nn.LayerNorm(64)",
    "batch-coupled": "self.norm = Centred()",
}
NORMED = """
import torch
from torch import nn

class Centred(nn.Module):
    def forward(self, images):
        return (images - images.mean(0)) * (1 + images.std())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {}
        self.linear = nn.Linear(64, 8)

    def forward(self, images):
        return self.linear(self.norm(images.flatten(1)))
"""


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("layer", COUPLED)
def test_parts_of_a_batch_tell_of_whole_groups(
    tmp_path: Path, zygote: Zygote, layer: str, passes: int
) -> None:
    """Each part goes through the model by itself. One that cut a group would weigh its samples differently,
    in running statistics or by a loss that couples them: many orders would be as many equations.
    """
    code = {"net.py": NORMED.format(COUPLED[layer])}
    (tmp_path / "net.py").write_text(code["net.py"])
    tensors = flat.describe(runpy.run_path(str(tmp_path / "net.py"))["Net"]())
    volume, answers, groups = Volume(tmp_path, samples=3 * LEAST), StateAnswers(0), 3
    given = {"tensors": tensors, "passes": passes, "batch": 3 * LEAST * passes, "accumulate": groups + 1}
    asked = [((start, stop),) for start in (0, 8, 16) for stop in (8, 16, 24) if start < stop]
    with device(volume, zygote, code, answers=answers, **given) as csd0, csd0.host() as host:
        found = np.array([host.values(which, epoch=epoch) for epoch in range(8) for which in asked])
    known = 1  # the host's own values, of which running statistics keep a share
    for tensor, own in layout.spans(tensors):
        scale = np.linalg.norm(found[:, own], 2)
        rank = np.linalg.matrix_rank(found[:, own], tol=1e-4 * scale)
        assert rank <= groups + known * tensor.name.startswith("norm.running"), tensor.name


def test_what_leaves_is_what_was_released(volume: Volume, zygote: Zygote) -> None:
    """The worker's memory, to which its code can write at any time, is read once."""
    with device(volume, zygote) as csd0, csd0.host() as host:
        expected = host.values(((0, LEAST),))
        host.ask(((0, LEAST),))
        node = csd0.worker.node_memory
        at_node = np.frombuffer(memory.map_read_only(node.values, 4 * SIZE), np.float32)
        np.frombuffer(csd0.worker._values.data, np.float32)[:] = 7  # as the worker may
        assert host.fetch().tobytes() == expected.tobytes() == at_node.tobytes()
        assert 7 in node.offered
        with pytest.raises(OSError):  # nor can the node's process, which has the memory, too
            mmap.mmap(node.values, 4 * SIZE)
