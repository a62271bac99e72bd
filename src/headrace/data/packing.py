"""Whole documents into rows of bounded length: what goes into which row.

Works on lengths only, so it is cheap and pure. A document longer than a row is cut into pieces; a
piece is trained as a document of its own: attention, positions and prediction targets end at its
ends. Nothing is lost and nothing is used twice.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from headrace.errors import UserError

Overlong = Literal["cut", "keep"]


class Piece(NamedTuple):
    """Tokens start <= t < stop of document number `document`."""

    document: int
    start: int
    stop: int


def pack_lengths(
    lengths: Sequence[int], row_tokens: int, overlong: Overlong = "cut"
) -> list[list[Piece]]:
    """Choose rows for documents of these lengths by best fit, longest first.

    Args:
        lengths: tokens of each document; empty documents take part in no row.
        row_tokens: most tokens of a row.
        overlong: "cut": a document longer than a row becomes pieces of row_tokens and a rest;
            "keep": it stays in one piece, alone in a row that exceeds row_tokens.

    Returns:
        Rows, each with its pieces in the order of documents. Equal inputs give equal rows; of
        pieces equally long the one of the earlier document is placed first, of rows that fit
        equally well the oldest is taken.

    Raises:
        UserError: row_tokens < 2 (nothing could be predicted), or unknown `overlong`.
    """
    if row_tokens < 2:
        raise UserError(f"packing row_tokens = {row_tokens}: must be at least 2")
    if overlong not in ("cut", "keep"):
        raise UserError(f"packing overlong = {overlong!r}: use 'cut' or 'keep'")
    pieces: list[Piece] = []
    rows: list[list[Piece]] = []
    for document, length in enumerate(lengths):
        if overlong == "keep" and length > row_tokens:
            rows.append([Piece(document, 0, length)])
            continue
        pieces += [
            Piece(document, start, min(start + row_tokens, length))
            for start in range(0, length, row_tokens)
        ]
    pieces.sort(key=lambda piece: (piece.start - piece.stop, piece.document))
    spaces: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for piece in pieces:
        size = piece.stop - piece.start
        best = bisect_left(spaces, (size, -1))
        if best == len(spaces):
            free, row = row_tokens, len(rows)
            rows.append([])
        else:
            free, row = spaces.pop(best)
        rows[row].append(piece)
        if free > size:
            insort(spaces, (free - size, row))
    for row in rows:
        row.sort()
    return rows


def pack(
    documents: Sequence[np.ndarray], row_tokens: int, overlong: Overlong = "cut"
) -> list[list[np.ndarray]]:
    """Rows of id arrays: `pack_lengths` applied to documents held in memory.

    Args:
        documents: integer arrays [T_i].
        row_tokens: most tokens of a row.
        overlong: see `pack_lengths`.

    Returns:
        Rows, each a list of views into `documents`, one per piece.
    """
    return [
        [documents[piece.document][piece.start : piece.stop] for piece in row]
        for row in pack_lengths([len(ids) for ids in documents], row_tokens, overlong)
    ]
