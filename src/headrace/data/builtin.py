"""The corpus that is everywhere: the Python standard library of the running interpreter.

Its sources are code; their docstrings and the language reference that `help()` prints are prose.
Parts that distributions package separately or generate are left out, so that two installations of
one Python version give (nearly) the same corpus. `system_reader` reads what documentation the
operating system has, which differs from machine to machine, and is used only when asked for.
"""

import ast
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.data.documents import Document
from headrace.data.readers import Reader, read_text
from headrace.errors import UserError

_LEFT_OUT = frozenset(
    {
        *("test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils"),
        *("ensurepip", "site-packages", "dist-packages", "lib-dynload", "__pycache__"),
        "encodings",  # tables of character sets, neither code nor prose
        "__phello__",
    }
)
_GENERATED = re.compile(r"config-|_sysconfigdata|sitecustomize|turtle\.py|__phello__\.")
_TOPICS = "pydoc_data/topics.py"
_SYSTEM_ROOTS = (Path("/usr/share/doc"), Path("/usr/share/man"))
_DOC_SUFFIXES = (".txt", ".md", ".rst")


# ---------------------------------------------------------------------- standard library


def standard_library_reader(root: Path | None = None) -> Reader:
    """Sources below `root` (default: the running interpreter's library), docstrings and topics.

    A source's group is its top-level package, "lib" for modules of their own.

    Raises:
        UserError: there are no sources (some distributions ship bytecode only).
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files: list[tuple[str, Path]] = []
    for directory, names, entries in os.walk(folder):
        names[:] = [n for n in names if n not in _LEFT_OUT and not _GENERATED.match(n)]
        files += [
            (Path(directory, entry).relative_to(folder).as_posix(), Path(directory, entry))
            for entry in entries
            if entry.endswith(".py") and not _GENERATED.match(entry)
        ]
    files.sort()
    if not files:
        raise UserError(
            f"corpus source 'builtin': no Python sources in {str(folder)!r}; "
            "name a folder of text instead"
        )

    def read() -> Iterator[Document]:
        for name, path in files:
            text = read_text(path)
            if text is not None:
                yield from _source_documents(name, text)

    return Reader(files, read)


def _source_documents(name: str, text: str) -> Iterator[Document]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old sources
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return  # a template or a deliberately broken example
    if name == _TOPICS:
        yield from _topics(tree)
        return
    group = name.split("/")[0] if "/" in name else "lib"
    yield Document(name, text, "code", group)
    prose = _docstrings(tree, name)
    if prose:
        yield Document(f"{name}#docstrings", prose, "prose", group, origin=text)


def _topics(tree: ast.Module) -> Iterator[Document]:
    """The chapters of the language reference: a literal dict of name to text."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, chapter in ast.literal_eval(node.value).items():
                yield Document(f"topics/{topic}", chapter, "prose", "reference")


def _docstrings(tree: ast.Module, name: str) -> str:
    """Everything documented in a module, under the signatures, as one text."""
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parts: list[str] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{prefix}{child.name}"
                documentation = ast.get_docstring(child)
                if documentation:
                    arguments = "" if isinstance(child, ast.ClassDef) else _signature(child)
                    parts.append(f"{place}{arguments}\n\n{documentation}")
                visit(child, f"{place}.")

    documentation = ast.get_docstring(tree)
    if documentation:
        parts.append(documentation)
    visit(tree, "")
    return "\n\n".join([module, *parts]) + "\n" if parts else ""


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f"({ast.unparse(function.args)})"


# ---------------------------------------------------------------------- system documentation


def system_reader(roots: Sequence[Path] = _SYSTEM_ROOTS) -> Reader:
    """Text documentation below `roots`: texts, reST, Markdown, and manual pages in English.

    Copyright files and change logs are left out. A document's group is its package, "man" for
    manual pages.

    Raises:
        UserError: there is none.
    """
    files: list[tuple[str, Path]] = []
    for root in roots:
        for directory, names, entries in os.walk(root):
            names.sort()
            files += [
                (f"{root.name}/{Path(directory, entry).relative_to(root).as_posix()}", path)
                for entry in sorted(entries)
                if _is_documentation(path := Path(directory, entry), root)
            ]
    if not files:
        raise UserError(
            f"corpus source 'system': no documentation in {', '.join(map(str, roots))}; "
            "install some (python3-doc, man pages) or use 'builtin'"
        )

    def read() -> Iterator[Document]:
        for name, path in files:
            text = read_text(path)
            if text is None:
                continue
            if _is_manual(name):
                yield Document(name, manual_text(text), "prose", "man")
            else:
                yield Document(name, text, "prose", name.split("/")[1])

    return Reader(files, read)


def _is_manual(name: str) -> bool:
    return re.search(r"(^|/)man\d\w*/[^/]+\.\d\w*(\.gz)?$", name) is not None


def _is_documentation(path: Path, root: Path) -> bool:
    name = path.name.removesuffix(".gz")
    if not path.is_file() or re.match(r"(?i)copyright|changelog|changes|news|license", name):
        return False
    relative = path.relative_to(root).as_posix()
    if _is_manual(relative):
        return re.match(r"man\d", relative) is not None  # translations lie one folder deeper
    return name.endswith(_DOC_SUFFIXES) or name.startswith("README")


_ESCAPES = {
    "-": "-", "e": "\\", "&": "", "%": "", "/": "", ",": "", "|": "", "^": "", "0": " ",
    " ": " ", "~": " ", "(aq": "'", "(dq": '"', "(bu": "*", "(em": "--", "(en": "-",
    "(co": "(c)", "(lq": '"', "(rq": '"', "(oq": "'", "(cq": "'", "(ti": "~", "(ha": "^",
}  # fmt: skip
_ESCAPE = re.compile(r"\\(f\[\w*\]|f\(..|f.|s[+-]?\d|\*\(..|\(..|\[\w+\]|.)")


def manual_text(roff: str) -> str:
    """Readable text of a manual page: macros of man(7) and mdoc(7) reduced to their words."""
    lines: list[str] = []
    for raw in roff.split("\n"):
        if raw.startswith(("'\\\"", '.\\"', "'")):
            continue
        line = raw
        if raw.startswith("."):
            macro, _, rest = raw[1:].lstrip().partition(" ")
            if macro in ("SH", "SS", "Sh", "Ss"):
                line = "\n" + rest.strip('" ')
            elif macro in ("PP", "P", "LP", "TP", "IP", "Pp", "sp", "It"):
                line = "\n" + re.sub(r'"', "", rest if macro in ("IP", "It") else "")
            elif macro in ("BR", "IR", "RB", "RI", "BI", "IB"):
                line = re.sub(r'["\s]', "", rest) if '"' not in rest else rest.replace('"', "")
            elif macro in ("B", "I", "SM", "SB", "Nm", "Nd", "Fl", "Ar", "Op", "Xr", "Pa", "Ic"):
                line = ("-" if macro == "Fl" else "") + rest.replace('"', "")
            else:
                continue
        lines.append(_ESCAPE.sub(lambda m: _ESCAPES.get(m.group(1), ""), line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
