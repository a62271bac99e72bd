"""The dashboard as one HTML file: the same page with its data inside, for sending and keeping.

Aggregates go in whole; of trajectories a bounded number does, the newest of every task, purpose,
outcome, failure and fate, and the page says what was left out.
"""

import base64
import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.observe.dashboard import answers, trajectories
from headrace.observe.dashboard.files import PAGE, SCRIPTS, STYLE, read_file
from headrace.observe.dashboard.source import RunSource
from headrace.observe.disk import full_disk
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.record.browsing import MAX_PAGE, SessionFilter

_IMPORT = re.compile(r"^import\b[^;]*;\n", re.MULTILINE)
_STAR = re.compile(r'^import \* as (\w+) from "\./([\w-]+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:const|let|function) (\w+)", re.MULTILINE)


def export_page(run_dir: Path, target: Path, *, trajectories: int = 200) -> str:
    """Write the page over a run as one file; returns what was done, in a line.

    Args:
        run_dir: the run.
        target: the file, replaced when it exists.
        trajectories: most trajectories that go in.

    Raises:
        UserError: no run there, damaged files, or the file cannot be written.
    """
    source = RunSource(run_dir)
    try:
        page, words = render_export(source, trajectories)
    finally:
        source.close()
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        staged.write_bytes(page)
        staged.replace(target)
    except OSError as error:
        staged.unlink(missing_ok=True)
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise UserError(f"--export {target}: no such directory; make it first") from error
        if isinstance(error, IsADirectoryError):
            raise UserError(f"--export {target}: is a directory; name a file") from error
        raise full_disk(error, target) from error
    return f"Dashboard: {target.resolve()} ({len(page) / 1e6:.1f} MB, {words})"


def render_export(source: RunSource, limit: int) -> tuple[bytes, str]:
    """The file's bytes, and in words what is in it.

    Args:
        source: the run.
        limit: most trajectories.
    """
    rows: list[dict[str, Any]] = []
    details: dict[str, Any] = {}
    tokens: dict[str, list[Any]] = {}
    for session_id in _chosen(source, limit):
        found = answers.trajectory(source, session_id)
        if found is None:
            continue
        details[session_id] = found
        rows.append({key: found[key] for key in _row_keys(found)})
        tokens[session_id] = [
            answers.tokens(source, session_id, index, 0) for index in range(len(found["segments"]))
        ]
    order = sorted(range(len(rows)), key=lambda i: -rows[i]["dispatched"])
    ledger = source.ledger()
    total = 0 if ledger is None else sum(ledger.outcome_counts().values())
    words = f"{len(rows):,} of {total:,} trajectories"
    cut = sum(part["total"] > len(part["ids"]) for parts in tokens.values() for part in parts)
    if cut:
        words += f"; {cut:,} long segments only up to token {trajectories.TOKENS:,}"
    parts = {
        name: answers.aggregate(source, name)[1].decode("ascii") for name in answers.AGGREGATES
    }
    data = {
        "made": {"at": time.strftime("%Y-%m-%d %H:%M"), "words": words},
        "rows": [rows[i] for i in order],
        "details": details,
        "tokens": tokens,
    }
    whole = answers.encode(data).decode("ascii")
    joined = ",".join(f'"{name}":{text}' for name, text in parts.items())
    return _page(f'{{"answers":{{{joined}}},{whole[1:]}'), words


def _row_keys(found: dict[str, Any]) -> list[str]:
    apart = ("instance", "rewards", "said", "turns", "turns_skipped", "tree", "tree_skipped")
    return [key for key in found if key not in (*apart, "segments")]


def _chosen(source: RunSource, limit: int) -> list[str]:
    """Ids of every kind of trajectory in turn, newest first, until the limit."""
    ledger = source.ledger()
    if ledger is None or limit < 1:
        return []
    choices = ledger.choices()
    wanted = [
        SessionFilter(forked=True),
        *(SessionFilter(failure=FailureReason(reason)) for reason in choices["failure"]),
        *(SessionFilter(fate=fate) for fate in choices["fate"]),
        *(SessionFilter(outcome=outcome) for outcome in choices["outcome"]),
        *(SessionFilter(purpose=purpose) for purpose in choices["purpose"]),
        *(SessionFilter(task=task) for task in choices["task"]),
    ]
    kinds = [_ids(source, one, limit) for one in wanted]
    chosen: dict[str, None] = {}
    while kinds and len(chosen) < limit:
        for kind in list(kinds):
            found = next(kind, None)
            if found is None:
                kinds.remove(kind)
            elif len(chosen) < limit:
                chosen[found] = None
    return list(chosen)


def _ids(source: RunSource, wanted: SessionFilter, limit: int) -> Iterator[str]:
    before: int | None = None
    while (ledger := source.ledger()) is not None and limit > 0:
        page = ledger.page(wanted, before=before, limit=min(limit, MAX_PAGE))
        yield from (summary.id for summary in page.sessions)
        limit -= len(page.sessions)
        before = page.next
        if before is None:
            return


def _page(data: str) -> bytes:
    """The page with style, script and data inside, allowed to run exactly these."""
    page, style, script = _text(PAGE), _text(STYLE), _script()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # "<" in JSON only stands inside texts; escaped, no text can end the block.
    block = data.replace("<", "\\u003c")
    for old, new in (
        (
            '<meta charset="utf-8">',
            '<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        ),
        ('<link rel="stylesheet" href="static/style.css">', f"<style>{style}</style>"),
        ('<script type="module" src="static/main.js"></script>', ""),
        (
            "</body>",
            f'<script type="application/json" id="embedded">{block}</script>\n'
            f'<script type="module">{script}</script>\n</body>',
        ),
    ):
        if page.count(old) != 1:
            raise AssertionError(f"{PAGE} does not hold {old!r} exactly once")
        page = page.replace(old, new)
    return page.encode()


def _script() -> str:
    """The modules as one: each in a function that gives what it exports.

    Every module only imports from modules before it in SCRIPTS, by name or as a whole.
    """
    parts = ["const modules = {};"]
    for name in SCRIPTS:
        text = _text(name)
        head = [f'const {star} = modules["{file}"];' for star, file in _STAR.findall(text)]
        for statement in _IMPORT.findall(_STAR.sub("", text)):
            names, file = re.findall(r'import (\{[^}]*\}) from "\./([\w-]+\.js)"', statement)[0]
            head.append(f'const {names} = modules["{file}"];')
        body = re.sub(r"^export ", "", _IMPORT.sub("", _STAR.sub("", text)), flags=re.MULTILINE)
        given = ", ".join(_EXPORT.findall(text))
        # Only the last module, which starts the page, waits for anything at its top level.
        kind = "async () =>" if name == SCRIPTS[-1] else "() =>"
        parts.append(
            f'modules["{name}"] = ({kind} {{\n' + "\n".join(head) + f"\n{body}\n"
            f"return {{ {given} }};\n}})();"
        )
    return "\n".join(parts)


def _text(name: str) -> str:
    return read_file(name)[1].decode()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
