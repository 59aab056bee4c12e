# SPDX-License-Identifier: Apache-2.0
"""The policy of a device: every rule refuses by its name, and no row of requests gets around one."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.agent.config import read
from millpond.agent.policy.rules import StateAnswers, check_job
from millpond.agent.policy.settings import Policy
from millpond.base.errors import ConfigError, Refused
from millpond.train.balance.ranges import Ranges
from millpond.train.job.signed_code import digest
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import FIRST_VALUES, DataServicePlace, Folder, Work
from millpond.train.state.layout import Tensor
from millpond.train.strategies import LocalRule

from ..job_files import described
from .policy_rig import CODE, FILES, JOB, PRIVATE, PUBLIC, SAMPLES, guard, refusal, state, work

SMALLEST = 'name = "csd0"\n[link]\nsocket = "/run/slot/nvme.sock"\naddress = "10.77.0.2/30"\n'


@pytest.mark.parametrize("line", ["csd1", "csd1 AAAA", "csd1 ????", "a b c"])
def test_a_cohort_is_of_names_and_keys(tmp_path: Path, line: str) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(f'{SMALLEST}[policy]\ncohort = ["{line}"]\n')
    with pytest.raises(ConfigError, match="policy: cohort: each is a name and the key of that device's"):
        read(file)
    file.write_text(f'{SMALLEST}[policy]\ncohort = ["csd0 {86 * "A"}=="]\n')
    with pytest.raises(ConfigError, match="policy: cohort: it has fewer than least_devices, 3"):
        read(file)


def test_the_policy_that_nobody_has_written_is_in_force(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(SMALLEST)
    assert read(file).policy == Policy(8, 256, (), "any", (), (), 1 << 30)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("least_samples = 0", "policy: least_samples: 0 is not between 1 and"),
        ("least_samples = -8", "policy: least_samples: -8 is not between 1 and"),
        ("answers_per_state = -1", "answers_per_state"),
        ("largest_model = 0", "largest_model"),
        ("largest_files = -1", "largest_files"),
        ("largest_files = 8589934593", "files_cache must not be less than policy.largest_files"),
        ('folders = ["public/a"]', "policy: folders: 'public/a' is not a folder in private/"),
        ('folders = ["private/../public"]', "policy: folders: 'private/../public'"),
        ('folders = ["/volume/private/a"]', "policy: folders"),
        ('folders = "private/a"', "folders"),
        ('code = "some"', "code"),
        ('code = "signed"', "policy: code: 'signed' needs keys in owners"),
        ('owners = ["AAAA"]', "policy: owners: 'AAAA' is no public key"),
        ('owners = ["ssh-ed25519 AAAA\\nowner ssh-ed25519 BBBB"]', "policy: owners: 'ssh-ed25519 AAAA"),
        ("least = 8", "did you mean 'least_samples'"),
        ("least_samples = 8.5", "least_samples"),
        ("least_samples = true", "least_samples"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(f"{SMALLEST}[policy]\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert words in str(caught.value) and "agent.toml" in str(caught.value)


def test_files_of_too_many_bytes_are_refused() -> None:
    sizes = [file.size for file in FILES.values()]
    check_job(
        Policy(largest_files=sum(sizes)), "csd0", replace(JOB, files={**FILES, "again": FILES["net.py"]})
    )
    text = f"policy.largest_files: files of {sum(sizes)} bytes; at most {sum(sizes) - 1} are allowed"
    assert refusal(Policy(largest_files=sum(sizes) - 1)).text == text


@pytest.mark.parametrize("path", ["/state/state.safetensors", "/volume/public/a", "../state/a", "a/../net"])
def test_first_values_come_from_the_jobs_files_alone(path: str) -> None:
    """Frozen parameters stay as they are loaded: the host would choose them for listed code."""
    spec = replace(JOB.work.model, initial=path)
    error = refusal(Policy(), work=replace(JOB.work, model=spec))
    assert error.text == f"the first values '{path}' are not among the job's files"
    for name in ("more.py", "./more.py"):
        own = replace(JOB.work, model=replace(spec, initial=name))
        check_job(Policy(), "csd0", replace(JOB, work=own))


def test_no_file_of_a_job_has_the_name_of_the_hosts_first_values() -> None:
    """It would lie in the place of one that owners have listed or signed."""
    for first in (None, FILES["net.py"]):
        error = refusal(Policy(), files={**FILES, FIRST_VALUES: FILES["more.py"]}, first=first)
        assert error.text == f"the job's file '{FIRST_VALUES}' has a name that is the host's: rename it"


def test_a_job_is_allowed() -> None:
    check_job(Policy(folders=("private/digits",), largest_model=110), "csd0", JOB)
    check_job(Policy(folders=("private/a", "private/digits/of")), "csd0", replace(JOB, folders=(PUBLIC,)))
    below = Folder("private/digits/of/june", "csd0")
    check_job(Policy(folders=("private/digits",)), "csd0", replace(JOB, folders=(below,)))
    check_job(Policy(), "csd0", replace(JOB, folders=()))


STREAMED = Folder("public/digits", "csd1", public=True, streamed=True)
PLACE = DataServicePlace("10.77.0.6", 4000, "x" * 64)


def test_a_worker_has_a_stream_or_private_data() -> None:
    streamed = replace(JOB, folders=(STREAMED,), streams=PLACE)
    check_job(Policy(folders=("private/a",)), "csd0", streamed)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"folders": (PRIVATE, STREAMED)}, "a worker with private samples gets no stream"),
        ({"folders": (STREAMED, PRIVATE)}, "a worker with private samples gets no stream"),
        ({"folders": (replace(STREAMED, public=False),)}, "the data folder 'public/digits' is not what"),
        ({"folders": (replace(STREAMED, path="private/digits"),)}, "the data folder 'private/digits' is not"),
        ({"folders": (replace(STREAMED, source="csd0"),)}, "the data folder 'public/digits' is not what"),
        ({"streams": None}, "a worker with a stream has its one folder, and a place that serves it"),
        ({"work": replace(JOB.work, local_layers=("weight",))}, "a worker with a stream keeps nothing on"),
        ({"work": replace(JOB.work, local=LocalRule(alpha=0.5))}, "a worker with a stream keeps nothing on"),
    ]
    for changes, text in wrong:
        error = refusal(Policy(), **{"folders": (STREAMED,), "streams": PLACE, **changes})
        assert error.code == "data" and error.text.startswith(text)


@pytest.mark.parametrize("path", ["private", "private/digits2", "private/other", "private/a/digits"])
def test_folders_names_what_jobs_may_read(path: str) -> None:
    error = refusal(Policy(folders=("private/digits",)), folders=(Folder(path, "csd0"),))
    assert (error.code, error.text) == ("policy", f"policy.folders: jobs may not read '{path}'")


@pytest.mark.parametrize(
    "folder",
    [
        Folder("/volume/private/digits", "csd0"),
        Folder("", "csd0"),
        Folder(".", "csd0"),
        Folder("etc", "csd0"),
        Folder("private/../private/digits", "csd0"),
        Folder("public/../private/digits", "csd0", public=True),
        Folder("privately/digits", "csd0"),
        Folder("private/digits", "csd0", public=True),
        Folder("public/digits", "csd0"),
        Folder("private/digits", "csd1"),
        Folder("public/digits", "csd1", public=True),
        Folder("private/digits/", "csd0"),
        Folder("private//digits", "csd0"),
        Folder("private/./digits", "csd0"),
        Folder("./private/digits", "csd0"),
        Folder("private/.millpond/another", "csd0"),
        Folder("private/.millpond-logs", "csd0"),
    ],
)
def test_a_folder_is_what_its_one_name_says(folder: Folder) -> None:
    error = refusal(Policy(), folders=(PUBLIC, folder))
    assert error.code == "data" and f"'{folder.path}'" in error.text


def test_a_folder_is_named_once() -> None:
    assert "named twice" in refusal(Policy(), folders=(PRIVATE, PRIVATE)).text


def test_the_largest_model_is_a_number_of_values() -> None:
    error = refusal(Policy(largest_model=109))
    assert error.code == "policy"
    assert error.text == "policy.largest_model: a model of 110 values; at most 109 are allowed"


@pytest.mark.parametrize("shape", [(-1,), (1 << 20, -1), (-2, -2)])
def test_tensors_cannot_take_from_the_size_of_others(shape: tuple[int, ...]) -> None:
    huge = (Tensor("huge", (1 << 20,), "float32"), Tensor("less", shape, "float32"))
    assert "negative" in refusal(Policy(largest_model=100), tensors=huge).text


@pytest.mark.parametrize("tensors", [(), (Tensor("none", (0, 5), "float32"),)])
def test_a_model_has_values(tensors: tuple[Tensor, ...]) -> None:
    assert refusal(Policy(), tensors=tensors).text == "the model has no values"


def test_code_that_is_not_listed_is_named_by_its_digest() -> None:
    listed = Policy(code="listed", listed=(digest(JOB.work, FILES),))
    check_job(listed, "csd0", JOB)
    check_job(listed, "csd0", replace(JOB, files=dict(reversed(FILES.items()))))
    for code in ({**CODE, "more.py": "x = 2"}, {**CODE, "torch.py": ""}, {"net.py": CODE["net.py"]}, {}):
        error, found = refusal(listed, files=described(code)), digest(JOB.work, described(code))
        assert error.text == f"policy.code: the job's code is not listed; its digest is {found}"
    assert refusal(Policy(code="listed")).code == "policy"


@pytest.mark.parametrize("factory", ["timeit:timeit", "subprocess:run", "net:Other"])
def test_listed_code_is_run_as_it_was_listed(factory: str) -> None:
    """Python's own callables run what their arguments say, whatever the job's files are."""
    listed = Policy(code="listed", listed=(digest(JOB.work, FILES),))
    error = refusal(
        listed, work=replace(JOB.work, model=ModelSpec(factory, (), arguments={"stmt": "print(1)"}))
    )
    assert error.text.startswith("policy.code: ")


def test_what_chooses_the_samples_of_a_folder_is_listed_with_the_code() -> None:
    """A data set that heeds an argument has other samples by it, and so other groups: differences of their
    sums would tell of single samples.
    """
    own = ModelSpec("net:Net", arguments={"limit": 40, "split": {"part": 1, "of": 2}})
    work = replace(JOB.work, model=own)
    listed = Policy(code="listed", listed=(digest(work, FILES),))
    check_job(listed, "csd0", replace(JOB, work=replace(work, seed=7, batch=8)))
    others = [
        replace(work, model=replace(own, arguments={**own.arguments, "limit": 41})),
        replace(work, model=replace(own, arguments={"limit": 40})),
        replace(work, format="images"),
        replace(work, task=True),
    ]
    for other in others:
        assert refusal(listed, work=other).text.startswith("policy.code: the job's code is not listed")


@given(st.dictionaries(st.text(), st.text()), st.dictionaries(st.text(), st.text()), st.text(), st.text())
def test_other_code_has_another_digest(
    one: dict[str, str], two: dict[str, str], factory: str, other: str
) -> None:
    works = [WorkSpec("job", ModelSpec(each)) for each in (factory, other)]
    same = digest(works[0], described(one)) == digest(works[1], described(two))
    assert same == ((factory, one) == (other, two))


@pytest.mark.parametrize("parts", [(7, SAMPLES), (0, SAMPLES), (-1, SAMPLES)])
def test_a_private_folder_has_enough_samples(parts: tuple[int, ...]) -> None:
    with pytest.raises(Refused, match=r"policy\.least_samples: 'private/digits' has -?\d samples; an answer"):
        guard(parts=parts)


def test_a_public_folder_may_have_any_number() -> None:
    guard(parts=(8, 1)).check(work((), ((0, 1),)), state(0))


@pytest.mark.parametrize("parts", [(), (SAMPLES,), (SAMPLES,) * 3])
def test_a_worker_tells_of_each_folder(parts: tuple[int, ...]) -> None:
    with pytest.raises(Refused, match="the worker has samples of"):
        guard(parts=parts)


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        (((0, 7),), "policy.least_samples: samples 0 to 7 of 'private/digits' are no whole groups of 8"),
        (((0, 9),), "samples 0 to 9 of"),
        (((4, 12),), "samples 4 to 12 of"),
        (((0, 8), (9, 17)), "samples 9 to 17 of"),
        (((32, 40),), "samples 32 to 40 of"),  # the last group is 32 to 43
        (((40, 43),), "samples 40 to 43 of"),
        (((0, 16), (8, 24)), "policy.least_samples: sample 8 of 'private/digits' is wanted twice"),
        (((0, 8), (0, 8)), "policy.least_samples: sample 0"),
        (((-8, 0),), "samples -8 to 0 are wanted; there are 43"),
        (((32, 44),), "samples 32 to 44 are wanted; there are 43"),
        (((0, 8), (32, 16)), "samples 32 to 16 are wanted; there are 43"),
        (((0, 8), (8, 8)), "samples 8 to 8 are wanted; there are 43"),
    ],
)
def test_an_answer_covers_whole_groups_once(ranges: Ranges, words: str) -> None:
    of = guard(parts=(43, 43))
    with pytest.raises(Refused) as caught:
        of.check(work(ranges, ((0, 30),)), state(0))  # public samples make up for nothing
    assert words in caught.value.text
    of.check(work(((32, 43), (0, 16)), ((0, 3),)), state(0))


def test_samples_of_each_folder_are_wanted() -> None:
    for ranges in ((), (((0, 8),),), (((0, 8),), (), ())):
        with pytest.raises(Refused, match="folders are wanted"):
            guard().check(work(*ranges), state(0))


def test_public_samples_may_be_wanted_at_will() -> None:
    of = guard(Policy(answers_per_state=1))
    for epoch in (3, 3, 4):
        of.check(work((), ((0, 1),), epoch=epoch), state(0))


def test_each_request_is_counted_also_a_repeated_one_and_one_that_is_refused_by_another_rule_is_not() -> None:
    of, request = guard(Policy(answers_per_state=3)), work(((0, 8),), ())
    for _ in range(2):
        of.check(request, state(0))
        with pytest.raises(Refused, match=r"policy\.least_samples"):
            of.check(work(((0, 9),), ()), state(0))
    of.check(work(((8, 32),), (), epoch=5, seed=7), state(0))
    with pytest.raises(Refused, match=r"policy\.answers_per_state"):
        of.check(request, state(0))


def test_states_of_one_checksum_are_one_state() -> None:
    """A host can make up such states; then they count together."""
    one, forged = b"plumless", b"buckeroo"
    assert zlib.crc32(forged) == zlib.crc32(one)
    of, request = guard(Policy(answers_per_state=1)), work(((0, 8),), ())
    of.check(request, memoryview(one))
    with pytest.raises(Refused, match=r"policy\.answers_per_state"):
        of.check(request, memoryview(forged))


def test_answers_at_one_state_are_counted_over_all_jobs() -> None:
    policy, answers = Policy(answers_per_state=2), StateAnswers(2)
    one, two = guard(policy, answers), guard(policy, answers)
    one.check(work(((0, 8),), ()), state(0))
    two.check(work(((0, 8),), ()), state(0))
    with pytest.raises(Refused) as caught:
        one.check(work(((8, 16),), ()), state(0))
    assert caught.value.code == "state"
    assert caught.value.text == "policy.answers_per_state: 'private/digits' has given 2 answers at one state"
    one.check(work(((8, 16),), ()), state(1))
    other = guard(policy, answers, (Folder("private/other", "csd0"),), (SAMPLES,))
    other.check(work(((0, 8),)), state(0))


def test_made_up_samples_are_not_counted() -> None:
    of = guard(Policy(answers_per_state=1))
    for _ in range(3):
        of.check(work((), synthetic=4), state(0))
    of.check(work(((0, 8),), ()), state(0))


def test_without_a_bound_there_are_any_number_of_answers() -> None:
    of = guard(Policy(answers_per_state=0))
    for epoch in range(50):
        of.check(work(((0, 8),), (), epoch=epoch), state(0))


def test_old_states_are_forgotten() -> None:
    answers = StateAnswers(1)
    for number in range(2049):
        answers.count(["private/digits"], memoryview(number.to_bytes(4, "little")))
    with pytest.raises(Refused):
        answers.count(["private/digits"], memoryview((1).to_bytes(4, "little")))
    answers.count(["private/digits"], memoryview(bytes(4)))


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9])
def test_large_states_are_told_apart_wherever_they_differ(most: int) -> None:
    """Also where the sample of a state does not look; together, such states have a few answers more."""
    answers, size = StateAnswers(most), 3 << 20
    places = [0, 1 << 20, 5000, size - 1, 123_457]
    counts = []
    for place in places:
        state = bytearray(size)
        state[place] = 1
        counts.append(0)
        with pytest.raises(Refused, match=f"has given {most} answers"):
            while True:
                answers.count(["private/digits"], memoryview(state))
                counts[-1] += 1
    assert all(most - most // 2 <= found <= most for found in counts) and counts[0] == most


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(-2, 26), st.integers(-2, 26)), max_size=3),
        st.integers(0, 2),  # the epoch
        st.integers(0, 2),  # the state
    ),
    max_size=30,
)


@given(REQUESTS, st.integers(1, 7), st.integers(1, 4), st.integers(14, 24))
def test_whatever_a_host_asks(
    requests: list[tuple[list[tuple[int, int]], int, int]], group: int, most: int, samples: int
) -> None:
    """All samples of a group are in an answer once, or none is; and a state has few answers."""
    of = guard(Policy(least_samples=group, answers_per_state=most), None, (PRIVATE,), (samples,))
    count = samples // group
    at_state = [0, 0, 0]
    for ranges, epoch, number in requests:
        try:
            of.check(work(tuple(ranges), epoch=epoch), state(number))
        except Refused:
            continue
        wanted = [place for start, stop in ranges for place in range(start, stop)]
        assert len(wanted) == len(set(wanted)) and set(wanted) <= set(range(samples))
        members = Counter(min(place // group, count - 1) for place in wanted)
        sizes = [group] * (count - 1) + [samples - (count - 1) * group]
        assert all(found == sizes[number] for number, found in members.items())
        at_state[number] += bool(ranges)
    assert max(at_state) <= most


@pytest.mark.parametrize("held", [(-8, 0), (1, 0), (7, 0), (12, 0), (8, -8)])
def test_samples_that_are_held_out_are_whole_groups(held: tuple[int, int]) -> None:
    with pytest.raises(Refused, match=r"-?\d+ samples of '.*' are held out, no whole groups"):
        guard(held=held)


@pytest.mark.parametrize("held", [(), (8,), (8, 0, 0)])
def test_a_worker_tells_of_each_folder_what_it_holds_out(held: tuple[int, ...]) -> None:
    with pytest.raises(Refused, match="the worker has samples of"):
        guard(held=held)


def test_a_score_is_an_answer_about_the_private_folder() -> None:
    of = guard(Policy(answers_per_state=2), held=(8, 0))
    score = Work(1, 0, 0, (), held_out=True)
    of.check(score, state(0))
    of.check(work(((0, 8),), ()), state(0))
    for request in (score, replace(score, epoch=1, ranges=((), ()), synthetic=3), work(((0, 8),), ())):
        with pytest.raises(Refused, match=r"policy\.answers_per_state"):
            of.check(request, state(0))
    of.check(score, state(1))
    for _ in range(3):  # of nothing
        guard(Policy(answers_per_state=1)).check(score, state(0))


@pytest.mark.parametrize("made_up", [-1, (1 << 16) + 1, 1 << 60])
def test_made_up_samples_are_limited(made_up: int) -> None:
    of = guard()
    with pytest.raises(Refused, match=f"{made_up} made-up samples are wanted"):
        of.check(work((), synthetic=made_up), state(0))
