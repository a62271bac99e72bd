"""Scored chat-format examples for people: turns apart, thinking visible, format tokens marked."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from headrace.observe.charts import rate_bar
from headrace.observe.measurements import Measure, Measurement, aspects, latest, tabulate
from headrace.observe.report.markup import Cell, badge, details, number, section, table, text
from headrace.observe.runs import Run
from headrace.observe.statistics import wilson
from headrace.observe.units import after_words, count, interval, percent, readable

_SHOWN = 4
"""Examples that are open; the others need a click."""
_TEXT_LIMIT = 500
"""Characters shown per turn: a model that never ends repeats itself."""
_ROLES = {
    "<|system|>": "system",
    "<|user|>": "user",
    "<|assistant|>": "assistant",
    "<|observation|>": "tool",
    "<|im_start|>system": "system",
    "<|im_start|>user": "user",
    "<|im_start|>assistant": "assistant",
}
_OPENER = re.compile("(" + "|".join(re.escape(opener) for opener in _ROLES) + ")")
_TOKEN = re.compile(
    r"<\|[a-z_]+\|>|</?(?:think|tool_call|tool_response|arg_key|arg_value)>|<sop>|\[gMASK\]"
)
_ASPECTS = {
    "parsed": ("readable", "it can be read as a message, without stray format tokens"),
    "thinking": ("thinking", "there is thinking exactly when the prompt asks for it"),
    "call": ("call", "calls where calls are due, of declared tools with fitting arguments"),
    "ended": ("end", "it ends with the stop token that fits"),
    "correct": ("right", "the calls or the answer are the expected ones; not a matter of format"),
}


def chat_section(run: Run) -> str:
    """Rates by aspect and a few examples of the newest chat-format measurement."""
    rows = tabulate(run.measurements).of_kind(Measure.CHAT)
    if not rows:
        return ""
    newest = latest(rows[0])
    return section(
        "Chat format",
        _aspect_table(newest),
        _examples(newest),
        intro=f"Turns of held-out conversations, written greedily by the model "
        f"{after_words(newest.after)}. A turn follows the format when all of its form is right.",
    )


def _aspect_table(chat: Measurement) -> str:
    rates = aspects(chat)
    if not rates:
        return ""
    head = [text("aspect"), text("holds when"), number("rate"), text("", "bar")]
    head.append(number("95% interval"))
    rows: list[list[Cell]] = [
        _rate_row("follows the format", "every aspect of form is right", chat.value, chat.n, True)
    ]
    for name, rate in rates:
        word, meaning = _ASPECTS[name]
        rows.append(_rate_row(word, meaning, rate, chat.n, False))
    return table(head, rows)


def _rate_row(word: str, meaning: str, rate: float, n: int, strong: bool) -> list[Cell]:
    low, high = wilson(min(max(round(rate * n), 0), n), n)
    name = f"<b>{escape(word)}</b>" if strong else escape(word)
    return [
        (name, ""),
        text(meaning, "dim"),
        (f"<b>{percent(rate)}</b>", "n"),
        (rate_bar(rate, low, high), "bar"),
        number(interval(low, high)),
    ]


def _examples(chat: Measurement) -> str:
    found = [e for e in chat.detail.get("examples") or [] if isinstance(e, Mapping)]
    if not found:
        return ""
    shown, rest = _choose(found)
    more = ""
    if rest:
        body = f"<div class='examples'>{''.join(map(_example, rest))}</div>"
        more = details(f"{count(len(rest))} more", body)
    return (
        "<h3>Examples</h3><p class='dim'>Kept by rule, turns that fail first; no picture of how "
        "often they do.</p>"
        f"<div class='examples'>{''.join(map(_example, shown))}</div>{more}"
    )


def _choose(
    found: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Examples to show and the others: half of the shown ones fail, as far as both kinds exist."""
    failing = [e for e in found if not _follows(_score(e))]
    following = [e for e in found if _follows(_score(e))]
    half = _SHOWN // 2
    first = failing[: max(half, _SHOWN - len(following))]
    first += following[: _SHOWN - len(first)]
    return first, [e for e in found if not any(e is one for one in first)]


def _score(example: Mapping[str, Any]) -> Mapping[str, Any]:
    score = example.get("score")
    return score if isinstance(score, Mapping) else {}


def _follows(score: Mapping[str, Any]) -> bool:
    return all(score.get(name) for name in _ASPECTS if name != "correct")


def _example(example: Mapping[str, Any]) -> str:
    score = _score(example)
    follows = _follows(score)
    badges = [badge("follows the format" if follows else "breaks the format", _tone(follows))]
    badges += [
        badge(f"{word} ✗", "bad")
        for name, (word, _) in _ASPECTS.items()
        if name != "correct" and not score.get(name)
    ]
    right = bool(score.get("correct"))
    badges.append(badge("right" if right else "wrong", _tone(right)))
    turns = _turns(str(example.get("prompt", "")))
    opener = ""
    if turns and turns[-1][0] == "assistant" and not _TOKEN.sub("", turns[-1][1]).strip():
        # The turn the model goes on with, e.g. <|assistant|><think>.
        opener = turns.pop()[1]
    thinking = opener.rstrip().endswith("<think>")
    completion = _marked(str(example.get("completion", "")), thinking)
    return (
        f"<div class='example'><p class='verdict'>{' '.join(badges)}</p>"
        f"{''.join(_turn(role, body) for role, body in turns)}"
        "<div class='turn completion'><span class='role'>the model wrote, after "
        f"<code>{escape(opener or 'the prompt')}</code></span><pre>{completion}</pre></div>"
        f"<p class='expected'>expected: {escape(_expected(example.get('expected')))}</p></div>"
    )


def _tone(good: bool) -> str:
    return "good" if good else "bad"


def _turns(prompt: str) -> list[tuple[str, str]]:
    """(role, text) of a prompt's turns; what precedes the first role is a turn of its own."""
    before, *pieces = _OPENER.split(prompt)
    turns = [("prompt", before)] if before.strip() else []
    turns += [(_ROLES[o], o + rest) for o, rest in zip(pieces[::2], pieces[1::2], strict=True)]
    return turns


def _turn(role: str, body: str) -> str:
    return (
        f"<div class='turn {role}'><span class='role'>{role}</span>"
        f"<pre>{_marked(body, thinking=False)}</pre></div>"
    )


def _marked(words: str, thinking: bool) -> str:
    """Markup of text with format tokens: those marked, thinking set apart.

    Args:
        words: as the model reads or writes it.
        thinking: whether the text begins inside of thinking.
    """
    words = readable(words)
    left_out = len(words) - _TEXT_LIMIT
    words = words[:_TEXT_LIMIT] if left_out > 0 else words
    parts: list[str] = []
    end = 0
    for match in [*_TOKEN.finditer(words), None]:
        plain = words[end : match.start() if match else len(words)]
        if plain:
            parts.append(
                f"<span class='think'>{escape(plain)}</span>" if thinking else escape(plain)
            )
        if match is None:
            break
        end = match.end()
        thinking = match[0] == "<think>" or (thinking and match[0] != "</think>")
        parts.append(f"<span class='tok'>{escape(match[0])}</span>")
    if left_out > 0:
        parts.append(f"\n… {count(left_out)} more characters")
    return "".join(parts) or "<span class='dim'>(nothing)</span>"


def _expected(expected: Any) -> str:
    """What a right turn has, in words."""
    if not isinstance(expected, Mapping):
        return "–"
    parts = ["thinking" if expected.get("thinking") else "no thinking"]
    for call in expected.get("calls") or []:
        arguments = call.get("arguments") if isinstance(call, Mapping) else None
        if not isinstance(arguments, Mapping):
            parts.append(str(call))
            continue
        inner = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
        parts.append(f"{call.get('name', '?')}({inner})")
    answer = expected.get("answer")
    if answer is not None:
        parts.append(f'"{answer}"')
    elif not expected.get("calls"):
        parts.append("any answer")
    return readable(", ".join(parts))
