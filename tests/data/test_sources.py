"""Sources: each shape's documents as tokens, made once, found again by content."""

from pathlib import Path

import pytest

from headrace.data import sources
from headrace.data.corpora import CorpusSpec, open_corpus, sample_texts
from headrace.data.retrieval import RetrievalSpec
from headrace.data.sources import Framing, SourceSpec, default_cache, open_source, store_key
from headrace.errors import UserError
from headrace.tokens.training import train_tokenizer

MODULE = "def run_{i}(x):\n    return x + {i}\n\n\ndef stop_{i}(x):\n    return x - {i}\n"


@pytest.fixture
def corpus(tmp_path: Path) -> CorpusSpec:
    folder = tmp_path / "corpus"
    for package in ("left", "right"):
        (folder / package).mkdir(parents=True)
        for i in range(4):
            (folder / package / f"m{i}.py").write_text(f"# {package}\n" + MODULE.format(i=i))
        (folder / package / "notes.md").write_text(f"notes of {package} <|user|>\n")
    return CorpusSpec(str(folder), held_out=0.0)


TOKENIZER = train_tokenizer([MODULE.format(i=3)] * 9, 340, "glm-5")
BEGIN, END = "[gMASK]<sop>", "<|endoftext|>"


def texts(store) -> list[str]:
    return [TOKENIZER.decode(store.ids(i).tolist()) for i in range(len(store))]


def test_documents_are_framed_plain_text(corpus: CorpusSpec, tmp_path: Path):
    store = open_source(SourceSpec(corpus), TOKENIZER, cache_dir=tmp_path)
    expected = list(open_corpus(corpus).documents("train"))
    assert texts(store) == [f"{BEGIN}{d.text}{END}" for d in expected]
    assert store.text_bytes.tolist() == [len(d.text) for d in expected]
    weights = store.weights(0)
    assert weights[:2].tolist() == [0, 0]  # nothing to learn from [gMASK] and <sop>
    assert weights[2:].tolist() == [1] * (len(weights) - 2)
    # Special tokens written in a text stay text.
    user = TOKENIZER.special_ids["<|user|>"]
    assert not any(user in store.ids(i) for i in range(len(store)))


def test_framing_and_its_errors(corpus: CorpusSpec, tmp_path: Path):
    bare = open_source(SourceSpec(corpus), TOKENIZER, Framing((), ()), cache_dir=tmp_path)
    assert bare.ids(0).tolist() == TOKENIZER.encode_text(
        next(open_corpus(corpus).documents("train")).text
    )
    assert bare.weights(0)[:2].tolist() == [0, 1]
    with pytest.raises(UserError, match=r"framing begin '<s>': .*set framing\.begin to tokens"):
        open_source(SourceSpec(corpus), TOKENIZER, Framing(("<s>",)), cache_dir=tmp_path)


def test_kinds_and_min_tokens_select(corpus: CorpusSpec, tmp_path: Path):
    prose = open_source(SourceSpec(corpus, kinds=("prose",)), TOKENIZER, cache_dir=tmp_path)
    assert [("notes of" in text) for text in texts(prose)] == [True, True]
    everything = open_source(SourceSpec(corpus), TOKENIZER, cache_dir=tmp_path)
    least = int(everything.lengths.min()) + 1
    long = open_source(SourceSpec(corpus, min_tokens=least), TOKENIZER, cache_dir=tmp_path)
    assert 0 < len(long) < len(everything)
    assert sorted(long.lengths) == sorted(n for n in everything.lengths if n >= least)
    with pytest.raises(UserError, match="no documents; lower min_tokens"):
        open_source(SourceSpec(corpus, min_tokens=10_000), TOKENIZER, cache_dir=tmp_path)


def test_related_files_fill_the_length(corpus: CorpusSpec, tmp_path: Path):
    spec = SourceSpec(corpus, shape="related", tokens=160)
    store = open_source(spec, TOKENIZER, cache_dir=tmp_path)
    joined = texts(store)
    assert all(length <= 160 for length in store.lengths)
    assert any(text.count("===") > 2 for text in joined)
    everything = "".join(text.removeprefix(BEGIN).removesuffix(END) for text in joined)
    for document in open_corpus(corpus).documents("train"):
        assert everything.count(f"=== {document.id} ===\n{document.text}") == 1
    assert not any("=== left" in text and "=== right" in text for text in joined)


def test_commits_end_with_their_diff(corpus: CorpusSpec, tmp_path: Path):
    spec = SourceSpec(corpus, shape="commits", tokens=512, count=12, diff_weight=2.0)
    store = open_source(spec, TOKENIZER, cache_dir=tmp_path)
    assert len(store) == 12
    for i, text in enumerate(texts(store)):
        context, change = text.split("=== commit ===\n")
        assert context.startswith(f"{BEGIN}=== ")
        assert context.count("=== left") in (0, context.count(" ===\n"))
        assert "\n--- a/" in change
        assert store.lengths[i] <= 512
        weights = store.weights(i)
        heavy = TOKENIZER.decode(store.ids(i)[weights == 2.0].tolist())
        assert heavy == f"=== commit ===\n{change.removesuffix(END)}"
        assert weights[:2].tolist() == [0, 0]


def test_retrieval_needs_no_corpus(tmp_path: Path):
    spec = SourceSpec(
        "nowhere",
        shape="retrieval",
        count=5,
        retrieval=RetrievalSpec((200, 400), (2, 3), answer_weight=4.0, context_weight=0.25),
    )
    store = open_source(spec, TOKENIZER, cache_dir=tmp_path)
    assert len(store) == 5
    for i, text in enumerate(texts(store)):
        heavy = TOKENIZER.decode(store.ids(i)[store.weights(i) == 4.0].tolist())
        assert text.endswith(f"? {heavy}\n{END}")
        assert store.weights(i)[[0, 1, 2, -1]].tolist() == [0, 0, 0.25, 1]


def test_tokenised_once_for_equal_content(
    corpus: CorpusSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = tmp_path / "cache"
    first = open_source(SourceSpec(corpus), TOKENIZER, cache_dir=cache)
    with monkeypatch.context() as patch:
        patch.setattr(sources._Maker, "documents", lambda self: pytest.fail("tokenised again"))
        # The weight in a mixture changes no token.
        again = open_source(SourceSpec(corpus, weight=3.0), TOKENIZER, cache_dir=cache)
    assert texts(again) == texts(first)
    Path(corpus.source, "left", "m0.py").write_text("x = 1\n")
    assert "x = 1" in "".join(texts(open_source(SourceSpec(corpus), TOKENIZER, cache_dir=cache)))


def test_keys_tell_all_that_matters_apart(corpus: CorpusSpec):
    base = SourceSpec(corpus, shape="commits")
    other = train_tokenizer(["other words"] * 9, 340)
    variants = [
        (base, TOKENIZER, Framing()),
        (SourceSpec(corpus), TOKENIZER, Framing()),
        (SourceSpec(corpus, split="held_out"), TOKENIZER, Framing()),
        (SourceSpec(corpus, shape="commits", seed=1), TOKENIZER, Framing()),
        (SourceSpec(corpus, shape="commits", tokens=99), TOKENIZER, Framing()),
        (SourceSpec(corpus, shape="commits", diff_weight=2.0), TOKENIZER, Framing()),
        (base, other, Framing()),
        (base, TOKENIZER, Framing(end=())),
    ]
    assert len({store_key(*variant) for variant in variants}) == len(variants)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "books"}, "shape = 'books': use one of documents, related"),
        ({"split": "all"}, "split = 'all'"),
        ({"weight": 0}, "weight = 0: must be above 0"),
        ({"tokens": 8}, "tokens = 8: must be at least 64"),
        ({"count": 0}, "count = 0: must be at least 1"),
        ({"diff_weight": -1}, "diff_weight = -1: must not be negative"),
    ],
)
def test_bad_specs(arguments: dict, message: str):
    with pytest.raises(UserError, match=message):
        SourceSpec(**arguments)


def test_default_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert default_cache() == Path("/some/where/headrace/tokens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "headrace" / "tokens"


def test_a_tokenizer_for_the_builtin_corpus():
    corpus = open_corpus("builtin")
    tokenizer = train_tokenizer(sample_texts(corpus, 1 << 19), 4096, "glm-5")
    assert tokenizer.vocab_size == 4096
    text = "def read(self, size=-1):\n        return self.buffer.read(size)\n"
    assert len(text) / len(tokenizer.encode_text(text)) > 2.5
