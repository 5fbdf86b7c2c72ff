"""Is the arithmetic on spans right?"""

import pytest

from ddp_course.scaling.spans import (
    Span,
    busy_seconds,
    exposed_seconds,
    joined,
    merge_ranks,
    rows_of,
    union,
)

# Backward computes from 1 to 3 and from 4 to 5. Of 4.5 s of talking, 1.5 + 0.5 s meet it.
STEP = [
    Span("forward", 0.0, 1.0, "forward"),
    Span("one", 1.0, 3.0, "backward"),
    Span("all_reduce", 1.5, 2.5, "all-reduce", 400),
    Span("all_reduce", 2.5, 3.5, "all-reduce", 800),
    Span("two", 4.0, 5.0, "backward"),
    Span("all_reduce", 4.5, 7.0, "all-reduce", 1200),
    Span("rest of backward", 5.0, 7.0, "waiting"),
    Span("optimizer", 7.0, 8.0, "optimizer"),
]


def spans(*times, lane="all-reduce"):
    return [Span(str(number), start, end, lane) for number, (start, end) in enumerate(times)]


def test_union_joins_what_touches_and_keeps_what_does_not():
    assert union(spans((4, 5), (0, 2), (1, 1.5), (2, 3))) == [(0, 3), (4, 5)]
    assert union([]) == []


def test_nodes_of_one_backward_are_joined_and_two_backwards_are_not():
    row = [*spans((1, 3), (4, 5), (8, 9), lane="backward"), *spans((0, 1), (6, 8), lane="forward")]
    found = [(span.lane, span.start_s, span.end_s) for span in joined(row)]
    assert found == [("forward", 0, 1), ("backward", 1, 5), ("forward", 6, 8), ("backward", 8, 9)]


def test_time_in_which_two_collectives_run_counts_once():
    assert busy_seconds(spans((0, 2), (1, 3), (5, 6)), ("all-reduce",)) == 4
    assert busy_seconds(spans((0, 2)), ("forward",)) == 0


def test_exposed_is_talking_without_computing():
    assert exposed_seconds(STEP) == pytest.approx(0.5 + 2.0)


def test_waiting_is_not_computing():
    after = [*spans((0, 1), lane="backward"), *spans((1, 3), lane="waiting"), *spans((1, 3))]
    assert exposed_seconds(after) == 2


def test_a_collective_that_forward_waits_for_counts_as_hidden_by_it_and_others_count_too():
    # The rule is plain: whatever runs while a computing lane is busy is hidden. Broadcasts are talk as well.
    both = [*spans((0, 2), lane="forward"), *spans((1, 4), lane="other collective")]
    assert exposed_seconds(both) == 2


def test_rows_are_few_and_free_of_overlaps():
    mixed = spans((3, 4), (0, 2), (1, 3), (2, 3), (2.5, 5))
    assert [[span.name for span in row] for row in rows_of(mixed)] == [["1", "3", "0"], ["2"], ["4"]]
    assert [len(row) for row in rows_of(mixed, extra_s=[0, 0, 0, 1.5, 0])] == [2, 2, 1]
    assert rows_of([]) == []


def test_all_ranks_are_shifted_by_the_same_amount():
    merged = merge_ranks([spans((12, 13)), spans((10, 11), (11.5, 14))])
    assert [[(span.start_s, span.end_s) for span in spans] for spans in merged] == [[(2, 3)], [(0, 1), (1.5, 4)]]
    assert merge_ranks([[], []]) == [[], []]
