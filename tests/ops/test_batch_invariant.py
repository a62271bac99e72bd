"""Training ops with an engine's bits: its own ops' results, and the ordinary gradients."""

import pytest
import torch
from torch import Tensor

from headrace import ops
from headrace.ops import (
    Layout,
    PackedMatrices,
    PackedMatrix,
    batch_invariant,
    packed_grouped_linear,
    packed_linear,
)
from headrace.ops.draws import token_logprobs
from headrace.ops.native import build

BACKENDS = ("reference", *(("cpu",) if build.unavailable_reason() is None else ()))


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request):
    with ops.use(request.param):
        yield request.param


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_()


def assert_same_gradients(got: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    """Of both results along one random direction, to 1e-5 of the largest."""
    along = torch.randn(got.shape, generator=torch.Generator().manual_seed(9))
    pairs = zip(
        torch.autograd.grad(got, inputs, along),
        torch.autograd.grad(want, inputs, along),
        strict=True,
    )
    for a, b in pairs:
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_linear_multiplies_as_packed_and_trains_the_weight():
    x, weight, bias = randn(3, 7, 70), randn(37, 70, seed=1), randn(37, seed=2)
    matrix = PackedMatrix.pack(weight.detach(), "float32")
    for some in (bias, None):
        out = batch_invariant.linear(x, weight, matrix, some)
        assert torch.equal(out.flatten(0, 1), packed_linear(x.detach().flatten(0, 1), matrix, some))
        row = batch_invariant.linear(x[1, 2:3], weight, matrix, some)
        assert torch.equal(row[0], out[1, 2])
        inputs = [x, weight] if some is None else [x, weight, some]
        assert_same_gradients(out, torch.nn.functional.linear(x, weight, some), inputs)
    frozen = batch_invariant.linear(x, weight.detach(), matrix, bias.detach())
    frozen.sum().backward()
    assert x.grad is not None


def test_grouped_linear_multiplies_as_packed_and_trains_every_weight():
    x, weight, counts = randn(12, 70), randn(4, 37, 70, seed=1), [5, 0, 1, 6]
    matrices = PackedMatrices.pack(weight.detach(), "float32")
    out = batch_invariant.grouped_linear(x, weight, matrices, torch.tensor(counts))
    assert torch.equal(out, packed_grouped_linear(x.detach(), matrices, counts))
    assert torch.equal(out[6:8], packed_linear(x.detach()[6:8], matrices[3]))
    assert_same_gradients(out, ops.grouped_matmul(x, weight, counts), [x, weight])
    # As the heads of latent attention have them: a view of something else.
    turned = randn(4, 70, 37, seed=2)
    matrices.repack_(turned.detach().transpose(1, 2))
    out = batch_invariant.grouped_linear(x, turned.transpose(1, 2), matrices, counts)
    assert_same_gradients(out, ops.grouped_matmul(x, turned.transpose(1, 2), counts), [x, turned])


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_attention_is_the_engines_over_its_pool_and_has_the_dense_gradients(heads):
    lengths, size, (query_heads, kv_heads) = (1, 33, 5, 70), 20, heads
    tokens = sum(lengths)
    # As a model has them: keys and queries side by side in one projection.
    qk, v = randn(tokens, query_heads + kv_heads, size), randn(tokens, kv_heads, size, seed=1)
    q, k = qk.split((query_heads, kv_heads), dim=1)
    layout = Layout.packed(lengths)
    out = batch_invariant.attention(q, k, v, layout, scale=0.3)

    # The engine's way: blocks of 16 in no order, the longest one in two chunks.
    blocks = [-(-n // 16) for n in lengths]
    numbers = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(2)).int()
    keys = torch.full((sum(blocks), kv_heads, 16, size), torch.nan)
    values = keys.clone()
    tables = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
    for i, (n, begin) in enumerate(zip(lengths, layout.key_start, strict=True)):
        tables[i, : blocks[i]] = numbers[sum(blocks[:i]) : sum(blocks[: i + 1])]
        for t in range(n):
            block = int(tables[i, t // 16])
            keys[block, :, t % 16] = k[begin + t].detach()
            values[block, :, t % 16] = v[begin + t].detach()
    cut = tokens - 30
    with torch.no_grad():
        first = ops.paged_attention(
            q[:cut], keys, values, tables, (0, 0, 0, 0), (1, 33, 5, 40), scale=0.3
        )
        last = ops.paged_attention(q[cut:], keys, values, tables[3:], (40,), (30,), scale=0.3)
    assert torch.equal(out, torch.cat((first, last)))
    assert_same_gradients(out, ops.dense_attention(q, k, v, layout, scale=0.3), [qk, v])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_elements", [1 << 25, 300])
def test_cross_entropy_has_the_samplers_logprobs(chunk_elements, temperature):
    hidden, weight = randn(9, 24), randn(90, 24, seed=1)
    targets = torch.arange(9) * 10
    matrix = PackedMatrix.pack(weight.detach(), "float32")
    logprobs, entropies = batch_invariant.linear_cross_entropy(
        hidden, weight, matrix, targets, temperature=temperature, chunk_elements=chunk_elements
    )
    for row in range(9):
        logits = packed_linear(hidden[row : row + 1].detach(), matrix) / temperature
        assert torch.equal(token_logprobs(logits, targets[row, None, None])[0], logprobs[row, None])
    want, want_entropies = ops.linear_cross_entropy(
        hidden, weight, targets, temperature=temperature
    )
    torch.testing.assert_close(logprobs, want, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(entropies, want_entropies, rtol=1e-4, atol=1e-5)
    assert not entropies.requires_grad
    assert_same_gradients(logprobs, want, [hidden, weight])


def test_entropy_of_a_certain_token_is_zero():
    weight = torch.tensor([[0.0], [2e5]])
    matrix = PackedMatrix.pack(weight, "float32")
    logprobs, entropies = batch_invariant.linear_cross_entropy(
        torch.ones(1, 1), weight, matrix, torch.tensor([1])
    )
    assert (float(logprobs), float(entropies)) == (0.0, 0.0)


def test_what_does_not_fit_is_refused():
    x, weight = randn(2, 8).detach(), randn(4, 8).detach()
    matrix = PackedMatrix.pack(weight, "float32")
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16, must be float32"):
        batch_invariant.linear(x.bfloat16(), weight, matrix)
    with pytest.raises(ValueError, match=r"matrix is bfloat16 \[4, 8\], must be float32 \[4, 8\]"):
        batch_invariant.linear(x, weight, PackedMatrix.pack(weight, "bfloat16"))
    matrices = PackedMatrices.pack(weight[None], "float32")
    with pytest.raises(ValueError, match=r"float32 \[1, 4, 8\], must be float32 \[2, 4, 8\]"):
        batch_invariant.grouped_linear(x, weight.expand(2, 4, 8), matrices, [1, 1])
    with pytest.raises(ValueError, match="counts"):
        batch_invariant.grouped_linear(x, weight[None], matrices, [3])
    q = torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match="layout holds 2 query rows, but q has 3"):
        batch_invariant.attention(q, q, q, Layout.packed((2,)), scale=1.0)
    for targets, temperature, message in (
        (torch.zeros(1, dtype=torch.int64), 1.0, "targets"),
        (torch.zeros(2, dtype=torch.int64), 0.0, "temperature 0.0 must be positive"),
        (torch.tensor([0, 4]), 1.0, "targets 0 .. 4 must lie in 0 .. 3"),
    ):
        with pytest.raises(ValueError, match=message):
            batch_invariant.linear_cross_entropy(
                x, weight, matrix, targets, temperature=temperature
            )
