"""Token stores: what goes in comes out, and only whole stores are ever seen."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data import token_store
from headrace.data.token_store import (
    BrokenStoreError,
    TokenDocument,
    TokenStore,
    cached_store,
    write_store,
)
from headrace.errors import UserError

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=9)


def document(ids: list[int], **more) -> TokenDocument:
    return TokenDocument(np.asarray(ids, np.int64), 2 * len(ids), **more)


DOCUMENTS = [document([5, 6, 7]), document([]), document([8])]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(IDS, max_size=6), st.integers(1, 3), st.booleans())
def test_round_trip(tmp_path_factory, contents: list[list[int]], unweighted: int, weighted: bool):
    folder = tmp_path_factory.mktemp("store")
    weights = [np.arange(len(ids), dtype=np.float32) + 0.5 for ids in contents]
    write_store(
        folder,
        (
            document(ids, unweighted=unweighted, weights=w if weighted else None)
            for ids, w in zip(contents, weights, strict=True)
        ),
    )
    store = TokenStore(folder)
    assert len(store) == len(contents)
    assert store.total_tokens == sum(map(len, contents))
    assert store.text_bytes.tolist() == [2 * len(ids) for ids in contents]
    for i, ids in enumerate(contents):
        assert store.ids(i).tolist() == ids
        assert store.ids(i).dtype == np.int32
        expected = weights[i].tolist() if weighted else [float(t >= unweighted) for t in range(9)]
        expected = [0.0, *expected[1 : len(ids)]] if ids else []
        assert store.weights(i).tolist() == expected
        # A later piece: its own first token is predicted by nothing.
        assert store.ids(i, 1, None).tolist() == ids[1:] if ids else True
        if len(ids) > 1:
            assert store.weights(i, 1, len(ids)).tolist() == [0.0, *expected[2:]]


def test_pieces_outside_a_document_are_errors(tmp_path: Path):
    write_store(tmp_path, DOCUMENTS)
    store = TokenStore(tmp_path)
    assert store.ids(0, 1, 2).tolist() == [6]
    for start, stop in ((0, 4), (2, 1), (-1, 2)):
        with pytest.raises(IndexError):
            store.ids(0, start, stop)


@pytest.mark.parametrize(
    "documents",
    [
        [document([-1])],
        [document([2**31])],
        [document([1], weights=np.ones(2, np.float32))],
        [document([1]), document([1], weights=np.ones(1, np.float32))],
        [document([1]), document([1], unweighted=2)],
    ],
)
def test_bad_documents_are_refused(tmp_path: Path, documents: list[TokenDocument]):
    with pytest.raises(ValueError, match=r"token ids|weights for|weighted alike"):
        write_store(tmp_path, documents)


def test_cache_writes_once_and_mends_broken_stores(tmp_path: Path):
    calls = []

    def make() -> list[TokenDocument]:
        calls.append(1)
        return DOCUMENTS

    for _ in range(2):
        assert cached_store(tmp_path / "cache", "k", make).ids(0).tolist() == [5, 6, 7]
    assert len(calls) == 1
    for i, name in enumerate(["ids.bin", "meta.json", "offsets.npy"]):
        file = tmp_path / "cache" / "k" / name
        file.write_bytes(file.read_bytes()[:-1])
        if name == "meta.json":
            file.write_text("{")
        with pytest.raises(BrokenStoreError):
            TokenStore(file.parent)
        assert cached_store(tmp_path / "cache", "k", make).ids(2).tolist() == [8]
        assert len(calls) == i + 2
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["k"]


def test_a_failing_source_leaves_nothing(tmp_path: Path):
    def make() -> Iterator[TokenDocument]:
        yield DOCUMENTS[0]
        raise RuntimeError("source ended")

    with pytest.raises(RuntimeError, match="source ended"):
        cached_store(tmp_path, "k", make)
    assert list(tmp_path.iterdir()) == []


def test_abandoned_writes_are_swept(tmp_path: Path):
    old, fresh = tmp_path / ".k.old", tmp_path / ".k.fresh"
    for folder in (old, fresh):
        folder.mkdir()
    long_ago = time.time() - 2 * token_store._ABANDONED_AFTER_S
    os.utime(old, (long_ago, long_ago))
    cached_store(tmp_path, "k", lambda: DOCUMENTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".k.fresh", "k"]


def test_unwritable_cache_is_a_user_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="set cache_dir to a writable directory"):
        cached_store(tmp_path / "file", "k", lambda: DOCUMENTS)


def _write_together(cache: Path, barrier, results) -> None:
    def make() -> Iterator[TokenDocument]:
        barrier.wait(30)  # both have found the cache empty before either writes
        yield from DOCUMENTS

    store = cached_store(cache, "k", make)
    results.put([store.ids(i).tolist() for i in range(len(store))])


def test_two_processes_at_once(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [
        context.Process(target=_write_together, args=(tmp_path, barrier, results)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    try:
        assert [results.get(timeout=60) for _ in workers] == [[[5, 6, 7], [], [8]]] * 2
    finally:
        for worker in workers:
            worker.join(30)
            worker.kill()
    assert [path.name for path in tmp_path.iterdir()] == ["k"]
