"""Related files in reading order, and commits whose diffs really lead from before to after."""

import ast
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.documents import Document
from headrace.data.repositories import (
    file_text,
    reading_order,
    related_files,
    synthetic_commit,
    unified_diff,
)


def file(path: str, text: str, group: str = "pkg") -> Document:
    return Document(path, text, "code", group)


PACKAGE = [
    file("pkg/__init__.py", "from .api import *\n"),
    file(
        "pkg/api.py",
        "from . import words\nfrom pkg.base import (Base,\n    other)\n\n\n"
        "LIMIT = 30\n\n\n"
        "def count_lines(text):\n    return text.count('\\n')\n\n\n"
        "class Api(Base):\n    name = 'a'\n\n    @property\n    def size(self):\n"
        '        """How many."""\n        return count_lines(self.name)\n',
    ),
    file("pkg/base.py", "import json, os\n\n\nclass Base:\n    pass\n"),
    file(
        "pkg/words.py",
        "from .api import count_lines\n\n\ndef first_word(x):\n    return x.split()[0]\n",
    ),
    file("pkg/notes.md", "api base\n"),
]


def apply_diff(before: dict[str, str], diff: str) -> dict[str, str]:
    """An independent, strict reader of unified diffs."""
    result = dict(before)
    for part in re.split(r"^(?=--- a/)", diff, flags=re.M):
        if not part:
            continue
        lines = part.split("\n")
        path = lines[0].removeprefix("--- a/")
        assert lines[1] == f"+++ b/{path}"
        old = before[path].split("\n")
        new: list[str] = []
        at = 0
        for hunk in re.split(r"^(?=@@ )", "\n".join(lines[2:]), flags=re.M)[1:]:
            head, *body = hunk.removesuffix("\n").split("\n")
            match = re.match(r"@@ -(\d+)(?:,(\d+))? \+", head)
            assert match
            start = int(match[1]) - (match[2] != "0")
            new += old[at:start]
            at = start
            for line in body:
                if line[0] in " -":
                    assert old[at] == line[1:]
                    at += 1
                if line[0] in " +":
                    new.append(line[1:])
        result[path] = "\n".join(new + old[at:])
    return result


def test_files_come_after_what_they_import():
    order = [document.id for document in reading_order(list(reversed(PACKAGE)))]
    # words and api import each other: the circle is cut where it is met first.
    assert order == ["pkg/base.py", "pkg/words.py", "pkg/api.py", "pkg/__init__.py", "pkg/notes.md"]


def test_groups_are_named_in_order_and_single_files_left_out():
    alone = file("x/one.py", "x = 1\n", "x")
    other = [file("a/1.txt", "1", "a"), file("a/2.txt", "2", "a")]
    groups = related_files([*PACKAGE, alone, *other])
    assert [[d.group for d in g] for g in groups] == [["a"] * 2, ["pkg"] * 5]


def test_file_text_ends_its_last_line():
    assert file_text("a/b.py", "x") == "=== a/b.py ===\nx\n"
    assert file_text("a/b.py", "x\n") == "=== a/b.py ===\nx\n"


@settings(deadline=None, derandomize=True)
@given(st.text(alphabet="ab\n\x0c\u2028", max_size=30), st.text(alphabet="ab\n\x0c", max_size=30))
def test_diffs_lead_from_before_to_after(before: str, after: str):
    before, after = before + "\n", after + "\n"
    assert apply_diff({"f": before}, unified_diff("f", before, after)) == {"f": after}


def test_missing_line_ends_are_marked():
    assert unified_diff("f", "a", "b\n") == (
        "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n"
    )


def test_commits_change_the_group_as_they_say():
    kinds = set()
    texts = {document.id: document.text for document in PACKAGE}
    for seed in range(40):
        commit = synthetic_commit(PACKAGE, seed)
        assert commit == synthetic_commit(list(reversed(PACKAGE)), seed)
        if commit is None:
            continue
        kind, *words = commit.message.split()
        kinds.add(kind)
        before = dict(commit.before)
        after = apply_diff(before, commit.diff)
        assert commit.group == "pkg"
        assert before.keys() == after.keys() <= texts.keys()
        assert all(before[path] != after[path] for path in before)
        assert commit.change_text() == f"=== commit ===\n{commit.message}\n\n{commit.diff}"
        for text in [*before.values(), *after.values()]:
            ast.parse(text)
        if kind == "Add":
            assert after.items() <= texts.items()
            assert words[0].rstrip(":") in ("count_lines", "Api.size", "first_word")
        else:
            assert before.items() <= texts.items()
        if kind == "Rename":
            old, _, new = words
            assert before.keys() == {p for p, t in texts.items() if re.search(rf"\b{old}\b", t)}
            assert all(old not in re.findall(r"\w+", t) and new in t for t in after.values())
        if kind == "Change":
            assert commit.message.startswith("Change LIMIT from 30 to ")
            assert f"LIMIT = {words[-1]}\n" in after["pkg/api.py"]
    assert kinds == {"Add", "Rename", "Change"}


def test_the_message_carries_the_documentation():
    messages = {c.message for s in range(40) if (c := synthetic_commit(PACKAGE, s))}
    assert "Add Api.size: How many." in messages


def test_long_files_stay_as_they_are():
    assert synthetic_commit(PACKAGE, 0, max_characters=10) is None
    touched = {
        path
        for seed in range(30)
        if (commit := synthetic_commit(PACKAGE, seed, max_characters=90))
        for path, _ in commit.before
    }
    assert touched == {"pkg/words.py"}
    assert synthetic_commit([file("a.md", "text")], 0) is None
