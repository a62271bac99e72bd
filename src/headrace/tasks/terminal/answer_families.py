"""Families solved by one command whose output is the answer.

Each build keeps its own mistakes apart from the right answer: a draw in which a wrong command
would print the right thing is rejected.
"""

import itertools

from headrace.tasks.terminal.files import EXTENSIONS, Tree
from headrace.tasks.terminal.problem import (
    AnswerGoal,
    Draft,
    Mistake,
    Step,
    family,
    without_count,
)


@family(
    phrasings=(
        "How many lines are in {f}?",
        "Count the lines of {f}.",
        "Give the number of lines in {f}.",
    ),
    steps=(
        Step(
            "wc -l < {f}",
            (Mistake("wc -w < {f}", 3), Mistake("wc -c < {f}"), Mistake("ls | wc -l")),
        ),
    ),
)
def count_lines(tree: Tree) -> Draft | None:
    f = tree.name()
    lines = tree.lines(tree.size())
    tree.write(f, lines)
    tree.add_distractors(like=f, folders=True)
    words = sum(len(line.split()) for line in lines)
    entries = sum("/" not in path for path in tree.files)
    if len(lines) in (words, entries):
        return None
    return Draft(tree, {"f": f}, AnswerGoal(str(len(lines))))


@family(
    phrasings=(
        "How many lines of {f} contain {w}?",
        "Count the lines of {f} that contain {w}.",
    ),
    steps=(
        Step(
            "grep -c {w} {f}",
            (
                Mistake("grep {w} {f} | wc -w", 3),
                Mistake("grep -v -c {w} {f}"),
                Mistake("wc -l < {f}"),
            ),
        ),
    ),
)
def count_matches(tree: Tree) -> Draft | None:
    f, w = tree.name(), tree.word()
    total = tree.size() + 2
    hits = tree.rng.randint(2, min(total - 1, 14))
    if total == 2 * hits:
        return None
    lines = tree.lines(total, avoid=(w,), most=2)
    for i in tree.rng.sample(range(total), hits):
        words = lines[i].split()
        words.insert(tree.rng.randint(0, len(words)), w)
        lines[i] = " ".join(words)
    tree.write(f, lines)
    tree.add_distractors(like=f, folders=True)
    return Draft(tree, {"f": f, "w": w}, AnswerGoal(str(hits)))


@family(
    phrasings=("How many files are in {d}?", "Count the files in {d}."),
    steps=(
        Step(
            "ls {d} | wc -l",
            (Mistake("ls | wc -l", 3), Mistake("ls -a {d} | wc -l"), Mistake("ls {d} | wc -c")),
        ),
    ),
)
def count_files(tree: Tree) -> Draft | None:
    d = tree.folder()
    count = tree.rng.randint(3, 11 + tree.level)
    tree.add_distractors()
    if sum("/" not in path for path in tree.files) == count:
        return None
    for _ in range(count):
        tree.write(f"{d}/{tree.name()}", tree.lines(1))
    return Draft(tree, {"d": d}, AnswerGoal(str(count)))


@family(
    phrasings=(
        "How many words are in {f}?",
        "Count the words of {f}.",
        "Give the number of words in {f}.",
    ),
    steps=(
        Step(
            "wc -w < {f}",
            (Mistake("wc -l < {f}", 3), Mistake("wc -c < {f}"), Mistake("grep -c . {f}")),
        ),
    ),
)
def count_words(tree: Tree) -> Draft | None:
    f = tree.name()
    lines = tree.lines(tree.size())
    tree.write(f, lines)
    tree.add_distractors(like=f, folders=True)
    words = sum(len(line.split()) for line in lines)
    return None if words == len(lines) else Draft(tree, {"f": f}, AnswerGoal(str(words)))


@family(
    phrasings=("How many different lines are in {f}?", "Count the distinct lines of {f}."),
    steps=(
        Step(
            "sort -u {f} | wc -l",
            (Mistake("sort {f} | wc -l", 3), Mistake("uniq {f} | wc -l"), Mistake("wc -w < {f}")),
        ),
    ),
)
def distinct_lines(tree: Tree) -> Draft | None:
    f = tree.name()
    pool = tree.words(tree.rng.randint(3, 9 + 2 * tree.level))
    lines = pool + tree.rng.choices(pool, k=tree.rng.randint(3, 6 + 3 * tree.level))
    tree.rng.shuffle(lines)
    runs = 1 + sum(a != b for a, b in itertools.pairwise(lines))
    if runs == len(pool):
        return None
    tree.write(f, lines)
    tree.add_distractors(like=f, folders=True)
    return Draft(tree, {"f": f}, AnswerGoal(str(len(pool))))


def _ordered_file(tree: Tree) -> tuple[str, list[str]] | None:
    """A file whose first, last, alphabetically first and alphabetically last lines all differ."""
    f = tree.name()
    lines = tree.lines(tree.size())
    marks = {lines[0], lines[-1], min(lines), max(lines)}
    if len(marks) < 4:
        return None
    tree.write(f, lines)
    tree.add_distractors(like=f, folders=True)
    return f, lines


@family(
    phrasings=("What is the first line of {f}?", "Print the first line of {f}."),
    steps=(
        Step(
            "head -n 1 {f}",
            (
                Mistake("sort {f} | head -n 1", 3),
                Mistake("tail -n 1 {f}"),
                Mistake("head -c 1 {f}"),
            ),
        ),
    ),
)
def first_line(tree: Tree) -> Draft | None:
    made = _ordered_file(tree)
    if made is None:
        return None
    return Draft(tree, {"f": made[0]}, AnswerGoal(made[1][0]))


@family(
    phrasings=("What is the last line of {f}?", "Print the last line of {f}."),
    steps=(
        Step(
            "tail -n 1 {f}",
            (
                Mistake("sort {f} | tail -n 1", 3),
                Mistake("head -n 1 {f}"),
                Mistake("tail -c 1 {f}"),
            ),
        ),
    ),
)
def last_line(tree: Tree) -> Draft | None:
    made = _ordered_file(tree)
    if made is None:
        return None
    return Draft(tree, {"f": made[0]}, AnswerGoal(made[1][-1]))


@family(
    phrasings=("What is line {n} of {f}?", "Print line {n} of {f}."),
    steps=(
        Step(
            "sed -n {n}p {f}",
            (
                Mistake("sed -n {before}p {f}", 3),
                Mistake("sed -n {after}p {f}"),
                Mistake("tail -n {n} {f} | head -n 1"),
            ),
        ),
    ),
)
def nth_line(tree: Tree) -> Draft | None:
    f = tree.name()
    lines = tree.lines(tree.size())
    n = tree.rng.randint(2, min(9, len(lines) - 1))
    if lines[n - 1] in (lines[n - 2], lines[n], lines[-n]):
        return None
    tree.write(f, lines)
    tree.add_distractors(like=f, folders=True)
    slots = {"f": f, "n": str(n), "before": str(n - 1), "after": str(n + 1)}
    return Draft(tree, slots, AnswerGoal(lines[n - 1]))


@family(
    phrasings=(
        "Which line of {f} is first in alphabetical order?",
        "Print the alphabetically first line of {f}.",
    ),
    steps=(
        Step(
            "sort {f} | head -n 1",
            (
                Mistake("head -n 1 {f}", 3),
                Mistake("sort {f} | tail -n 1"),
                Mistake("sort -r {f} | head -n 1"),
            ),
        ),
    ),
)
def sorted_first(tree: Tree) -> Draft | None:
    made = _ordered_file(tree)
    if made is None:
        return None
    return Draft(tree, {"f": made[0]}, AnswerGoal(min(made[1])))


@family(
    phrasings=("What is the largest number in {f}?", "Print the largest number of {f}."),
    steps=(
        Step(
            "sort -n {f} | tail -n 1",
            (
                Mistake("sort {f} | tail -n 1", 3),
                Mistake("sort -n {f} | head -n 1"),
                Mistake("tail -n 1 {f}"),
            ),
        ),
    ),
)
def largest_number(tree: Tree) -> Draft | None:
    f = tree.name()
    rng = tree.rng
    top = rng.randint(100, 699)
    below = rng.sample(range(70, 100), 2) + rng.sample(range(2, top), rng.randint(2, tree.size()))
    numbers = [top, *below]
    rng.shuffle(numbers)
    texts = [str(n) for n in numbers]
    if max(texts) == str(top) or numbers[-1] == top:
        return None
    tree.write(f, texts)
    tree.add_distractors(like=f, folders=True)
    return Draft(tree, {"f": f}, AnswerGoal(str(top)))


@family(
    phrasings=(
        "What is in column {n} of the {w} line in {f}?",
        "Print column {n} of the {w} line in {f}.",
    ),
    steps=(
        Step(
            "grep {w} {f} | cut -d , -f {n}",
            (
                Mistake("grep {w} {f}", 3),
                Mistake("grep {w} {f} | cut -d , -f {m}"),
                Mistake("cut -d , -f {n} {f} | head -n 1"),
            ),
        ),
    ),
)
def column_value(tree: Tree) -> Draft | None:
    f = tree.name("csv")
    rows = tree.rng.randint(3, 4 + 2 * tree.level)
    words = tree.words(2 * rows)
    table = [
        (key, str(tree.rng.randint(10, 99)), word)
        for key, word in zip(words[:rows], words[rows:], strict=True)
    ]
    key = tree.rng.randrange(1, rows)
    n = tree.rng.choice((2, 3))
    value = table[key][n - 1]
    if value == table[0][n - 1]:
        return None
    tree.write(f, (",".join(row) for row in table))
    tree.add_distractors(like=f, folders=True)
    slots = {"f": f, "w": table[key][0], "n": str(n), "m": str(n - 1)}
    return Draft(tree, slots, AnswerGoal(value))


@family(
    phrasings=("Which line of {f} is most common?", "Print the most common line of {f}."),
    steps=(
        Step(
            "sort {f} | uniq -c | sort -rn | head -n 1",
            (
                Mistake("uniq -c {f} | sort -rn | head -n 1", 3),
                Mistake("sort {f} | uniq -c | sort -n | head -n 1"),
                Mistake("sort {f} | uniq -c | head -n 1"),
            ),
        ),
    ),
    answer_from=without_count,
)
def most_common(tree: Tree) -> Draft | None:
    f = tree.name()
    top, pair, *others = tree.words(4 + tree.level)
    lines = [w for w in others for _ in range(tree.rng.randint(1, 2))]
    tree.rng.shuffle(lines)
    at = tree.rng.randint(0, len(lines))
    lines[at:at] = [pair, pair]
    # The most common line is never next to itself while another one is, so uniq without sort
    # finds the other one.
    for position in sorted(tree.rng.sample(range(len(lines) + 1), 4), reverse=True):
        lines.insert(position, top)
    neighbours = {a for a, b in itertools.pairwise(lines) if a == b}
    if not neighbours or min(lines) == top:
        return None
    tree.write(f, lines)
    tree.add_distractors(like=f, folders=True)
    return Draft(tree, {"f": f}, AnswerGoal(top))


@family(
    phrasings=("Where is the file {f}?", "Find the file {f}."),
    steps=(
        Step(
            "find . -name {f}",
            (Mistake("ls {f}", 3), Mistake("find . | head -n 1"), Mistake("grep -rl {f} .")),
        ),
    ),
)
def find_file(tree: Tree) -> Draft | None:
    f = tree.name()
    folders = [tree.folder() for _ in range(2 + tree.level)]
    if tree.level > 1:
        folders = [*folders, *(tree.folder(parent) for parent in folders[:2])]
    path = f"{tree.rng.choice(folders)}/{f}"
    tree.write(path, tree.lines(2))
    for folder in folders:
        tree.write(f"{folder}/{tree.name()}", tree.lines(2))
    tree.add_distractors(like=f)
    return Draft(tree, {"f": f}, AnswerGoal(path, is_path=True))


@family(
    phrasings=(
        "How many {x} files are in all folders?",
        "Count the {x} files in all folders.",
    ),
    steps=(
        Step(
            "find . -name '*.{x}' | wc -l",
            (
                Mistake("ls *.{x} | wc -l", 3),
                Mistake("find . -type f | wc -l"),
                Mistake("find . -name {x} | wc -l"),
            ),
        ),
    ),
)
def count_extension(tree: Tree) -> Draft | None:
    x = tree.rng.choice(EXTENSIONS)
    folders = [tree.folder() for _ in range(1 + tree.level)]
    count = tree.rng.randint(1, 2 + tree.level)
    for _ in range(count):
        tree.write(tree.name(x), tree.lines(1))
    for folder in folders:
        more = tree.rng.randint(1, 3)
        count += more
        for _ in range(more):
            tree.write(f"{folder}/{tree.name(x)}", tree.lines(1))
    for _ in range(2 + tree.level):
        other = tree.rng.choice([e for e in EXTENSIONS if e != x])
        place = tree.rng.choice(["", *(f"{folder}/" for folder in folders)])
        tree.write(place + tree.name(other), tree.lines(1))
    return Draft(tree, {"x": x}, AnswerGoal(str(count)))


ANSWER_FAMILIES = (
    count_lines,
    count_matches,
    count_files,
    count_words,
    distinct_lines,
    first_line,
    last_line,
    nth_line,
    sorted_first,
    largest_number,
    column_value,
    most_common,
    find_file,
    count_extension,
)
