"""The few HTML shapes that every section uses: sections, tables that scroll inside, badges."""

from collections.abc import Sequence
from html import escape

Cell = tuple[str, str]
"""Markup of a table cell and its CSS class ("" for none, "n" for numbers)."""


def section(title: str, *body: str, intro: str = "") -> str:
    """A titled section; "" when there is nothing to say."""
    content = "".join(body)
    if not content:
        return ""
    lead = f"<p class='intro'>{escape(intro)}</p>" if intro else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{content}</section>"


def table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]], kind: str = "") -> str:
    """A table in a box that scrolls sideways on narrow screens; cells are markup already."""

    def line(cells: Sequence[Cell], tag: str) -> str:
        return "".join(
            f"<{tag}{f' class={name!r}' if name else ''}>{body}</{tag}>" for body, name in cells
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        f"<div class='scroll'><table class='{kind}'><thead><tr>{line(head, 'th')}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def text(value: object, css: str = "") -> Cell:
    """A cell of plain text."""
    return escape(str(value)), css


def number(value: object) -> Cell:
    """A right-aligned cell of plain text."""
    return escape(str(value)), "n"


def badge(words: str, tone: str) -> str:
    """A coloured word; tone is "good", "bad" or "open"."""
    return f"<b class='badge {tone}'>{escape(words)}</b>"


def details(summary: str, body: str) -> str:
    """A block that opens on a click; `summary` is plain text, `body` is markup."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"
