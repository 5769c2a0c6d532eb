"""Tiles, parts and programs of attention on a GPU suit the card and any batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from outrider.lm.gpu import tiles
from tests.lm.compile_kernels import program_rows

L4 = tiles.Card(99 * 1024, 58, 8)
H100 = tiles.Card(227 * 1024, 132, 9)
LLAMA = tiles.Heads(4, 8, 128, 128, torch.bfloat16)


@pytest.mark.parametrize(
    ("keys", "parts", "doublings"),
    [(1, 1, 0), (512, 1, 0), (513, 2, 0), (8192, 16, 0), (8193, 17, 1), (16384, 20, 1),
     (16385, 21, 2), (32768, 24, 2), (131072, 32, 4)],
)  # fmt: skip
def test_a_doubling_of_the_length_adds_four_parts(keys: int, parts: int, doublings: int) -> None:
    assert (tiles.part_count(keys), tiles.doubling_count(keys)) == (parts, doublings)


def test_parts_begin_where_tiles_do_and_have_at_most_a_quarter_of_the_keys_before_them() -> None:
    begins: dict[int, int] = {}
    for slot in range(0, 2**18, tiles.PART):
        begins.setdefault(tiles.part_of(slot), slot)
    assert list(begins) == list(range(len(begins)))
    for (part, begin), (_, end) in pairwise(begins.items()):
        assert tiles.part_of(end - 1) == part
        assert end - begin <= max(tiles.PART, begin // 4)


@pytest.mark.parametrize(
    ("tokens_each", "card", "stages"),
    [(1, L4, 3), (8, L4, 3), (512, L4, 3), (1, H100, 4), (8, H100, 4), (512, H100, 3)],
)
def test_two_tiles_of_keys_and_values_fit_a_small_card_and_three_a_large_card(
    tokens_each: int, card: tiles.Card, stages: int
) -> None:
    """The buffers are one fewer than the stages. With warp groups, each stage has a buffer."""
    assert tiles.tiles(tokens_each, 1, LLAMA, card).stages == stages


def test_a_launch_has_programs_for_all_multiprocessors_and_few_without_work() -> None:
    """The cases are steps, drafts, trees and a prompt's chunk on an H100, with 1k to 32k keys."""
    for step in program_rows():
        programs, with_work = int(str(step["programs"])), int(str(step["with_work"]))
        assert programs <= max(8 * H100.multiprocessors, 2 * with_work), step
        if step["keys"] != 1024:
            assert with_work >= 128, step


def test_plain_steps_and_drafts_of_up_to_seven_tokens_have_tiles_of_the_same_bits() -> None:
    for tokens in range(1, 9):
        assert tiles.tiles(tokens, 1, LLAMA, H100).rows <= 32
