# SPDX-License-Identifier: Apache-2.0
"""Following of jobs: each follower gets every round once, and a change is read once for all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from millpond.base.errors import Refused
from millpond.host.api.daemon import JobInfo
from millpond.host.api.progress import StoredProgress
from millpond.host.jobs import following
from millpond.host.jobs.following import JobAnswer, JobFollowing
from millpond.host.records.stored_rounds import StoredRound
from millpond.wire.framing import Limits, Receiver

from ..waiting import eventually

JOB = JobInfo(7, "digits", "running", "", "", 0, 200, "round", "loss", None, None, 0, 0.0, None)
MANY = 20


def stays() -> bool:
    """Return that a command has not left."""
    return False


class Jobs:
    """One job in memory that counts how often it is read."""

    def __init__(self, rounds: int = 0) -> None:
        self.state, self.rounds, self.reads, self.page = "running", rounds, 0, 1000
        self.drops = 0
        self.following = JobFollowing(self.read, lambda _number, seen: ([], seen), lambda _number: self.drops)

    def read(self, number: int, after: int) -> StoredProgress:
        self.reads += 1
        found = [StoredRound(n, "") for n in range(1, self.rounds + 1) if n > after]
        info = replace(JOB, state=self.state, round=self.rounds)
        return StoredProgress(info, tuple(found[: self.page]), more=len(found) >= self.page)

    def add(self, rounds: int = 1) -> None:
        self.rounds += rounds
        self.following.changed(7)

    def end(self) -> None:
        self.state = "done"
        self.following.changed(7, ended=True)


class Follower(threading.Thread):
    """A command that follows the job."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__()
        self.jobs, self.seen, self.state = jobs, list[int](), ""
        self.start()

    def run(self) -> None:
        for answer in self.jobs.following.follow(7, stays):
            progress = answer.progress
            self.seen += [each.round for each in progress.rounds]
            self.state = progress.info.state


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "PAUSE_SECONDS", 0.0)


def told(answer: JobAnswer) -> list[int]:
    """Return the numbers of the rounds that a command is sent."""
    receiver, left, head = Receiver(Limits(), "the daemon"), answer.frame, None
    while left:
        buffer = receiver.buffer()
        buffer[:], left = left[: len(buffer)], left[len(buffer) :]
        head = receiver.received(len(buffer))
    assert head and isinstance(head.message, StoredProgress)
    return [each.round for each in head.message.rounds]


def followers(jobs: Jobs, rounds: int) -> Iterator[Follower]:
    """Yield MANY followers that have seen all rounds."""
    for each in [Follower(jobs) for _ in range(MANY)]:
        eventually(lambda each=each: len(each.seen) == rounds, "all rounds")  # type: ignore[misc]
        yield each


def test_a_change_is_read_once_for_all_who_follow_a_job() -> None:
    jobs = Jobs(rounds=3)
    every = list(followers(jobs, 3))
    assert jobs.reads == 1 + MANY, "each reads the rounds before its time"
    for number in (4, 5):
        jobs.add()
        for each in every:
            eventually(lambda each=each: len(each.seen) == number, "the new round")  # type: ignore[misc]  # noqa: B023
    assert jobs.reads == 3 + MANY
    jobs.end()
    for each in every:
        each.join(30)
        assert (each.seen, each.state) == ([1, 2, 3, 4, 5], "done")
    assert jobs.reads == 4 + MANY


def test_whoever_lacks_more_than_is_kept_reads_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "KEPT_ROUNDS", 4)
    jobs = Jobs()
    progress = jobs.following.follow(7, stays)
    assert not next(progress).progress.rounds
    for _ in range(9):
        jobs.add()
        other = jobs.following.follow(7, stays)  # has the last rounds read
        assert [each.round for each in next(other).progress.rounds] == list(range(1, jobs.rounds + 1))
        other.close()
    assert [each.round for each in next(progress).progress.rounds] == list(range(1, 10))
    jobs.add()
    assert [each.round for each in next(progress).progress.rounds] == [10]
    progress.close()


def test_many_rounds_come_in_parts_and_more_at_once_than_a_part() -> None:
    jobs = Jobs(rounds=7)
    jobs.page = 3
    progress = jobs.following.follow(7, stays)
    first = [told(next(progress)) for _ in range(3)]
    assert first == [[1, 2, 3], [4, 5, 6], [7]]
    jobs.add(5)
    assert [told(next(progress)) for _ in range(2)] == [[8, 9, 10], [11, 12]]
    progress.close()


def test_a_part_that_is_final_is_read_and_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: each new follower of a job of 1,000 rounds of 64 workers cost the daemon a second."""
    jobs = Jobs(rounds=7)
    jobs.page = 3

    def follow() -> tuple[list[int], int]:
        before, progress = jobs.reads, jobs.following.follow(7, stays)
        found = [number for _ in range(3) for number in told(next(progress))]
        progress.close()
        return found, jobs.reads - before

    every = [1, 2, 3, 4, 5, 6, 7]
    assert [follow(), follow()] == [(every, 4), (every, 2)]  # the job itself, and its last rounds
    jobs.drops += 1  # it computes rounds again
    assert follow() == (every, 4)
    monkeypatch.setattr(following, "KEPT_BYTES", 0)
    jobs.drops += 1
    assert [follow(), follow()] == [(every, 4), (every, 4)]


def test_rounds_that_are_computed_again_are_not_told_twice() -> None:
    jobs = Jobs(rounds=5)
    progress = jobs.following.follow(7, stays)
    assert len(next(progress).progress.rounds) == 5
    jobs.rounds = 3  # goes on from a checkpoint
    jobs.following.changed(7)
    assert (found := next(progress).progress).info.round == 3 and not found.rounds
    jobs.add(3)
    assert [each.round for each in next(progress).progress.rounds] == [6]
    progress.close()


def test_an_end_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "PAUSE_SECONDS", 3600.0)
    jobs = Jobs(rounds=1)
    (follower, *others) = followers(jobs, 1)
    jobs.end()
    for each in (follower, *others):
        each.join(30)
        assert each.state == "done"


def test_the_end_of_the_daemon_ends_all_following() -> None:
    jobs = Jobs(rounds=1)
    progress = jobs.following.follow(7, stays)
    next(progress)
    jobs.following.close()
    with pytest.raises(Refused, match="the host daemon has ended"):
        next(progress)


def test_a_change_is_encoded_once_for_all_who_have_been_told_the_same() -> None:
    jobs = Jobs(rounds=1)
    both = [jobs.following.follow(7, stays) for _ in range(2)]
    for each in both:
        next(each)
    jobs.add()
    first, second = (next(each) for each in both)
    assert first is second and first.frame is second.frame
    for each in both:
        each.close()


def test_a_command_that_has_left_gives_its_place_back_without_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.0)
    jobs, looks = Jobs(rounds=1), iter((False, True, True))
    answers = list(jobs.following.follow(7, lambda: next(looks)))
    assert [told(each) for each in answers] == [[1]]
