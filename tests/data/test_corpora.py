"""Corpora: every format, one order, no duplicates, splits by content, errors that help."""

import gzip
import json
import sys
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.builtin import manual_text, standard_library_reader, system_reader
from headrace.data.corpora import CorpusSpec, open_corpus, sample_texts
from headrace.data.documents import Document, Split, is_held_out, without_duplicates
from headrace.errors import UserError


def texts(spec: CorpusSpec | str | Path, split: Split = "all") -> list[str]:
    return [document.text for document in open_corpus(spec).documents(split)]


# ---------------------------------------------------------------------- formats


def test_folder(tmp_path: Path):
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "notes.txt").write_text("hidden")
    (tmp_path / "pkg" / "b.py").write_text("b = 1\r\n")
    (tmp_path / "pkg" / "sub" / "a.md").write_text("# a\n")
    (tmp_path / "z.txt").write_text("top")
    (tmp_path / "copy.txt").write_text("top")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "data.bin").write_text("not matched")
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "rows.jsonl").write_text('{"text": "row"}\n')
    documents = list(open_corpus(tmp_path).documents("all"))
    assert [(d.id, d.text, d.kind, d.group) for d in documents] == [
        ("copy.txt", "top", "prose", "."),
        ("pkg/b.py", "b = 1\n", "code", "pkg"),
        ("pkg/sub/a.md", "# a\n", "prose", "pkg"),
        ("rows.jsonl:1", "row", "prose", "."),
    ]
    assert texts(CorpusSpec(str(tmp_path), globs=("pkg/*.py", "**/*.md"))) == ["b = 1\n", "# a\n"]
    with pytest.raises(UserError, match=r"no file matches globs \*\.java; set globs"):
        open_corpus(CorpusSpec(str(tmp_path), globs=("*.java",)))


def test_jsonl_with_fields_and_gzip(tmp_path: Path):
    lines = '{"body": "one", "repo": "r"}\n\n{"body": "two", "repo": "s"}\n'
    plain, packed = tmp_path / "x.jsonl", tmp_path / "x.jsonl.gz"
    plain.write_text(lines)
    packed.write_bytes(gzip.compress(lines.encode()))
    for path in (plain, packed):
        spec = CorpusSpec(str(path), text_field="body", group_field="repo", kind="mail")
        documents = list(open_corpus(spec).documents("all"))
        assert [(d.id, d.text, d.kind, d.group) for d in documents] == [
            (f"{path.name}:1", "one", "mail", "r"),
            (f"{path.name}:3", "two", "mail", "s"),
        ]


def write_arrow(path: Path, table: pa.Table, *, stream: bool) -> None:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


TABLE = pa.table({"n": [1, 2, 3], "text": ["one", "two", "three"], "repo": ["r", "s", "r"]})


@pytest.mark.parametrize("format", ["parquet", "arrow stream", "arrow file"])
def test_tables(tmp_path: Path, format: str):
    path = tmp_path / ("x.parquet" if format == "parquet" else "x.arrow")
    if format == "parquet":
        pq.write_table(TABLE, path)
    else:
        write_arrow(path, TABLE, stream=format == "arrow stream")
    documents = list(open_corpus(CorpusSpec(str(path), group_field="repo")).documents("all"))
    assert [(d.id, d.text, d.group) for d in documents] == [
        (f"{path.name}:1", "one", "r"),
        (f"{path.name}:2", "two", "s"),
        (f"{path.name}:3", "three", "r"),
    ]
    with pytest.raises(UserError, match="no column 'body'; it has n, text, repo"):
        texts(CorpusSpec(str(path), text_field="body"))
    with pytest.raises(UserError, match="row 1: n is int, not text"):
        texts(CorpusSpec(str(path), text_field="n"))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="cannot be read"):
        texts(path)


def test_saved_dataset(tmp_path: Path):
    train = tmp_path / "train"
    train.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write_arrow(train / names[0], TABLE.slice(0, 2), stream=True)
    write_arrow(train / names[1], TABLE.slice(2), stream=True)
    (train / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    assert texts(train) == ["one", "two", "three"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert texts(tmp_path) == ["one", "two", "three"]
    train.rename(tmp_path / "test")
    with pytest.raises(UserError, match=r"no split 'train'; give the folder of one split: test"):
        open_corpus(tmp_path)
    (tmp_path / "test" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="is no dataset state"):
        open_corpus(tmp_path / "test")


def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pq.write_table(TABLE, tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs pyarrow; pip install 'headrace\[data\]'"):
        texts(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: not a JSON object"),
        ('{"txt": "a"}', "line 2: text is NoneType, not text; set text_field to one of txt"),
        ('{"text": 3}', "line 2: text is int, not text"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(UserError, match=message):
        texts(path)


def test_bad_specs(tmp_path: Path):
    with pytest.raises(UserError, match="no such file or folder"):
        open_corpus(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"held_out = 1\.0: must be"):
        CorpusSpec("builtin", held_out=1.0)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match="split 'test': use one of train, held_out, all"):
        texts(tmp_path, "test")  # type: ignore[arg-type]  # what a recipe may say
    (tmp_path / "b.txt.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match="cannot be read"):
        texts(tmp_path / "b.txt.gz")


# ---------------------------------------------------------------------- splits and identity


@settings(deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=5)), st.text(max_size=5), st.floats(0, 0.99))
def test_splits_partition_and_do_not_move(contents: list[str], added: str, fraction: float):
    documents = [Document(str(i), text, "prose", ".") for i, text in enumerate(contents)]
    kept = list(without_duplicates(documents))
    assert [d.text for d in kept] == list(dict.fromkeys(t for t in contents if t.strip()))
    sides = {d.text: is_held_out(d, fraction) for d in kept}
    more = [Document("new", added, "prose", "."), *documents]
    for document in without_duplicates(more):
        expected = sides.get(document.text, is_held_out(document, fraction))
        assert is_held_out(document, fraction) == expected


def test_held_out_share_is_about_right():
    documents = [Document(str(i), f"text {i}", "prose", ".") for i in range(4000)]
    assert sum(is_held_out(d, 0.1) for d in documents) == pytest.approx(400, abs=60)
    assert not any(is_held_out(d, 0.0) for d in documents)


def test_fingerprint_follows_content_and_spec_not_place(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("text")
    first = open_corpus(tmp_path / "a").fingerprint
    assert open_corpus(tmp_path / "b").fingerprint == first
    assert open_corpus(CorpusSpec(str(tmp_path / "a"), held_out=0.5)).fingerprint != first
    (tmp_path / "b" / "x.txt").write_text("Text")
    assert open_corpus(tmp_path / "b").fingerprint != first
    (tmp_path / "b" / "x.txt").rename(tmp_path / "b" / "y.txt")
    (tmp_path / "b" / "y.txt").write_text("text")
    assert open_corpus(tmp_path / "b").fingerprint != first


# ---------------------------------------------------------------------- built-in text


def test_standard_library_documents(tmp_path: Path):
    (tmp_path / "json" / "tests").mkdir(parents=True)
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "json" / "decoder.py").write_text(
        '"""Reads JSON."""\nclass D:\n    """A decoder."""\n'
        '    def run(self, text, *, strict=True):\n        """Go."""\n'
    )
    (tmp_path / "json" / "tests" / "test_x.py").write_text('"""A test."""\n')
    (tmp_path / "bare.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def (\n")
    (tmp_path / "_sysconfigdata_x.py").write_text("build = {}\n")
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'assert': 'The statement.'}\n")
    documents = list(standard_library_reader(tmp_path).read())
    assert [(d.id, d.kind, d.group) for d in documents] == [
        ("bare.py", "code", "lib"),
        ("json/decoder.py", "code", "json"),
        ("json/decoder.py#docstrings", "prose", "json"),
        ("topics/assert", "prose", "reference"),
    ]
    assert documents[2].text == (
        "json.decoder\n\nReads JSON.\n\nD\n\nA decoder.\n\n"
        "D.run(self, text, *, strict=True)\n\nGo.\n"
    )
    # A file and its docstrings are never on different sides.
    for percent in range(100):
        assert is_held_out(documents[1], percent / 100) == is_held_out(documents[2], percent / 100)


def test_builtin_corpus_is_real_and_fixed():
    corpus = open_corpus("builtin")
    documents = list(corpus.documents("all"))
    again = open_corpus("builtin")
    assert list(islice(again.documents("all"), 40)) == documents[:40]
    assert again.fingerprint == corpus.fingerprint
    assert sum(len(d.text) for d in documents if d.kind == "code") > 4_000_000
    assert sum(len(d.text) for d in documents if d.kind == "prose") > 1_000_000
    assert {"asyncio", "json", "lib", "reference"} <= {d.group for d in documents}
    assert not any("/test" in d.id for d in documents)
    held_out = sum(len(d.text) for d in documents if is_held_out(d, corpus.spec.held_out))
    assert held_out > 50_000


def test_tokenizer_sample_is_bounded_fixed_and_leaves_evaluation_out(tmp_path: Path):
    for i in range(200):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * 50)
    corpus = open_corpus(CorpusSpec(str(tmp_path), held_out=0.2))
    sample = sample_texts(corpus, max_bytes=20_000, document_bytes=400)
    assert 19_000 < sum(map(len, sample)) <= 20_000
    assert sample == sample_texts(corpus, max_bytes=20_000, document_bytes=400)
    held = [d.text[:400] for d in corpus.documents("held_out")]
    assert held
    assert not set(held) & set(sample)
    everything = sample_texts(corpus)
    assert len(everything) == len(list(corpus.documents("train")))


def test_system_documentation(tmp_path: Path):
    doc, man = tmp_path / "doc", tmp_path / "man"
    for folder in (doc / "tool", man / "man1", man / "de" / "man1"):
        folder.mkdir(parents=True)
    (doc / "tool" / "README.gz").write_bytes(gzip.compress(b"Read me"))
    (doc / "tool" / "copyright").write_text("legal")
    (doc / "tool" / "changelog.txt").write_text("old")
    page = '.TH LS 1\n.SH NAME\nls \\- list\n.\\" note\n.TP\n\\fB\\-a\\fR\ndo \\(aqall\\(aq\n'
    (man / "man1" / "ls.1.gz").write_bytes(gzip.compress(page.encode()))
    (man / "de" / "man1" / "ls.1").write_text(page)
    documents = list(system_reader([doc, man]).read())
    assert [(d.id, d.text, d.group) for d in documents] == [
        ("doc/tool/README.gz", "Read me", "tool"),
        ("man/man1/ls.1.gz", "NAME\nls - list\n\n-a\ndo 'all'\n", "man"),
    ]
    with pytest.raises(UserError, match="corpus source 'system': no documentation"):
        system_reader([tmp_path / "none"])


def test_manual_macros():
    assert manual_text(".B bold text\n.BR grep (1)\n.IP \\(bu 2\nitem\n.Fl v\n.nf\n") == (
        "bold text\ngrep(1)\n\n* 2\nitem\n-v\n"
    )
