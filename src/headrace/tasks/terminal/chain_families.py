"""Families whose reference solution needs three turns or more: a later command uses what an
earlier one printed.

All trees are flat, so that `*` names files only.
"""

from itertools import pairwise

from headrace.tasks.terminal.files import Tree
from headrace.tasks.terminal.problem import (
    STOP,
    AnswerGoal,
    Draft,
    Mistake,
    StateGoal,
    Step,
    family,
)

_FIND_BY_WORD = Step(
    "grep -l {w} *",
    (Mistake("ls | head -n 1", 3), Mistake("grep -L {w} * | head -n 1"), Mistake("ls *{w}*")),
)


def _file_with_word(tree: Tree, lines: list[str]) -> tuple[str, str] | None:
    """Put `lines` and a word that occurs nowhere else into one of several files.

    Returns the file's name and the word; None when the file comes first in a listing.
    """
    w = tree.word(avoid={word for line in lines for word in line.split()})
    i = tree.rng.randrange(len(lines))
    lines[i] = f"{lines[i]} {w}"
    f = tree.name()
    tree.write(f, lines)
    tree.add_distractors(avoid=(w,), like=f)
    tree.write(tree.name(), tree.lines(2, avoid=(w,)))
    return None if min(tree.files) == f else (f, w)


@family(
    phrasings=(
        "Which file contains {w}? Count its lines.",
        "Count the lines of the file that contains {w}.",
    ),
    steps=(
        _FIND_BY_WORD,
        Step("wc -l < {out}", (Mistake("wc -w < {out}", 3), Mistake("wc -c < {out}"))),
    ),
)
def count_in_match(tree: Tree) -> Draft | None:
    lines = tree.lines(tree.size())
    made = _file_with_word(tree, lines)
    if made is None:
        return None
    others = {e.data.count(b"\n") for path, e in tree.files.items() if path != made[0]}
    if len(lines) in others:
        return None
    return Draft(tree, {"w": made[1]}, AnswerGoal(str(len(lines))))


@family(
    phrasings=(
        "Which file contains {w}? Rename it to {g}.",
        "Rename the file that contains {w} to {g}.",
    ),
    steps=(
        _FIND_BY_WORD,
        Step("mv {out} {g}", (Mistake("cp {out} {g}", 3), Mistake("mv {g} {out}"))),
    ),
)
def rename_match(tree: Tree) -> Draft | None:
    g = tree.name()
    made = _file_with_word(tree, tree.lines(tree.rng.randint(2, 6)))
    if made is None or g in tree.files:
        return None
    goal = StateGoal(
        tree.expect(remove={made[0]}, write={g: tree.files[made[0]]}), any_mode=frozenset({g})
    )
    return Draft(tree, {"w": made[1], "g": g}, goal)


@family(
    phrasings=(
        "{f} names a file. Print the last line of that file.",
        "What is the last line of the file named in {f}?",
    ),
    steps=(
        Step("cat {f}"),
        Step(
            "tail -n 1 {out}",
            (Mistake(STOP, 3), Mistake("head -n 1 {out}"), Mistake("sort {out} | tail -n 1")),
        ),
    ),
)
def pointer_last(tree: Tree) -> Draft | None:
    f, g = tree.name(), tree.name()
    lines = tree.lines(tree.size())
    if lines[-1] in (lines[0], max(lines)):
        return None
    tree.write(f, [g])
    tree.write(g, lines)
    tree.add_distractors(like=g)
    return Draft(tree, {"f": f}, AnswerGoal(lines[-1]))


_FOLLOW = Step("cat {out}", (Mistake(STOP, 3), Mistake("wc -l < {out}"), Mistake("ls {out}")))


@family(
    phrasings=(
        "Follow the file names from {f} to a word.",
        "Start at {f} and follow the names to a word.",
    ),
    steps=(Step("cat {f}"), _FOLLOW),
)
def follow_names(tree: Tree) -> Draft | None:
    # From level 2 on the chain may be one file longer; only looking tells.
    hops = 2 if tree.level == 1 else tree.rng.choice((2, 3))
    chain = [tree.name() for _ in range(hops)]
    word = tree.word()
    for here, there in zip(chain, [*chain[1:], word], strict=True):
        tree.write(here, [there])
    tree.add_distractors(avoid=(word,), like=chain[0])
    steps = (Step("cat {f}"), *(_FOLLOW for _ in range(hops - 1)))
    return Draft(tree, {"f": chain[0]}, AnswerGoal(word), steps=steps)


def _sized_files(tree: Tree, *, wanted: int) -> list[str] | None:
    """Names of files of clearly different sizes, largest first.

    None when the one at index `wanted` happens to begin or end a listing by name.
    """
    count = 2 + tree.level
    names = [tree.name() for _ in range(count)]
    if names[wanted] in (min(names), max(names)):
        return None
    for i, name in enumerate(names):
        low = 2 + 4 * (count - 1 - i)
        tree.write(name, tree.lines(tree.rng.randint(low, low + 1), most=2))
    sizes = [len(tree.files[name].data) for name in names]
    return names if all(a > b for a, b in pairwise(sizes)) else None


_LARGEST = Step(
    "ls -S | head -n 1",
    (Mistake("ls | head -n 1", 3), Mistake("ls -S | tail -n 1"), Mistake("ls | tail -n 1")),
)
_SMALLEST = Step(
    "ls -S | tail -n 1",
    (Mistake("ls | tail -n 1", 3), Mistake("ls -S | head -n 1"), Mistake("ls | head -n 1")),
)


@family(
    phrasings=(
        "What is the first line of the largest file?",
        "Print the first line of the largest file.",
    ),
    steps=(
        _LARGEST,
        Step(
            "head -n 1 {out}",
            (Mistake("sort {out} | head -n 1", 3), Mistake("tail -n 1 {out}"), Mistake(STOP)),
        ),
    ),
)
def largest_first(tree: Tree) -> Draft | None:
    names = _sized_files(tree, wanted=0)
    if names is None:
        return None
    lines = tree.files[names[0]].data.decode().splitlines()
    if lines[0] in (min(lines), lines[-1]):
        return None
    return Draft(tree, {}, AnswerGoal(lines[0]))


@family(
    phrasings=("Delete the {size} file.", "Remove the {size} file."),
)
def delete_by_size(tree: Tree) -> Draft | None:
    size, find, wanted = tree.rng.choice((("largest", _LARGEST, 0), ("smallest", _SMALLEST, -1)))
    names = _sized_files(tree, wanted=wanted)
    if names is None:
        return None
    gone = names[wanted]
    steps = (find, Step("rm {out}", (Mistake(STOP, 3), Mistake("cat {out}"))))
    return Draft(tree, {"size": size}, StateGoal(tree.expect(remove={gone})), steps=steps)


@family(
    phrasings=(
        "Read the word in {f}. How many lines of {g} contain it?",
        "Count the lines of {g} that contain the word in {f}.",
    ),
    steps=(
        Step("cat {f}"),
        Step(
            "grep -c {out} {g}",
            (
                Mistake("wc -l < {g}", 3),
                Mistake("grep -v -c {out} {g}"),
                Mistake("grep -c {f} {g}"),
            ),
        ),
    ),
)
def count_named_word(tree: Tree) -> Draft | None:
    f, g, w = tree.name(), tree.name(), tree.word()
    total = tree.size() + 2
    hits = tree.rng.randint(2, min(total - 1, 12))
    if total == 2 * hits:
        return None
    lines = tree.lines(total, avoid=(w,), most=2)
    for i in tree.rng.sample(range(total), hits):
        lines[i] = f"{w} {lines[i]}" if tree.rng.random() < 0.5 else f"{lines[i]} {w}"
    tree.write(f, [w])
    tree.write(g, lines)
    tree.add_distractors(like=g)
    return Draft(tree, {"f": f, "g": g}, AnswerGoal(str(hits)))


CHAIN_FAMILIES = (
    count_in_match,
    rename_match,
    pointer_last,
    follow_names,
    largest_first,
    delete_by_size,
    count_named_word,
)
