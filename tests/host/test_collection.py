# SPDX-License-Identifier: Apache-2.0
"""Which answers an exchange waits for and which count, against a model; the engine's tests have examples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.host.jobs.training.collection import Collection

RANKS = range(4)
SOME = st.sets(st.sampled_from(RANKS))


@given(st.booleans(), st.lists(st.tuples(SOME, SOME, SOME), max_size=12))
def test_each_answer_counts_once_or_never(
    late_counts: bool, exchanges: list[tuple[set[int], set[int], set[int]]]
) -> None:
    """Against a model: in which exchange each worker that owes an answer was asked."""
    made, asked = Collection(late_counts=late_counts), dict[int, int]()
    for number, (planned, answering, losing) in enumerate(exchanges):
        made.begin(10.0)
        for rank in planned:
            made.plan(rank)
        for rank in sorted(planned - asked.keys()):
            made.ask(rank)
            asked[rank] = number
        found = 0
        for rank in sorted(answering & asked.keys()):
            counts = made.answered(rank)
            assert counts is (late_counts or asked.pop(rank) == number)
            asked.pop(rank, None)
            found += counts
        for rank in losing:
            assert made.lost(rank) is (rank in asked and (late_counts or asked[rank] == number))
            asked.pop(rank, None)
        counting = sorted(rank for rank, began in asked.items() if late_counts or began == number)
        assert made.owing == counting
        waits = bool((planned - losing) & asked.keys())
        assert made.is_over(0.0) is (not waits and (not asked or found > 0))
        assert made.is_over(10.0) is (found > 0 or not late_counts or not asked)
        assert made.end() == counting
