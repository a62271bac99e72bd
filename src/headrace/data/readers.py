"""Files to documents: plain text, JSONL, Parquet and Arrow, each possibly one shard of many.

A reader knows its files, so that a corpus can be identified by their bytes without parsing them,
and yields their documents in a fixed order. Parquet and Arrow need pyarrow, imported when used.
"""

import gzip
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from headrace.data.documents import Document
from headrace.errors import UserError

_log = logging.getLogger(__name__)

CODE_SUFFIXES = frozenset(
    {
        *(".c", ".cc", ".cpp", ".cs", ".cu", ".go", ".h", ".hpp", ".java", ".jl", ".js", ".jsx"),
        *(".kt", ".lua", ".php", ".pl", ".py", ".pyi", ".r", ".rb", ".rs", ".scala", ".sh"),
        *(".sql", ".swift", ".ts", ".tsx"),
    }
)
_ROWS_PER_BATCH = 256


@dataclass(frozen=True)
class Reader:
    """What a corpus reads.

    Attributes:
        files: (name, path) of every file read, in reading order; names do not depend on where the
            corpus lies.
        read: yields the documents, from the start at every call.
    """

    files: list[tuple[str, Path]]
    read: Callable[[], Iterator[Document]]


@dataclass(frozen=True)
class Fields:
    """Which columns of structured files hold what.

    Attributes:
        text: column or key of the text.
        group: of the document's group; None: the file's group.
        kind: kind of every document; None: by file suffix.
    """

    text: str = "text"
    group: str | None = None
    kind: str | None = None


def folder_reader(root: Path, globs: Sequence[str], fields: Fields) -> Reader:
    """All files below `root` that match one of `globs`, by path.

    A glob without a slash matches file names at any depth, one with a slash the relative path.
    Hidden files and directories are left out, links to directories not followed. The group of a
    file is the first directory on its way, "." for files directly in `root`.

    Raises:
        UserError: nothing matches.
    """
    files: list[tuple[str, Path]] = []
    for directory, names, entries in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".")]
        for entry in entries:
            path = Path(directory, entry)
            relative = path.relative_to(root).as_posix()
            if not entry.startswith(".") and _matches(relative, globs) and path.is_file():
                files.append((relative, path))
    files.sort()
    if not files:
        raise UserError(
            f"corpus source {str(root)!r}: no file matches globs {', '.join(globs)}; set globs"
        )

    def read() -> Iterator[Document]:
        for name, path in files:
            yield from read_file(name, path, fields, name.split("/")[0] if "/" in name else ".")

    return Reader(files, read)


def _matches(relative: str, globs: Sequence[str]) -> bool:
    name = relative.rsplit("/", 1)[-1]
    for glob in globs:
        pattern = glob.removeprefix("**/")
        if fnmatchcase(relative if "/" in pattern else name, pattern):
            return True
    return False


def saved_dataset_reader(root: Path, fields: Fields) -> Reader:
    """A dataset that Hugging Face `datasets` saved to disk; of several splits, "train".

    Raises:
        UserError: broken state.json, or several splits and none called "train".
    """
    if (root / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in root.glob("*/state.json"))
        if "train" not in splits:
            raise UserError(
                f"corpus source {str(root)!r}: has no split 'train'; "
                f"give the folder of one split: {', '.join(splits) or 'none found'}"
            )
        root = root / "train"
    state = root / "state.json"
    try:
        names = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"corpus source {str(state)!r}: is no dataset state ({error!r}); save the dataset again"
        ) from error
    files = [(name, root / name) for name in names]

    def read() -> Iterator[Document]:
        for name, path in files:
            yield from read_file(name, path, fields, ".")

    return Reader(files, read)


def file_reader(path: Path, fields: Fields) -> Reader:
    """One file."""
    return Reader([(path.name, path)], lambda: read_file(path.name, path, fields, "."))


def read_file(name: str, path: Path, fields: Fields, group: str) -> Iterator[Document]:
    """Documents of one file, by its suffix: .jsonl[.gz], .parquet, .arrow, else text[.gz].

    A text file is one document; one that is binary or not UTF-8 is left out with a warning.

    Raises:
        UserError: unreadable file, or a record without its text field.
    """
    base = name.removesuffix(".gz")
    try:
        if base.endswith((".jsonl", ".ndjson")):
            yield from _read_jsonl(name, path, fields, group)
        elif name.endswith((".parquet", ".arrow")):
            yield from _read_table(name, path, fields, group)
        else:
            text = read_text(path)
            if text is None:
                _log.warning("corpus: %s is not UTF-8 text, left out", path)
                return
            kind = fields.kind or ("code" if Path(base).suffix in CODE_SUFFIXES else "prose")
            yield Document(name, text, kind, group)
    except OSError as error:
        raise UserError(
            f"corpus file {str(path)!r}: cannot be read ({error}); mend or remove it"
        ) from error


def read_text(path: Path) -> str | None:
    """Text of a file, unpacked if its name ends with .gz; None when it is not UTF-8 text.

    Raises:
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except EOFError as error:
            raise OSError(f"truncated gzip: {error}") from error
    if b"\0" in data:
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_jsonl(name: str, path: Path, fields: Fields, group: str) -> Iterator[Document]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{str(path)!r} line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"corpus file {place}: not JSON ({error}); mend it") from error
            if not isinstance(record, dict):
                raise UserError(f"corpus file {place}: not a JSON object; write one per line")
            yield _record(f"{name}:{number}", record, fields, group, place)


def _read_table(name: str, path: Path, fields: Fields, group: str) -> Iterator[Document]:
    pyarrow = _import_pyarrow(path)
    columns = [fields.text] if fields.group is None else [fields.text, fields.group]
    number = 0
    try:
        for batch in _table_batches(pyarrow, path, columns):
            for record in batch.to_pylist():
                number += 1
                place = f"{str(path)!r} row {number}"
                yield _record(f"{name}:{number}", record, fields, group, place)
    except pyarrow.ArrowException as error:
        raise UserError(
            f"corpus file {str(path)!r}: cannot be read ({str(error).splitlines()[0]}); "
            "write it again"
        ) from error


def _table_batches(pyarrow: Any, path: Path, columns: list[str]) -> Iterator[Any]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as table:
            _check_columns(path, columns, table.schema_arrow.names)
            yield from table.iter_batches(_ROWS_PER_BATCH, columns=columns)
        return
    with pyarrow.memory_map(str(path)) as source:
        # `datasets` writes the streaming format; other tools the one that begins with its magic.
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = reader = pyarrow.ipc.open_stream(source)
        _check_columns(path, columns, reader.schema.names)
        for batch in batches:
            yield batch.select(columns)


def _check_columns(path: Path, columns: list[str], present: list[str]) -> None:
    for column in columns:
        if column not in present:
            raise UserError(
                f"corpus file {str(path)!r}: no column {column!r}; it has {', '.join(present)}"
            )


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise UserError(
            f"corpus file {str(path)!r}: {path.suffix} needs pyarrow; pip install 'headrace[data]'"
        ) from error
    return pyarrow


def _record(name: str, record: dict[str, Any], fields: Fields, group: str, place: str) -> Document:
    text = record.get(fields.text)
    if not isinstance(text, str):
        raise UserError(
            f"corpus file {place}: {fields.text} is {type(text).__name__}, not text; "
            f"set text_field to one of {', '.join(record) or '(no fields)'}"
        )
    if fields.group is not None:
        group = str(record.get(fields.group, group))
    return Document(name, text, fields.kind or "prose", group)
