"""Long documents out of related files: repositories with paths, and commits with their diffs.

Files of one group follow each other so that a file comes after what it imports, each under its
path. A commit is made up from real code: some edit is applied to (or taken back from) files of a
group, and the document shows the files before it, a message, and the unified diff. Text only; how
much of it fits into a context is decided where it is tokenised.
"""

import ast
import difflib
import io
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.data.documents import Document

_MOST_CHARACTERS = 100_000
"""Longer files are not edited: their diffs are slow to find and fit into few contexts."""
_MOST_TOUCHED = 4


def file_text(path: str, text: str) -> str:
    """A file as it stands in a long document: its path, then its content."""
    return f"=== {path} ===\n{text}" + ("" if text.endswith("\n") else "\n")


# ---------------------------------------------------------------------- related files


def related_files(documents: Iterable[Document]) -> list[list[Document]]:
    """Groups of two files and more, by name, each in reading order (see `reading_order`)."""
    groups: defaultdict[str, list[Document]] = defaultdict(list)
    for document in documents:
        groups[document.group].append(document)
    return [reading_order(groups[name]) for name in sorted(groups) if len(groups[name]) > 1]


def reading_order(files: Sequence[Document]) -> list[Document]:
    """Files so that imported ones come first, as far as imports go in no circle; else by id."""
    ordered = sorted(files, key=lambda file: file.id)
    modules: dict[str, int] = {}
    for i, file in enumerate(ordered):
        if file.id.endswith(".py"):
            parts = file.id.removesuffix(".py").removesuffix("/__init__").split("/")
            # Relative imports name the last part only.
            modules.setdefault(parts[-1], i)
            modules[".".join(parts)] = i
    needs = [
        sorted({modules[name] for name in _imported(file) if name in modules} - {i})
        for i, file in enumerate(ordered)
    ]
    result: list[Document] = []
    visited: set[int] = set()
    for first in range(len(ordered)):
        # Depth first with an explicit stack: import chains may be longer than Python's.
        stack = [(first, iter(needs[first]))] if first not in visited else []
        visited.add(first)
        while stack:
            current, rest = stack[-1]
            following = next((i for i in rest if i not in visited), None)
            if following is None:
                result.append(ordered[current])
                stack.pop()
            else:
                visited.add(following)
                stack.append((following, iter(needs[following])))
    return result


_IMPORT = re.compile(
    r"^(?:from\s+(\.*)([\w.]*)\s+import\s+\(?([\w ,*]+)|import\s+([\w., ]+))", re.M
)


def _imported(file: Document) -> set[str]:
    names: set[str] = set()
    for dots, source, members, plain in _IMPORT.findall(file.text):
        if plain:
            names |= {part.split()[0] for part in plain.split(",") if part.strip()}
            continue
        if source:
            names.add(source)
        if dots or source:
            prefix = f"{source}." if source and not dots else ""
            names |= {prefix + part.split()[0] for part in members.split(",") if part.strip()}
    return names


# ---------------------------------------------------------------------- commits


@dataclass(frozen=True)
class Commit:
    """One made-up change of a group of files.

    Attributes:
        group: the group's name.
        message: one line that says what changed.
        before: (path, text before) of every changed file.
        diff: unified diff of all of them, with a/ and b/ paths.
    """

    group: str
    message: str
    before: tuple[tuple[str, str], ...]
    diff: str

    def change_text(self) -> str:
        """Message and diff as they end a document."""
        return f"=== commit ===\n{self.message}\n\n{self.diff}"


def synthetic_commit(
    files: Sequence[Document], seed: int | str, max_characters: int = _MOST_CHARACTERS
) -> Commit | None:
    """A change of `files` (one group), or None when this seed finds nothing to change.

    The changes: a function that is in the file is added, a function is renamed wherever it is
    named, or a constant gets another value. Equal arguments give equal commits.

    Args:
        files: all files of the group.
        seed: which change.
        max_characters: longer files are not changed.
    """
    rng = random.Random(f"commit/{seed}")
    candidates = [
        file
        for file in sorted(files, key=lambda file: file.id)
        if file.id.endswith(".py") and len(file.text) <= max_characters
    ]
    if not candidates:
        return None
    file = rng.choice(candidates)
    edits: list[Callable[[random.Random, Document, list[Document]], _Edit | None]]
    edits = [_added_function, _renamed_function, _changed_constant]
    rng.shuffle(edits)
    for edit in edits:
        found = edit(rng, file, list(files))
        if found is not None and all(len(old) <= max_characters for _, old, _ in found.files):
            changed = [(path, old, new) for path, old, new in found.files if old != new]
            diff = "".join(unified_diff(path, old, new) for path, old, new in changed)
            before = tuple((path, old) for path, old, _ in changed)
            return Commit(file.group, found.message, before, diff)
    return None


def unified_diff(path: str, before: str, after: str) -> str:
    """The change of one file as `git diff` and `patch` write it."""
    lines: list[str] = []
    for line in difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}"):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)


def _lines(text: str) -> list[str]:
    """Lines with their ends; a form feed ends none, unlike in str.splitlines."""
    return list(io.StringIO(text))


@dataclass(frozen=True)
class _Edit:
    message: str
    files: list[tuple[str, str, str]]  # path, before, after


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _added_function(rng: random.Random, file: Document, _: list[Document]) -> _Edit | None:
    """The file without one of its functions is the state before."""
    tree = _parse(file.text)
    found: list[tuple[_Function, str]] = []
    for node in tree.body if tree else []:
        if isinstance(node, _Function):
            found.append((node, node.name))
        elif isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, _Function)]
            # Without its last statement a class body would not parse.
            if len(node.body) > 1:
                found += [(method, f"{node.name}.{method.name}") for method in methods]
    found = [(node, name) for node, name in found if (node.end_lineno or 0) - node.lineno < 60]
    if not found:
        return None
    node, name = rng.choice(found)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    last = node.end_lineno or node.lineno
    lines = _lines(file.text)
    while last < len(lines) and not lines[last].strip():
        last += 1
    before = "".join(lines[:first] + lines[last:])
    if _parse(before) is None:
        return None  # e.g. two statements on one line
    documentation = ast.get_docstring(node)
    about = f": {documentation.splitlines()[0]}" if documentation else ""
    return _Edit(f"Add {name}{about}", [(file.id, before, file.text)])


def _renamed_function(rng: random.Random, file: Document, files: list[Document]) -> _Edit | None:
    """A function gets a longer or shorter name in all files of the group."""
    tree = _parse(file.text)
    names = [
        node.name
        for node in (tree.body if tree else [])
        # A name without an underscore may be an ordinary word in comments.
        if isinstance(node, _Function) and "_" in node.name.strip("_")
    ]
    if not names:
        return None
    old = rng.choice(names)
    parts = old.strip("_").split("_")
    verb = rng.choice(["do", "run", "apply", "handle", "get"])
    new = "_".join(parts[1:] if len(parts) > 2 and rng.random() < 0.5 else [verb, *parts])
    if old.startswith("_"):
        new = f"_{new}"
    word = re.compile(rf"\b{re.escape(old)}\b")
    touched = [other for other in files if old in other.text and word.search(other.text)]
    touched.sort(key=lambda other: other.id)
    taken = re.compile(rf"\b{re.escape(new)}\b")
    if len(touched) > _MOST_TOUCHED or any(taken.search(other.text) for other in touched):
        return None
    edits = [(other.id, other.text, word.sub(new, other.text)) for other in touched]
    return _Edit(f"Rename {old} to {new}", edits)


_CONSTANT = re.compile(r"^([A-Z][A-Z0-9_]{2,}) = (\d+)$", re.M)


def _changed_constant(rng: random.Random, file: Document, _: list[Document]) -> _Edit | None:
    """A number that a module names gets another value."""
    found = list(_CONSTANT.finditer(file.text))
    if not found:
        return None
    match = rng.choice(found)
    name, old = match.groups()
    new = str(rng.choice([int(old) * 2 or 1, int(old) + 1, int(old) * 10 or 10]))
    before, after = file.text[: match.start(2)], file.text[match.end(2) :]
    return _Edit(f"Change {name} from {old} to {new}", [(file.id, file.text, before + new + after)])
