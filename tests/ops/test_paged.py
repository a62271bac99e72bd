"""Attention over blocks of a pool: right, and every row the same bits whatever surrounds it."""

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from headrace import ops
from headrace.ops import paged, paged_attention, reference
from headrace.ops.conformance_paged import PAGED_CHECKS, Paged
from headrace.ops.native import build

ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LEVELS = (
    build.LEVELS[: build.LEVELS.index(build.level()) + 1]
    if build.unavailable_reason() is None
    else ()
)
needs_native = pytest.mark.skipif(not LEVELS, reason=str(build.unavailable_reason()))


@pytest.fixture(params=LEVELS)
def level(request):
    """Run the test at each instruction level this machine has."""
    with build.use_level(request.param):
        yield request.param


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(case: Paged, sequence: int, start: int = 0) -> Tensor:
    """Rows of a sequence from `start` on by torch's attention over its keys, in float64."""
    q, k, v = (x[sequence].double().transpose(0, 1) for x in (case.q, case.keys, case.values))
    seen = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).tril()[start:]
    out = F.scaled_dot_product_attention(q[:, start:], k, v, attn_mask=seen, enable_gqa=True)
    return out.transpose(0, 1)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("name", PAGED_CHECKS)
def test_every_level_passes_every_check(level, dtype, name):
    check, allowed = PAGED_CHECKS[name]
    found = check(paged.paged_attention, dtype, generator())
    assert found <= (ALLOWED[dtype] if allowed is None else allowed)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("shape", [(9, 3, 64, 16), (16, 8, 128, 16), (4, 2, 12, 1), (80, 1, 20, 3)])
def test_equals_torchs_attention_over_gathered_keys(backend, dtype, shape):
    case = Paged.draw(generator(1), dtype, shape, (70, 33, 129))
    with ops.use(backend):
        for i, out in enumerate(case.attend(paged_attention, case.whole(), generator(2))):
            assert out.dtype == dtype
            assert error(out, plain(case, i)) <= ALLOWED[dtype]


@pytest.mark.parametrize("dtype", ALLOWED)
def test_rising_scores_rescale_what_was_summed(level, dtype):
    # Each chunk of keys has a higher maximum than all before it, by far.
    case = Paged.draw(generator(), dtype, (4, 2, 32, 16), (400,))
    case.q[0].abs_()
    case.keys[0].copy_(torch.arange(400)[:, None, None] * 0.05)
    (out,) = case.attend(paged.paged_attention, case.whole(), generator())
    assert error(out, plain(case, 0)) <= ALLOWED[dtype]


@pytest.mark.parametrize("dtype", ALLOWED)
def test_long_sequences_are_cut_without_a_trace(level, dtype, two_threads):
    # Decoding steps of a long sequence are split over spans of keys; chunks and short ones are not.
    case = Paged.draw(generator(), dtype, (4, 2, 16, 16), (4200, 2048, 2049, 30))
    chunks = [(0, 4160, 40), (1, 2040, 8), (2, 2030, 19), (3, 0, 30)]
    together = case.attend(paged.paged_attention, chunks, generator())
    for (i, start, _), out in zip(chunks, together, strict=True):
        assert error(out, plain(case, i, start)) <= ALLOWED[dtype]
    last = [(i, start + count - 1, 1) for i, start, count in chunks]
    steps = case.attend(paged.paged_attention, last, generator(1))
    assert all(torch.equal(a, b[-1:]) for a, b in zip(steps, together, strict=True))
    torch.set_num_threads(1)
    alone = [case.attend(paged.paged_attention, [step], generator(2))[0] for step in last]
    assert all(torch.equal(a, b) for a, b in zip(alone, steps, strict=True))


@pytest.mark.parametrize("dtype", ALLOWED)
def test_many_sequences_have_the_bits_of_each_alone(level, dtype, two_threads):
    # Enough of them that a thread takes all heads of one at a time.
    lengths = [1 + 37 * i % 301 for i in range(30)]
    case = Paged.draw(generator(3), dtype, (9, 3, 64, 16), lengths)
    steps = [(i, n - 1, 1) for i, n in enumerate(lengths)]
    together = case.attend(paged.paged_attention, steps, generator())
    torch.set_num_threads(1)
    for step, out in zip(steps, together, strict=True):
        (alone,) = case.attend(paged.paged_attention, [step], generator(step[0]))
        assert torch.equal(out, alone)
        assert error(out, plain(case, step[0], step[1])) <= ALLOWED[dtype]


@needs_native
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_chunks_of_any_shape_have_the_same_bits(data):
    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    kv_heads = number(1, 3)
    shape = (kv_heads * number(1, 9), kv_heads, number(1, 70), number(1, 40))
    lengths = [number(1, 200) for _ in range(number(1, 3))]
    case = Paged.draw(
        generator(number(0, 99)), data.draw(st.sampled_from([*ALLOWED])), shape, lengths
    )
    order = generator()
    whole = case.attend(paged.paged_attention, case.whole(), order)
    cuts = [sorted({0, n, *(number(0, n) for _ in range(3))}) for n in lengths]
    batch = [
        (i, begin, end - begin) for i, places in enumerate(cuts) for begin, end in pairwise(places)
    ]
    batch = data.draw(st.permutations(batch))
    for (i, start, count), out in zip(
        batch, case.attend(paged.paged_attention, batch, order), strict=True
    ):
        assert torch.equal(out, whole[i][start : start + count])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_no_row_sees_may_be_anything(backend):
    q = torch.randn(2, 2, 8, generator=generator())
    keys = torch.randn(4, 1, 4, 8, generator=generator(1))
    values = torch.randn(4, 1, 4, 8, generator=generator(2))
    tables = torch.tensor([[3, 1, -1], [0, 9, -7]], dtype=torch.int32)
    with ops.use(backend):
        want = paged_attention(q, keys, values, tables, [5, 2], [1, 1], scale=1.0)
        for pool, anything in ((keys, math.nan), (values, math.inf)):
            pool[1, :, 2:] = pool[0, :, 3:] = pool[2] = anything
        got = paged_attention(q, keys, values, tables, [5, 2], [1, 1], scale=1.0)
    assert want.isfinite().all()
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beside", [1, 2], ids=["by block", "by head"])
def test_keys_and_values_of_a_block_may_lie_side_by_side(backend, dtype, beside):
    q = torch.randn(3, 4, 16, generator=generator()).to(dtype)
    pool = torch.randn(5, 2, 2, 4, 16, generator=generator(1)).to(dtype)
    keys, values = pool.unbind(beside)
    tables = torch.tensor([[4, 2], [0, -1]], dtype=torch.int32)
    starts, counts = torch.tensor([4, 0]), torch.tensor([2, 1])
    with ops.use(backend):
        side = paged_attention(q, keys, values, tables, starts, counts, scale=0.5)
        apart = paged_attention(
            q, keys.contiguous(), values.contiguous(), tables, [4, 0], [2, 1], scale=0.5
        )
    assert torch.equal(side, apart)


def test_there_is_no_gradient_and_autocast_changes_nothing():
    q = torch.randn(1, 2, 8, generator=generator()).requires_grad_()
    pool = torch.randn(1, 1, 4, 8, generator=generator(1))
    table = torch.zeros(1, 1, dtype=torch.int32)
    plain = paged_attention(q, pool, pool, table, [2], [1], scale=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = paged_attention(q, pool, pool, table, [2], [1], scale=1.0)
    assert not plain.requires_grad
    assert torch.equal(cast, plain)
    wide = pool.double()
    exact = paged_attention(q.double(), wide, wide, table, [2], [1], scale=1.0)
    assert exact.dtype == torch.float64
    assert error(plain, exact) <= 1e-6


GOOD = {
    "q": torch.zeros(3, 4, 8),
    "keys": torch.zeros(6, 2, 4, 8),
    "values": torch.zeros(6, 2, 4, 8),
    "tables": torch.tensor([[0, 5], [1, -1]], dtype=torch.int32),
    "starts": [6, 0],
    "counts": [2, 1],
}
MISTAKES = {
    "heads": ({"q": torch.zeros(3, 3, 8)}, r"q \[3, 3, 8\]"),
    "width": ({"q": torch.zeros(3, 4, 6)}, r"q \[3, 4, 6\]"),
    "values of another shape": ({"values": torch.zeros(6, 2, 4, 6)}, r"values \[6, 2, 4, 6\]"),
    "mixed dtypes": ({"keys": GOOD["keys"].bfloat16()}, "keys torch.bfloat16"),
    "blocks with holes": ({"keys": torch.zeros(6, 4, 2, 8).transpose(1, 2)}, "keys: the last"),
    "int64 tables": ({"tables": GOOD["tables"].long()}, "tables are torch.int64"),
    "too few tables": ({"tables": GOOD["tables"][:1]}, r"tables \[1, 2\]"),
    "too short tables": (
        {"tables": GOOD["tables"][:, :1].contiguous()},
        "8 positions, .* 2 blocks",
    ),
    "no block where one is needed": ({"starts": [6, 4]}, r"tables\[1, 1\] is -1"),
    "a block that is not there": (
        {"keys": torch.zeros(5, 2, 4, 8)} | {"values": torch.zeros(5, 2, 4, 8)},
        r"tables\[0, 1\] is 5, .* 0 \.\. 4",
    ),
    "too few starts": ({"starts": [6]}, r"starts \[6\]"),
    "a negative start": ({"starts": [6, -1]}, r"starts \[6, -1\]"),
    "an empty sequence": ({"counts": [3, 0]}, r"counts \[3, 0\]"),
    "counts beyond q": ({"counts": [2, 2]}, r"counts \[2, 2\].*sum to 3"),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_value_errors_that_name_the_argument(backend, name):
    change, message = MISTAKES[name]
    with ops.use(backend):
        paged_attention(**GOOD, scale=1.0)
        with pytest.raises(ValueError, match=message):
            paged_attention(**{**GOOD, **change}, scale=1.0)


def test_a_backend_that_lets_a_neighbour_in_fails():
    def broken(q, *arguments, scale):
        # Products whose sums depend on how many rows there are.
        out = reference.paged_attention(q, *arguments, scale=scale)
        return out * (1 + 1e-6 * q.shape[0]) if q.numel() else out

    check, allowed = PAGED_CHECKS["alone, chunks, batch, blocks"]
    assert check(broken, torch.float32, generator()) > (allowed or 0.0)
    assert check(reference.paged_attention, torch.float32, generator()) == 0.0
