"""Families solved by one command that changes files; the verifier looks at the files.

Everything the instruction does not name must stay as it was.
"""

from headrace.sandbox.types import FileEntry
from headrace.tasks.terminal.files import EXTENSIONS, Tree, text_entry
from headrace.tasks.terminal.problem import Draft, Mistake, StateGoal, Step, family


@family(
    phrasings=(
        "Save the lines of {f} that contain {w} to {g}.",
        "Write the lines of {f} that contain {w} to {g}.",
    ),
    steps=(
        Step(
            "grep {w} {f} > {g}",
            (
                Mistake("grep -c {w} {f} > {g}", 3),
                Mistake("grep -v {w} {f} > {g}"),
                Mistake("grep {w} {f}"),
            ),
        ),
    ),
)
def filter_lines(tree: Tree) -> Draft | None:
    f, g, w = tree.name(), tree.name(), tree.word()
    total = tree.size()
    lines = tree.lines(total, avoid=(w,), most=2)
    for i in tree.rng.sample(range(total), tree.rng.randint(2, 3)):
        lines[i] = f"{w} {lines[i]}" if tree.rng.random() < 0.5 else f"{lines[i]} {w}"
    tree.write(f, lines)
    tree.add_distractors(like=f, folders=True)
    if g in tree.files:
        return None
    kept = text_entry(line for line in lines if w in line.split())
    goal = StateGoal(tree.expect(write={g: kept}), any_mode=frozenset({g}))
    return Draft(tree, {"f": f, "g": g, "w": w}, goal)


@family(
    phrasings=("Sort the lines of {f} in place.", "Sort {f} in place."),
    steps=(
        Step(
            "sort -o {f} {f}",
            (
                Mistake("sort {f} > {f}", 3),
                Mistake("sort {f}"),
                Mistake("sort -r -o {f} {f}"),
            ),
        ),
    ),
)
def sort_file(tree: Tree) -> Draft | None:
    f = tree.name()
    lines = tree.lines(tree.rng.randint(3, 4 + tree.level), most=2)
    if lines in (sorted(lines), sorted(lines, reverse=True)):
        return None
    tree.write(f, lines)
    tree.add_distractors(like=f, folders=True)
    goal = StateGoal(tree.expect(write={f: text_entry(sorted(lines))}), any_mode=frozenset({f}))
    return Draft(tree, {"f": f}, goal)


@family(
    phrasings=("Replace every {a} with {b} in {f}.", "Change all {a} to {b} in {f}."),
    steps=(
        Step(
            "sed -i s/{a}/{b}/g {f}",
            (
                Mistake("sed -i s/{a}/{b}/ {f}", 3),
                Mistake("sed s/{a}/{b}/g {f}"),
                Mistake("sed -i s/{b}/{a}/g {f}"),
            ),
        ),
    ),
)
def replace_word(tree: Tree) -> Draft | None:
    f = tree.name()
    a, b = tree.words(2)
    lines = tree.lines(tree.rng.randint(3, 4 + tree.level), most=2)
    # A line with the word twice tells a global substitution from one that stops at the first.
    lines[0] = f"{a} {a}"
    lines[1] = f"{a} {lines[1]}"
    tree.rng.shuffle(lines)
    tree.write(f, lines)
    tree.add_distractors(like=f, folders=True)
    changed = text_entry(line.replace(a, b) for line in lines)
    goal = StateGoal(tree.expect(write={f: changed}), any_mode=frozenset({f}))
    return Draft(tree, {"f": f, "a": a, "b": b}, goal)


@family(
    phrasings=("Rename {f} to {g}.", "Give {f} the new name {g}."),
    steps=(
        Step(
            "mv {f} {g}",
            (Mistake("cp {f} {g}", 3), Mistake("mv {g} {f}"), Mistake("touch {g}")),
        ),
    ),
)
def rename_file(tree: Tree) -> Draft | None:
    f, g = tree.name(), tree.name()
    tree.write(f, tree.lines(tree.rng.randint(2, 6)))
    tree.add_distractors(like=f, folders=True)
    if g in tree.files:
        return None
    goal = StateGoal(tree.expect(remove={f}, write={g: tree.files[f]}), any_mode=frozenset({g}))
    return Draft(tree, {"f": f, "g": g}, goal)


@family(
    phrasings=("Copy {f} into {d}.", "Put a copy of {f} into {d}."),
    steps=(
        Step(
            "cp {f} {d}",
            (Mistake("mv {f} {d}", 3), Mistake("cp {f} {d}.bak"), Mistake("cp {d} {f}")),
        ),
    ),
)
def copy_file(tree: Tree) -> Draft | None:
    f, d = tree.name(), tree.folder()
    tree.write(f, tree.lines(tree.rng.randint(2, 6)))
    tree.write(f"{d}/{tree.name()}", tree.lines(2))
    tree.add_distractors(like=f, folders=True)
    target = f"{d}/{f}"
    goal = StateGoal(tree.expect(write={target: tree.files[f]}), any_mode=frozenset({target}))
    return Draft(tree, {"f": f, "d": d}, goal)


_MODE_KINDS = (
    (
        0o644,
        0o755,
        ("Make {f} executable for everyone.", "Let everyone execute {f}."),
        ("a+x", "a+r", "a-x", "a+w"),
    ),
    (
        0o644,
        0o444,
        ("Make {f} read only for everyone.", "Let nobody write to {f}."),
        ("a-w", "a+r", "a-r", "a+w"),
    ),
    (
        0o644,
        0o666,
        ("Make {f} writable for everyone.", "Let everyone write to {f}."),
        ("a+w", "a+r", "a-w", "a+x"),
    ),
)
"""Mode before and after, wordings, then the right change and three wrong ones."""


@family(
    phrasings=tuple(p for kind in _MODE_KINDS for p in kind[2]),
    steps=(
        Step(
            "chmod {c} {f}",
            (Mistake("chmod {c1} {f}", 3), Mistake("chmod {c2} {f}"), Mistake("chmod {c3} {f}")),
        ),
    ),
)
def set_mode(tree: Tree) -> Draft | None:
    f = tree.name()
    before, after, phrasings, changes = tree.rng.choice(_MODE_KINDS)
    tree.write(f, tree.lines(tree.rng.randint(1, 4)), before)
    tree.add_distractors(like=f, folders=True)
    wanted = FileEntry("file", after, tree.files[f].data)
    slots = dict(zip(("c", "c1", "c2", "c3"), changes, strict=True)) | {"f": f}
    return Draft(tree, slots, StateGoal(tree.expect(write={f: wanted})), phrasings=phrasings)


@family(
    phrasings=("Append the line {a} {b} to {f}.", "Add the line {a} {b} to the end of {f}."),
    steps=(
        Step(
            "echo {a} {b} >> {f}",
            (
                Mistake("echo {a} {b} > {f}", 3),
                Mistake("echo {a} {b}"),
                Mistake("echo {a} >> {f}"),
            ),
        ),
    ),
)
def append_line(tree: Tree) -> Draft | None:
    f = tree.name()
    a, b = tree.words(2)
    lines = tree.lines(tree.rng.randint(2, 6))
    tree.write(f, lines)
    tree.add_distractors(like=f, folders=True)
    goal = StateGoal(tree.expect(write={f: text_entry([*lines, f"{a} {b}"])}))
    return Draft(tree, {"f": f, "a": a, "b": b}, goal)


@family(
    phrasings=("Delete all {x} files.", "Remove every {x} file."),
    steps=(
        Step(
            "rm *.{x}",
            (Mistake("rm *.*", 3), Mistake("rm {x}"), Mistake("ls *.{x}")),
        ),
    ),
)
def delete_extension(tree: Tree) -> Draft | None:
    x, *others = tree.rng.sample(EXTENSIONS, 3)
    gone = [tree.name(x) for _ in range(tree.rng.randint(1, 1 + tree.level))]
    kept = [tree.name(tree.rng.choice(others)) for _ in range(tree.rng.randint(1, 1 + tree.level))]
    for name in (*gone, *kept):
        tree.write(name, tree.lines(2))
    return Draft(tree, {"x": x}, StateGoal(tree.expect(remove=gone)))


STATE_FAMILIES = (
    filter_lines,
    sort_file,
    replace_word,
    rename_file,
    copy_file,
    set_mode,
    append_line,
    delete_extension,
)
