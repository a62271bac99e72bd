"""Packing: every token in exactly one row, rows bounded, nothing left to chance."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.packing import Overlong, Piece, pack, pack_lengths
from headrace.errors import UserError

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


@settings(deadline=None, derandomize=True)
@given(LENGTHS, st.integers(2, 25), st.sampled_from(["cut", "keep"]))
def test_nothing_lost_nothing_twice(lengths: list[int], row_tokens: int, overlong: Overlong):
    rows = pack_lengths(lengths, row_tokens, overlong)
    seen = sorted((p.document, t) for row in rows for p in row for t in range(p.start, p.stop))
    assert seen == [(d, t) for d, length in enumerate(lengths) for t in range(length)]
    for row in rows:
        size = sum(piece.stop - piece.start for piece in row)
        assert row
        assert row == sorted(row)
        assert all(p.start < p.stop for p in row)
        assert size <= row_tokens or (overlong == "keep" and len(row) == 1)
        # A document that fits is never cut.
        assert all(
            (p.start, p.stop) == (0, lengths[p.document])
            for p in row
            if lengths[p.document] <= row_tokens or overlong == "keep"
        )
    assert rows == pack_lengths(lengths, row_tokens, overlong)


@settings(deadline=None, derandomize=True)
@given(LENGTHS, st.integers(2, 25))
def test_rows_are_at_least_half_full(lengths: list[int], row_tokens: int):
    # Any-fit packing: two rows that would fit into one are never both open.
    sizes = sorted(
        sum(piece.stop - piece.start for piece in row) for row in pack_lengths(lengths, row_tokens)
    )
    assert len(sizes) < 2 or sizes[0] + sizes[1] > row_tokens


def test_best_fit_by_hand():
    #      document     0  1  2  3  4
    rows = pack_lengths([6, 3, 25, 4, 7], 10)
    assert rows == [
        [Piece(2, 0, 10)],
        [Piece(2, 10, 20)],
        [Piece(1, 0, 3), Piece(4, 0, 7)],
        [Piece(0, 0, 6), Piece(3, 0, 4)],
        [Piece(2, 20, 25)],
    ]
    assert pack_lengths([12, 3], 10, "keep") == [[Piece(0, 0, 12)], [Piece(1, 0, 3)]]


def test_pack_gives_the_arrays():
    documents = [np.arange(3), np.arange(10, 15), np.arange(20, 22)]
    rows = pack(documents, 4)
    assert [[ids.tolist() for ids in row] for row in rows] == [
        [[10, 11, 12, 13]],
        [[0, 1, 2], [14]],
        [[20, 21]],
    ]


def test_bad_arguments():
    with pytest.raises(UserError, match="row_tokens = 1: must be at least 2"):
        pack_lengths([1], 1)
    with pytest.raises(UserError, match="overlong = 'drop': use 'cut' or 'keep'"):
        pack_lengths([1], 4, "drop")  # type: ignore[arg-type]  # what a recipe may say
