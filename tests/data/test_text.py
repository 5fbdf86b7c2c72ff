"""Every window of the text has one rank and one turn, whoever stops in between."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_course.data import DatasetError
from ddp_course.data.text import (
    TokenStream,
    count_windows,
    decode,
    encode,
    exact_windows,
    library_text,
    windows,
)

TOKENS = torch.arange(10 * 57 + 5).to(torch.uint8)  # 57 windows of 10 tokens


@pytest.fixture(scope="module")
def text():
    return library_text()


def test_every_file_of_the_library_is_in_one_part(text):
    names = sorted(path.name for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))
    assert sorted(text.train_files + text.held_out_files) == names
    assert list(text.held_out_files) == names[9::10]
    for tokens, files in ((text.train, text.train_files), (text.held_out, text.held_out_files)):
        content = [Path(sysconfig.get_path("stdlib"), name).read_bytes() for name in files]
        assert bytes(tokens.tolist()) == b"".join(each + b"\0" for each in content)
        assert b"\0" not in b"".join(content)  # so that it can end a file
    assert len(text.train) > 1_000_000


def test_a_folder_with_too_few_files_is_refused(tmp_path):
    for number in range(9):
        (tmp_path / f"m{number}.py").write_text("pass\n")
    with pytest.raises(DatasetError, match="has 9 Python files, at least 10 are needed"):
        library_text(tmp_path)
    (tmp_path / "m9.py").write_text("last\n")
    text = library_text(tmp_path)
    assert (len(text.train_files), text.held_out_files) == (9, ("m9.py",))
    assert decode(text.held_out[:-1]) == "last\n"


def test_a_text_comes_back_from_its_tokens():
    assert decode(encode("def f(é): pass\n")) == "def f(é): pass\n"
    assert encode("aé").tolist() == [97, 195, 169]
    assert decode(torch.tensor([97, 195])) == "a\ufffd"  # half a letter


def test_each_token_is_to_foretell_the_next_one_and_windows_meet_without_a_gap():
    assert count_windows(TOKENS, 10) == 57 and count_windows(TOKENS[:571], 10) == 57
    assert count_windows(TOKENS[:570], 10) == 56  # the last window needs one more token
    token_NT, next_NT = windows(TOKENS, 10, np.array([0, 56]))
    assert token_NT.dtype == next_NT.dtype == torch.int64
    assert token_NT.tolist() == [list(range(10)), [number % 256 for number in range(560, 570)]]
    assert next_NT.tolist() == [list(range(1, 11)), [number % 256 for number in range(561, 571)]]


# --- The stream ------------------------------------------------------------------------------------


def streams(world_size: int, local_batch: int, seed: int = 0) -> list[TokenStream]:
    return [TokenStream(TOKENS, 10, local_batch, world_size, rank, seed) for rank in range(world_size)]


def take(ranks: list[TokenStream], batches: int) -> list[int]:
    return [int(number) for _ in range(batches) for stream in ranks for number in stream.next_windows()]


@pytest.mark.parametrize(("world_size", "local_batch"), [(1, 4), (2, 4), (3, 5), (4, 1)])
def test_in_an_epoch_no_window_comes_twice_and_few_are_left_out(world_size, local_batch):
    ranks, together = streams(world_size, local_batch), world_size * local_batch
    first, second = (take(ranks, 57 // together) for _ in range(2))
    for epoch in (first, second):
        assert len(set(epoch)) == len(epoch) == 57 // together * together
        assert set(epoch) <= set(range(57))
    assert first != second and [stream.epoch for stream in ranks] == [1] * world_size


def test_a_global_batch_is_the_same_however_many_ranks_share_it():
    whole = take(streams(1, 12), 3)
    for world_size, local_batch in ((2, 6), (3, 4), (4, 3)):
        dealt = take(streams(world_size, local_batch), 3)
        for start in (0, 12, 24):
            assert sorted(dealt[start : start + 12]) == sorted(whole[start : start + 12])


def test_another_seed_gives_another_order_and_the_same_one_the_same():
    assert take(streams(2, 4, seed=3), 5) == take(streams(2, 4, seed=3), 5) != take(streams(2, 4, seed=4), 5)


@pytest.mark.parametrize("before", [1, 6, 7, 9])
def test_a_stream_goes_on_where_it_was(before):
    straight, stopped = streams(2, 4), streams(2, 4)
    take(straight, before), take(stopped, before)
    states = [stream.state_dict() for stream in stopped]
    assert states[0] == states[1]  # one place for all ranks
    resumed = streams(2, 4)
    for stream in resumed:
        stream.load_state_dict(states[0])
    assert take(resumed, 12) == take(straight, 12)  # into the next epoch


def test_other_ranks_go_on_without_repeating_or_losing_a_window():
    two = streams(2, 4)
    seen = take(two, 3)
    three = streams(3, 3)
    for stream in three:
        stream.load_state_dict(two[0].state_dict())
    seen += take(three, 2)
    one = streams(1, 1)
    one[0].load_state_dict(three[2].state_dict())
    seen += take(one, 57 - 24 - 18)
    assert sorted(seen) == list(range(57)) and one[0].epoch == 0


def test_a_place_in_another_text_or_order_is_refused():
    place = streams(1, 4)[0].state_dict()
    others = {
        "seed=0": TokenStream(TOKENS, 10, 4, 1, 0, seed=1),
        "context=10": TokenStream(TOKENS[:520], 9, 4, 1, 0),
        "checksum=": TokenStream(TOKENS.flip(0), 10, 4, 1, 0),
    }
    for named, stream in others.items():
        with pytest.raises(ValueError, match=f"rank 0: the saved place has {named}"):
            stream.load_state_dict(place)


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(ValueError, match="rank 1: the text has 57 windows of 10 tokens, and one batch .* 2 x 30"):
        TokenStream(TOKENS, 10, 30, 2, 1)
    with pytest.raises(ValueError, match="rank 2 does not exist"):
        TokenStream(TOKENS, 10, 1, 2, 2)


# --- Judging ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "taken"), [(0, 57), (100, 57), (20, 20), (1, 1)])
def test_each_window_is_judged_by_one_rank(most, taken):
    by_rank = [exact_windows(TOKENS, 10, most, 3, rank).tolist() for rank in range(3)]
    together = sorted(sum(by_rank, []))
    assert len(set(together)) == len(together) == taken
    assert together == exact_windows(TOKENS, 10, most, 1, 0).tolist()
    assert max(map(len, by_rank)) - min(map(len, by_rank)) <= 1
    if taken == 20:
        assert together[0] == 0 and together[-1] >= 54  # spread over the whole text
