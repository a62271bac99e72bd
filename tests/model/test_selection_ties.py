"""Ties in the indexer's scores: sums of relus are exactly zero on whole plateaus of keys.

The rule is the lowest index first, whatever else lies in the tensors. `torch.topk` on the CPU picks
differently with the width of a row, so the same sequence would attend to other keys when it is
padded, batched or read in chunks; the last tests show that the checks here notice.
"""

from collections.abc import Callable
from typing import Any

import latent_oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_oracle import GrowingLatentCache
from torch import Tensor

from headrace import ops
from headrace.model import causal
from headrace.model.causal import CausalAttend
from headrace.model.decoder import Decoder
from headrace.model.presets import preset
from headrace.model.trace import SelectionTrace
from headrace.ops import Layout
from headrace.ops.registry import REGISTRY

Select = Callable[[Tensor, Tensor, Tensor, Layout, int], Tensor]
HEADS, WIDTH = 2, 3
BACKENDS = [backend.name for backend in REGISTRY.backends("select_topk", "cpu")]


def plain_topk(q: Tensor, weights: Tensor, k: Tensor, layout: Layout, topk: int) -> Tensor:
    """What one writes first: every score, a mask, torch.topk."""
    lower, upper = layout.bounds(q.shape[0])
    column = torch.arange(k.shape[0])
    scores = torch.einsum("sh,sht->st", weights, torch.einsum("shd,td->sht", q, k).relu())
    hidden = (column < lower[:, None]) | (column >= upper[:, None])
    values, chosen = scores.masked_fill(hidden, -torch.inf).topk(min(topk, k.shape[0]), dim=-1)
    beyond = k.shape[0]
    chosen = chosen.masked_fill(values == -torch.inf, beyond).sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == beyond, -1)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=-1).int()


def draw(tokens: int, seed: int, *, whole: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers: scores are exact, and most of them equal another, many zero.

    Else the numbers that are not zero are any: an order of additions would show in their scores.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-1, 2, (tokens, HEADS, WIDTH), generator=generator).float()
    k = torch.randint(-1, 2, (tokens, WIDTH), generator=generator).float()
    weights = torch.randint(-1, 2, (tokens, HEADS), generator=generator).float()
    if not whole:
        for x in (q, weights, k):
            x.mul_(torch.randn(x.shape, generator=generator))
    return q, weights, k


def dot(a: list[int], b: list[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def lowest_first(q: Tensor, weights: Tensor, k: Tensor, topk: int) -> list[list[int]]:
    """The rule, in Python's whole numbers."""
    query_rows, weight_rows, keys = q.int().tolist(), weights.int().tolist(), k.int().tolist()
    rows = []
    for s in range(q.shape[0]):
        scores = []
        for j in range(s + 1):
            heads = zip(weight_rows[s], query_rows[s], strict=True)
            scores.append(sum(w * max(dot(query, keys[j]), 0) for w, query in heads))
        best = sorted(range(s + 1), key=lambda j: (-scores[j], j))[:topk]
        rows.append(sorted(best) + [-1] * (topk - len(best)))
    return rows


def check_rule(select: Select, tokens: int, topk: int, seed: int) -> None:
    q, weights, k = draw(tokens, seed)
    chosen = select(q, weights, k, Layout.causal(1, tokens), topk)
    assert chosen.tolist() == lowest_first(q, weights, k, topk)


def check_invariance(
    select: Select,
    tokens: int,
    topk: int,
    seed: int,
    before: int,
    after: int,
    cut: int,
    whole: bool = True,
) -> None:
    """The same sequence alone, padded on both sides, beside another one, and in two chunks."""
    q, weights, k = draw(tokens, seed, whole=whole)
    alone = select(q, weights, k, Layout.causal(1, tokens), topk)

    total = before + tokens + after
    noise = draw(total, seed + 1)
    for x, mine in zip(noise, (q, weights, k), strict=True):
        x[before : before + tokens] = mine
    inside = slice(before, before + tokens)
    shifted = torch.where(alone < 0, alone, alone + before)
    rows = Layout((before,), (tokens,), (before,), (tokens,))
    assert torch.equal(select(*noise, rows, topk)[inside], shifted)
    neighbours = Layout.packed((before, tokens, after))
    assert torch.equal(select(*noise, neighbours, topk)[inside], shifted)

    cut = min(cut, tokens)
    first = select(q[:cut], weights[:cut], k[:cut], Layout.causal(1, cut), topk)
    rest = Layout((0,), (tokens - cut,), (0,), (tokens,))
    second = select(q[cut:], weights[cut:], k, rest, topk)
    assert torch.equal(torch.cat((first, second)), alone)


sizes = {
    "tokens": st.integers(1, 30),
    "topk": st.integers(1, 12),
    "seed": st.integers(0, 1000),
}
quick = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("backend", BACKENDS)
@quick
@given(**sizes)
def test_lowest_index_first(backend: str, tokens: int, topk: int, seed: int) -> None:
    with ops.use(backend):
        check_rule(ops.select_topk, tokens, topk, seed)


@pytest.mark.parametrize("backend", BACKENDS)
@quick
@given(
    **sizes,
    before=st.integers(0, 9),
    after=st.integers(0, 40),
    cut=st.integers(0, 40),
    whole=st.booleans(),
)
def test_selection_depends_on_the_sequence_alone(backend: str, **case: Any) -> None:
    with ops.use(backend):
        check_invariance(ops.select_topk, **case)


def test_the_checks_notice_plain_topk() -> None:
    with pytest.raises(AssertionError):
        check_rule(plain_topk, 40, 12, 0)
    with pytest.raises(AssertionError):
        check_invariance(plain_topk, 40, 12, 0, 3, 30, 7)


def check_model() -> None:
    """Selections of a model with one indexer head, where half of all scores are zero."""
    model = Decoder(
        preset(
            "glm5-tiny",
            61,
            hidden_size=48,
            num_layers=2,
            mtp=None,
            indexer={"num_heads": 1, "topk": 12},
        )
    ).eval()
    model.init_weights(0)
    tokens, pad = 40, 5
    ids = torch.randint(0, 61, (1, tokens), generator=torch.Generator().manual_seed(0))

    def select(ids: Tensor, layout: Layout) -> dict[int, Tensor]:
        trace = SelectionTrace()
        positions = layout.positions(ids.numel()).view_as(ids)
        model(ids, positions, attend=CausalAttend(layout, "sparse", trace))
        return trace.selections

    alone = select(ids, Layout.causal(1, tokens))

    padded = torch.cat((torch.zeros(1, pad, dtype=torch.long), ids, ids[:, :17]), 1)
    layout = Layout((pad,), (tokens,), (pad,), (tokens,))
    batch, twice = torch.cat((ids.flip(1), ids)), Layout.causal(2, tokens)
    cache = GrowingLatentCache()
    pieces: dict[int, list[Tensor]] = {0: [], 1: []}
    for start, end in ((0, 3), (3, 30), (30, 31), (31, tokens)):
        model(ids[:, start:end], torch.arange(start, end)[None], cache)
        for layer, chosen in cache.selections.items():
            pieces[layer].append(chosen[0])
    for layer, expected in alone.items():
        assert torch.equal(torch.cat(pieces[layer]), expected), "chunks"
        found = select(padded, layout)[layer][pad : pad + tokens]
        assert torch.equal(torch.where(found < 0, found, found - pad), expected), "padding"
        found = select(batch, twice)[layer][tokens:]
        assert torch.equal(torch.where(found < 0, found, found - tokens), expected), "batch"


@torch.no_grad()
def test_a_model_selects_the_same_keys_padded_batched_and_in_chunks() -> None:
    check_model()


@torch.no_grad()
def test_the_model_check_notices_plain_topk(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (causal, latent_oracle):
        monkeypatch.setattr(module, "select_topk", plain_topk)
    with pytest.raises(AssertionError, match=r"chunks|padding|batch"):
        check_model()
