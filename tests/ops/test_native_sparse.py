"""The native sparse kernels, at every instruction level this machine has, against the reference."""

import threading

import pytest
import torch
from torch import Tensor

from headrace.ops import reference, sparse
from headrace.ops.layout import Layout
from headrace.ops.native import build

pytestmark = pytest.mark.skipif(
    build.unavailable_reason() is not None, reason=str(build.unavailable_reason())
)

LEVELS = (
    build.LEVELS[: build.LEVELS.index(build.level()) + 1]
    if build.unavailable_reason() is None
    else ()
)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=LEVELS)
def level(request):
    """Run the test at each level."""
    with build.use_level(request.param):
        yield request.param


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_selection(rows: int, keys: int, count: int, seed: int = 0) -> Tensor:
    """int32 [rows, count], ascending without repeats, padded with -1 by various amounts."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.full((rows, count), -1, dtype=torch.int32)
    for row in range(rows):
        n = int(torch.randint(0, min(keys, count) + 1, (1,), generator=generator))
        n = min(keys, count) if row == 0 else 0 if row == 1 else n
        out[row, :n] = torch.randperm(keys, generator=generator)[:n].sort().values.int()
    return out


def relative(got: Tensor, want: Tensor) -> float:
    """Largest error over the largest value wanted."""
    return float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30))


# --- selection


def exact_inputs(rows: int, keys: int, heads: int, width: int, dtype: torch.dtype, seed: int = 0):
    """Small integers: every product and sum is exact, so any right kernel picks the same, ties."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    return draw(rows, heads, width).to(dtype), draw(rows, heads), draw(keys, width).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "width", "lengths", "topk"),
    [
        (4, 32, (100,), 7),
        (1, 16, (33, 1, 64, 5), 16),
        (3, 18, (70, 45), 40),
        (64, 128, (50,), 20),
        (5, 34, (20,), 64),
    ],
)
def test_selection_equals_reference_with_many_ties(level, dtype, heads, width, lengths, topk):
    rows = sum(lengths)
    q, weights, k = exact_inputs(rows, rows, heads, width, dtype)
    layout = Layout.packed(lengths)
    want = reference.select_topk(q, weights, k, layout, topk)
    assert torch.equal(sparse.select_topk(q, weights, k, layout, topk), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_selection_of_long_rows(level, dtype):
    # Long enough for the sampled bar; a plateau of zeros crosses it in half of the rows.
    q, weights, k = exact_inputs(6, 5000, 2, 8, dtype)
    weights[::2] = -1.0
    layout = Layout((0,), (6,), (0,), (5000,))
    for topk in (64, 700, 3000):
        want = reference.select_topk(q, weights, k, layout, topk)
        assert torch.equal(sparse.select_topk(q, weights, k, layout, topk), want)
    # Random scores: what is picked beats what is not.
    q, weights, k = randn(6, 2, 8, dtype=dtype), randn(6, 2, seed=1), randn(5000, 8, seed=2)
    picked = sparse.select_topk(q, weights, k.to(dtype), layout, 512)
    want = reference.select_topk(q, weights, k.to(dtype), layout, 512)
    same = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(picked, want, strict=True))
    assert same >= 6 * 512 - 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_selection_does_not_depend_on_padding_chunks_or_batch(level, dtype):
    tokens, topk = 90, 11
    q, weights, k = randn(tokens, 4, 32), randn(tokens, 4, seed=1), randn(tokens, 32, seed=2)
    q, k = q.to(dtype), k.to(dtype)
    alone = sparse.select_topk(q, weights, k, Layout.causal(1, tokens), topk)
    # Left padding moves the sequence inside tiles and blocks.
    for shift in (1, 17, 32):
        layout = Layout((shift,), (tokens,), (shift + 3,), (tokens,))
        padded = sparse.select_topk(
            torch.cat([randn(shift, 4, 32, seed=3).to(dtype), q]),
            torch.cat([randn(shift, 4, seed=4), weights]),
            torch.cat([randn(shift + 3, 32, seed=5).to(dtype), k, k]),
            layout,
            topk,
        )
        assert (padded[:shift] == -1).all()
        got = padded[shift:]
        assert torch.equal(torch.where(got >= 0, got - shift - 3, got), alone)
    # Chunked prefill.
    for start in range(0, tokens, 13):
        end = min(start + 13, tokens)
        chunk = Layout((0,), (end - start,), (0,), (end,))
        got = sparse.select_topk(q[start:end], weights[start:end], k, chunk, topk)
        assert torch.equal(got, alone[start:end])
    # Beside other sequences.
    other = randn(50, 32, seed=6).to(dtype)
    got = sparse.select_topk(
        torch.cat([q[:50], q, q[:1]]),
        torch.cat([weights[:50], weights, weights[:1]]),
        torch.cat([other, k, other[:1]]),
        Layout.packed((50, tokens, 1)),
        topk,
    )[50 : 50 + tokens]
    assert torch.equal(torch.where(got >= 0, got - 50, got), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_rows_select_what_they_select_in_a_prompt(level, dtype):
    # Rows of a prompt share packed keys; decoding sequences pack their own, some tiles at a time.
    lengths, topk = (600, 3, 290), 30
    total = sum(lengths)
    q, weights = randn(total, 4, 36).to(dtype), randn(total, 4, seed=1)
    k = randn(total, 36, seed=2).to(dtype)
    whole = sparse.select_topk(q, weights, k, Layout.packed(lengths), topk)
    starts = (0, 600, 603)
    last = [start + n - 1 for start, n in zip(starts, lengths, strict=True)]
    layout = Layout((0, 1, 2), (1, 1, 1), starts, lengths)
    got = sparse.select_topk(q[last], weights[last], k, layout, topk)
    assert torch.equal(got, whole[last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_scores_rank_last_and_minus_zero_ties_with_zero(level, dtype):
    q = torch.ones(1, 1, 16, dtype=dtype)
    k = torch.zeros(40, 16, dtype=dtype)
    k[:, 0] = 1.0
    k[3, 0] = float("nan")
    k[20:, 0] = 2.0
    layout = Layout((0,), (1,), (0,), (40,))
    picked = sparse.select_topk(q, torch.ones(1, 1), k, layout, 24)
    assert picked[0].tolist() == [0, 1, 2, 4, *range(20, 40)]
    last = sparse.select_topk(q, torch.ones(1, 1), k, layout, 39)
    assert last[0].tolist() == [0, 1, 2, *range(4, 40)]
    # relu gives 0, times -1 is -0: equal to the 0 of other keys, so the lowest indices win.
    k = -torch.ones(40, 16, dtype=dtype)
    k[::2] = 0.0
    picked = sparse.select_topk(q, -torch.ones(1, 1), k, layout, 5)
    assert picked[0].tolist() == [0, 1, 2, 3, 4]


def test_float32_scores_are_not_rounded(level):
    # Two keys that are equal in bfloat16; the second one is larger.
    q, k = torch.ones(1, 1, 16), torch.ones(40, 16)
    k[30, 0] += 1e-5
    layout = Layout((0,), (1,), (0,), (40,))
    assert sparse.select_topk(q, torch.ones(1, 1), k, layout, 1).tolist() == [[30]]


def test_queries_without_sequence_select_nothing(level):
    q, weights, k = randn(10, 4, 32), randn(10, 4), randn(30, 32)
    layout = Layout((2, 6), (3, 0), (5, 0), (20, 4))
    picked = sparse.select_topk(q, weights, k, layout, 4)
    empty = [row for row in range(10) if (picked[row] == -1).all()]
    assert empty == [0, 1, 5, 6, 7, 8, 9]
    assert picked[2:5].min() >= 5
    assert picked[2:5].max() < 25


# --- attention over a selection


SHAPES = [
    # heads, width, value, keys, selected
    (16, 160, 128, 700, 300),
    (4, 48, 32, 40, 16),
    (1, 7, 5, 30, 9),
    (20, 90, 33, 100, 65),
    (33, 576, 512, 80, 40),
]


def attention_inputs(shape, dtype: torch.dtype):
    heads, width, value, keys, selected = shape
    q, kv = randn(9, heads, width, dtype=dtype), randn(keys, width, dtype=dtype, seed=1)
    grad = randn(9, heads, value, dtype=dtype, seed=2)
    return q, kv, random_selection(9, keys, selected), grad


def grad_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def run(function, q, kv, indices, grad, **options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, mass, gradient of q, gradient of kv); an empty mass where it is not wanted."""
    q, kv = q.clone().requires_grad_(), kv.clone().requires_grad_()
    out, mass = function(q, kv, indices, **options)
    out.backward(grad)
    return out.detach(), torch.empty(0) if mass is None else mass, grad_of(q), grad_of(kv)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_gradients(level, dtype, shape):
    q, kv, indices, grad = attention_inputs(shape, dtype)
    options = {"scale": shape[1] ** -0.5, "value_dim": shape[2], "want_mass": True}
    want = run(
        reference.sparse_latent_attention,
        q.double(),
        kv.double(),
        indices,
        grad.double(),
        **options,
    )
    got = run(sparse.sparse_latent_attention, q, kv, indices, grad, **options)
    limits = (1e-5,) * 4 if dtype == torch.float32 else (8e-3, 1e-4, 1.5e-2, 1.5e-2)
    for name, mine, exact, limit in zip(
        ("out", "mass", "dq", "dkv"), got, want, limits, strict=True
    ):
        assert relative(mine, exact) < limit, name
        assert bool(torch.isfinite(mine).all())
    assert (got[0][1] == 0).all()
    assert (got[1][indices < 0] == 0).all()
    assert (got[2][1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_one_may_stand_anywhere(level, dtype):
    q, kv, _, grad = attention_inputs((4, 48, 32, 40, 6), dtype)
    packed = torch.tensor([[3, 7, 30, -1, -1, -1]] * 9, dtype=torch.int32)
    spread = torch.tensor([[-1, 3, -1, 7, 30, -1]] * 9, dtype=torch.int32)
    options = {"scale": 0.2, "value_dim": 32, "want_mass": True}
    a = run(sparse.sparse_latent_attention, q, kv, packed, grad, **options)
    b = run(sparse.sparse_latent_attention, q, kv, spread, grad, **options)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[2], b[2])
    assert torch.equal(a[3], b[3])
    assert torch.equal(a[1][:, :3], b[1][:, [1, 3, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(level, dtype):
    q, kv, indices, grad = attention_inputs((16, 64, 64, 700, 600), dtype)
    got = run(sparse.sparse_latent_attention, q * 50, kv, indices, grad, scale=1.0, value_dim=64)
    want = run(
        reference.sparse_latent_attention,
        (q * 50).double(),
        kv.double(),
        indices,
        grad.double(),
        scale=1.0,
        value_dim=64,
    )
    assert relative(got[0], want[0]) < (1e-4 if dtype == torch.float32 else 3e-2)
    assert bool(torch.isfinite(got[2]).all() and torch.isfinite(got[3]).all())


def test_rows_at_the_end_of_memory_are_not_overrun(level):
    # NaN right behind every tensor: a read past the end that is used shows.
    for dtype in DTYPES:
        storage = torch.full((9 * 4 * 50 + 64,), float("nan"), dtype=dtype)
        q = storage[: 9 * 4 * 50].view(9, 4, 50).copy_(randn(9, 4, 50))
        other = torch.full((20 * 50 + 64,), float("nan"), dtype=dtype)
        kv = other[: 20 * 50].view(20, 50).copy_(randn(20, 50, seed=1))
        indices = random_selection(9, 20, 20)
        out, _ = sparse.sparse_latent_attention(q, kv, indices, scale=0.1, value_dim=50)
        assert bool(out.isfinite().all())
        layout = Layout((0,), (9,), (0,), (20,))
        weights = randn(9, 4)
        want = sparse.select_topk(q.clone(), weights, kv.clone(), layout, 5)
        assert torch.equal(sparse.select_topk(q, weights, kv, layout, 5), want)


def test_nan_of_another_row_stays_there(level):
    q, kv, _, _ = attention_inputs((4, 64, 64, 40, 6), torch.bfloat16)
    kv[39] = float("nan")
    indices = torch.arange(40, dtype=torch.int32).repeat(9, 1)
    indices[1:, 35:] = -1
    out, _ = sparse.sparse_latent_attention(q, kv, indices, scale=0.1, value_dim=64)
    assert bool(out[0].isnan().all())
    assert bool(out[1:].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_same_bits_every_time(level, dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        q, kv, indices, grad = attention_inputs((16, 160, 128, 60, 50), dtype)
        options = {"scale": 0.1, "value_dim": 128}
        first = run(sparse.sparse_latent_attention, q, kv, indices, grad, **options)
        for _ in range(5):
            again = run(sparse.sparse_latent_attention, q, kv, indices, grad, **options)
            assert torch.equal(first[2], again[2])
            assert torch.equal(first[3], again[3])
    finally:
        torch.set_num_threads(before)


# --- index scores at a selection


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "width", "keys", "selected"), [(4, 32, 300, 200), (1, 16, 20, 7), (37, 50, 60, 33)]
)
def test_indexer_scores_and_gradients(level, dtype, heads, width, keys, selected):
    q, k = randn(7, heads, width, dtype=dtype), randn(keys, width, dtype=dtype, seed=1)
    weights, indices = randn(7, heads, seed=2), random_selection(7, keys, selected)
    grad = randn(7, selected, seed=3)

    def score(function, *inputs: Tensor):
        leaves = [x.clone().requires_grad_() for x in inputs]
        scores = function(*leaves, indices)
        valid = indices >= 0
        (scores[valid] * grad.to(scores.dtype)[valid]).sum().backward()
        return scores.detach(), *(grad_of(leaf) for leaf in leaves)

    want = score(reference.indexer_scores, q.double(), weights.double(), k.double())
    got = score(sparse.indexer_scores, q, weights, k)
    valid = indices >= 0
    assert bool((got[0][~valid] == -torch.inf).all())
    assert relative(got[0][valid], want[0][valid]) < 1e-5
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    for mine, exact, bound in zip(got[1:], want[1:], (limit, 1e-5, limit), strict=True):
        assert relative(mine, exact) < bound


# --- calling


def test_indices_out_of_range_are_an_error(level):
    q, kv = randn(3, 4, 32), randn(10, 32)
    for wrong in (10, -2):
        indices = torch.full((3, 4), wrong, dtype=torch.int32)
        with pytest.raises(IndexError, match="outside"):
            sparse.sparse_latent_attention(q, kv, indices, scale=1.0, value_dim=16)
        with pytest.raises(IndexError, match="outside"):
            sparse.indexer_scores(q, randn(3, 4), kv, indices)


def test_nothing_in_nothing_out(level):
    none = torch.empty(0, 4, dtype=torch.int32)
    out, _ = sparse.sparse_latent_attention(
        torch.empty(0, 4, 32), randn(10, 32), none, scale=1.0, value_dim=16
    )
    assert out.shape == (0, 4, 16)
    kv = randn(10, 32).requires_grad_()
    indices = torch.full((3, 4), -1, dtype=torch.int32)
    out, _ = sparse.sparse_latent_attention(randn(3, 4, 32), kv, indices, scale=1.0, value_dim=16)
    out.sum().backward()
    assert bool((grad_of(kv) == 0).all())
    picked = sparse.select_topk(
        torch.empty(0, 2, 16), torch.empty(0, 2), torch.empty(0, 16), Layout.packed(()), 4
    )
    assert picked.shape == (0, 4)


def test_several_python_threads_at_once():
    q, kv, indices, _ = attention_inputs((16, 160, 128, 60, 50), torch.bfloat16)
    want, _ = sparse.sparse_latent_attention(q, kv, indices, scale=0.1, value_dim=128)
    results: list[Tensor] = []

    def work() -> None:
        for _ in range(10):
            out, _ = sparse.sparse_latent_attention(q, kv, indices, scale=0.1, value_dim=128)
            results.append(out)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 30
    assert all(torch.equal(out, want) for out in results)


def test_no_compiler_is_a_reason_not_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = build._library.__wrapped__()
    assert isinstance(reason, str)
    assert "compiler" in reason


def test_a_broken_compiler_is_a_reason_not_an_error(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reason = build._library.__wrapped__()
    assert isinstance(reason, str)
    assert "did not build" in reason
    assert not list(tmp_path.rglob("*.so"))


def test_unknown_level():
    with pytest.raises(ValueError, match="unknown instruction level"), build.use_level("mmx"):
        pass
