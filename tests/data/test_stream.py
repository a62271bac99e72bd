"""Streams: every token once an epoch, the same batches for all, and a place that can be found."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data import stream as stream_module
from headrace.data.corpora import CorpusSpec
from headrace.data.retrieval import RetrievalSpec
from headrace.data.sources import Framing, SourceSpec
from headrace.data.stream import Row, StreamSpec, TokenStream
from headrace.errors import UserError
from headrace.tokens.training import SMALLEST_VOCABULARY, train_tokenizer

TOKENIZER = train_tokenizer([], SMALLEST_VOCABULARY)
SIZES = [(7 * i * i) % 50 + 1 for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    # Every token tells where it is from: digits spell the document's number.
    lines = [json.dumps({"text": f"{i:03d}" * size}) for i, size in enumerate(SIZES)]
    (path / "a.jsonl").write_text("\n".join(lines))
    (path / "b.jsonl").write_text('{"text": "bbb bbb"}\n{"text": "bb"}\n')
    return path


def make(folder: Path, *, rows: int = 6, seed: int = 3, weight: float = 1.0, **more) -> TokenStream:
    spec = StreamSpec(
        (
            SourceSpec(CorpusSpec(str(folder / "a.jsonl"), held_out=0.0), weight=3.0),
            SourceSpec(CorpusSpec(str(folder / "b.jsonl"), held_out=0.0), weight=weight),
        )
    )
    return TokenStream(spec, TOKENIZER, 40, rows, seed, cache_dir=folder / "cache", **more)


def plain(batch: list[Row]) -> list:
    return [[(ids.tolist(), weights.tolist()) for ids, weights in row] for row in batch]


@pytest.mark.parametrize("window_rows", [1, 5, 64])
def test_an_epoch_is_every_token_once(folder: Path, window_rows: int, monkeypatch):
    monkeypatch.setattr(stream_module, "WINDOW_ROWS", window_rows)
    spec = StreamSpec((SourceSpec(CorpusSpec(str(folder / "a.jsonl"), held_out=0.0)),))
    stream = TokenStream(spec, TOKENIZER, 40, 1, 0, cache_dir=folder / "cache")
    total = stream.stores[0].total_tokens
    orders = []
    for epoch in (1, 2):
        seen: list[int] = []
        order: list[int] = []
        while stream.tokens[0] < epoch * total:
            (row,) = stream.next_batch()
            assert 0 < sum(len(ids) for ids, _ in row) <= 40
            for ids, weights in row:
                assert ids.dtype == np.int32 and weights.dtype == np.float32  # noqa: PT018
                assert weights[0] == 0
                assert len(weights) == len(ids)
                seen += ids.tolist()
                order.append(len(ids))
        store = stream.stores[0]
        everything = [t for i in range(len(store)) for t in store.ids(i).tolist()]
        assert stream.tokens[0] == epoch * total  # epochs end with a row
        assert sorted(seen) == sorted(everything)
        orders.append(order)
    assert orders[0] != orders[1]
    assert stream.epochs == [2.0]


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    before=st.integers(0, 40),
    after=st.integers(1, 12),
    old=st.integers(1, 6),
    new=st.integers(1, 6),
)
def test_restoring_goes_on_bit_for_bit_with_any_number_of_ranks(folder, before, after, old, new):
    whole = make(folder)
    first = make(folder, rank=old - 1, world=old)
    for _ in range(before):
        whole.next_batch()
        first.next_batch()
    state = json.loads(json.dumps(first.state()))
    assert state == whole.state()
    ranks = [make(folder, rank=r, world=new) for r in range(new)]
    for rank in ranks:
        rank.restore(state)
    for _ in range(after):
        expected = plain(whole.next_batch())
        assert [row for rank in ranks for row in plain(rank.next_batch())] == expected
        assert all(rank.state() == whole.state() for rank in ranks)


def test_state_does_not_grow(folder: Path):
    stream = make(folder)
    sizes = []
    for _ in range(100):
        stream.next_batch()
        sizes.append(len(json.dumps(stream.state())))
    assert max(sizes) < 400
    assert max(sizes) - min(sizes) < 20  # digits of the counters


def test_ranks_differ_by_one_row_at_most(folder: Path):
    shares = [len(make(folder, rank=r, world=4).next_batch()) for r in range(4)]
    assert sorted(shares) == [1, 1, 2, 2]


def test_seeds_decide_the_order(folder: Path):
    def start(seed: int) -> list:
        return plain(make(folder, seed=seed).next_batch())

    assert start(1) == start(1)
    assert start(1) != start(2)
    assert start(-1) != start(1)


def test_shares_of_tokens_follow_weights(folder: Path):
    stream = make(folder, rows=50)
    for _ in range(6):
        stream.next_batch()
        a, b = stream.tokens
        assert a / 3 == pytest.approx(b, abs=40)  # never further apart than a row
    assert stream.epochs[1] > 1  # the small source comes round more often


def test_long_documents_are_cut_or_kept(folder: Path):
    source = SourceSpec(CorpusSpec(str(folder / "a.jsonl"), held_out=0.0))
    for overlong, longest in (("cut", 40), ("keep", 3 * max(SIZES) + 3)):
        spec = StreamSpec((source,), overlong=overlong)  # type: ignore[arg-type]  # literals
        stream = TokenStream(spec, TOKENIZER, 40, 8, 0, cache_dir=folder / "cache")
        lengths = [len(ids) for _ in range(10) for row in stream.next_batch() for ids, _ in row]
        assert max(lengths) == longest


def test_loss_weights_reach_the_rows(folder: Path):
    retrieval = RetrievalSpec((300, 400), (1, 2), answer_weight=5.0, context_weight=0.0)
    spec = StreamSpec((SourceSpec(shape="retrieval", count=3, retrieval=retrieval),), Framing())
    stream = TokenStream(spec, TOKENIZER, 512, 1, 0, cache_dir=folder / "cache")
    ((ids, weights),) = stream.next_batch()[0]
    answer = TOKENIZER.decode(ids[weights == 5.0].tolist())
    assert TOKENIZER.decode(ids.tolist()).endswith(f"? {answer}\n<|endoftext|>")


def test_states_of_other_streams_are_refused(folder: Path):
    state = make(folder).state()
    for other in (make(folder, seed=4), make(folder, rows=7), make(folder, weight=2.0)):
        with pytest.raises(UserError, match="saved with other data, tokenizer, sizes or seed"):
            other.restore(state)


def split_mix(state: int) -> int:
    """SplitMix64 in plain integers: the output for one state of the counter."""
    mask = 2**64 - 1
    z = state & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def test_permutations_are_the_same_everywhere():
    golden = 0x9E3779B97F4A7C15
    for size, seed in ((0, 5), (1, 5), (257, 2**64 - 1), (10, 1)):
        keys = [split_mix(seed + (i + 1) * golden) for i in range(size)]
        expected = sorted(range(size), key=keys.__getitem__)
        assert stream_module._permutation(size, seed).tolist() == expected


def test_bad_arguments(folder: Path):
    with pytest.raises(UserError, match="sources is empty"):
        StreamSpec(())
    with pytest.raises(UserError, match="batch_rows = 6: must be at least the 7 ranks"):
        make(folder, world=7)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        make(folder, rank=2, world=2)
    with pytest.raises(UserError, match="row_tokens = 1"):
        TokenStream(StreamSpec(), TOKENIZER, 1, 1, 0)


def test_the_data_room_needs_no_torch():
    code = "import sys, headrace.data.stream\nassert not {'torch', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
