"""Does the simulated link hold every message back as long as it says, change no bit, and cost no processor time?"""

from __future__ import annotations

import glob
import tempfile

import pytest

from ddp_course import RankPool
from ddp_course.scaling.link import LINKS, Link
from tests.scaling import link_on_ranks as on_ranks


def test_a_ring_of_four_sends_six_quarters_and_a_tree_of_five_the_whole_six_times():
    link = Link("test", 0.5, 100.0)
    assert link.all_reduce_seconds(400, 4) == pytest.approx(6 * (0.5 + 1.0))
    assert link.all_reduce_seconds(400, 5, "tree") == pytest.approx(6 * (0.5 + 4.0))
    assert link.all_reduce_seconds(400, 1) == link.all_reduce_seconds(400, 1, "tree") == 0
    with pytest.raises(ValueError, match="'star' is not known; choose from ring, tree"):
        link.all_reduce_seconds(400, 4, "star")


def test_presets_get_slower_from_first_to_last_and_name_their_sources():
    assert list(LINKS) == ["nvlink", "pcie4", "100gbe", "10gbe", "1gbe"]
    latencies = [link.latency_s for link in LINKS.values()]
    bandwidths = [link.bytes_per_s for link in LINKS.values()]
    assert latencies == sorted(latencies) and bandwidths == sorted(bandwidths, reverse=True)
    for link in LINKS.values():
        assert "NCCL" in link.source or "802.3" in link.source
    # No Ethernet carries more than its line rate, and PCIe 4 x16 no more than 31.5 GB/s.
    assert LINKS["1gbe"].bytes_per_s < 0.125e9 and LINKS["10gbe"].bytes_per_s < 1.25e9
    assert LINKS["100gbe"].bytes_per_s < 12.5e9 and LINKS["pcie4"].bytes_per_s < 31.5e9


@pytest.mark.parametrize("latency_s, bytes_per_s", [(-1e-6, 1e9), (0.0, 0.0)])
def test_an_impossible_link_is_refused(latency_s, bytes_per_s):
    with pytest.raises(ValueError, match="link odd: expected a latency of 0 s or more and a bandwidth above 0"):
        Link("odd", latency_s, bytes_per_s)


@pytest.mark.timeout(60)
def test_no_bit_of_a_gradient_changes(two_ranks):
    for answers in two_ranks.run(on_ranks.equal_bits):
        for wrap, (equal, messages) in answers.items():
            assert equal, wrap
            assert messages > 3, wrap  # three steps, several buckets


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_no_bit_changes_with_three_ranks_though_a_third_is_no_float():
    with RankPool(3, start_method="forkserver", timeout_s=40, quiet=True) as ranks:
        for answers in ranks.run(on_ranks.equal_bits):
            assert all(equal for equal, _ in answers.values()), answers
        check_carried(ranks.run(on_ranks.carried), 3)


@pytest.mark.timeout(60)
def test_one_message_at_a_time_and_none_too_early(two_ranks):
    check_carried(two_ranks.run(on_ranks.carried), 2)


def check_carried(found, world_size):
    timetables = [spans for spans, _, _ in found]
    assert all(spans == timetables[0] for spans in timetables)  # one link, seen alike by all ranks
    spans = timetables[0]
    assert [span.bytes for span in spans] == [4000, 400, 8000, 4000]
    for span in spans:
        expected = on_ranks.SLOW.all_reduce_seconds(span.bytes, world_size)
        assert span.end_s - span.start_s == pytest.approx(expected)
        assert span.lane == "all-reduce" and "simulated" in span.name
    for first, second in zip(spans, spans[1:], strict=False):
        assert second.start_s >= first.end_s
    for _, notes, text in found:
        assert text == f"simulated slow, ring of {world_size}"
        for span, note in zip(spans, notes, strict=True):
            assert note["done_s"] >= span.end_s
            assert span.start_s >= note["launched_s"]
            assert note["sum"] == world_size * (world_size + 1) / 2
    # The late message could not start before its last rank had launched it.
    assert spans[3].start_s >= max(notes[3]["launched_s"] for _, notes, _ in found)


@pytest.mark.timeout(60)
def test_waiting_costs_no_cpu_and_leaves_no_thread(two_ranks):
    for held_s, cpu_s, simulated_s, (before, during, after) in two_ranks.run(on_ranks.waiting):
        assert simulated_s == pytest.approx(1.0)
        assert held_s >= 1.0
        assert cpu_s < 0.1 * held_s
        assert (during, after) == (before + 1, before)


@pytest.mark.timeout(60)
def test_closing_early_is_said_to_whoever_waits_and_no_file_is_left(two_ranks):
    before = set(glob.glob(f"{tempfile.gettempdir()}/ddp_course_link_*"))
    for rank, said in enumerate(two_ranks.run(on_ranks.closed_early)):
        closed = f"RuntimeError: rank {rank}: the simulated stopped, ring of 2"
        assert said[:2] == [f"{closed} was closed before message {number} had arrived" for number in range(2)]
        assert said[2] == f"{closed} is closed; train inside its `with` block"
    assert set(glob.glob(f"{tempfile.gettempdir()}/ddp_course_link_*")) <= before


@pytest.mark.timeout(60)
def test_what_cannot_be_attached_is_refused(two_ranks):
    for rank, said in enumerate(two_ranks.run(on_ranks.refusals)):
        assert said[0] == "TypeError: expected BucketedDDP or DistributedDataParallel, found Sequential"
        assert said[1].startswith(f"ValueError: rank {rank}: the replica's process group is not the link's")
        assert said[2] == "ValueError: algorithm 'star' is not known; choose from ring, tree"
