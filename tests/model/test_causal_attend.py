"""Attention of a training pass against softmax written out in float64, forward and backward."""

import pytest
import torch
from torch import Tensor

from headrace.model.attention import IndexQuery, LatentQuery
from headrace.model.causal import CausalAttend, Mode
from headrace.model.decoder import Decoder
from headrace.model.presets import preset
from headrace.model.trace import SelectionTrace
from headrace.ops import Layout

HEADS, NOPE, ROPE, VALUE, RANK, TOPK = 3, 6, 4, 5, 8, 5
LENGTHS = (13, 2, 9)
TOKENS = sum(LENGTHS)


def new_query(*, index: bool, seed: int = 0) -> LatentQuery:
    """Random [1, TOKENS, ...] tensors in float32 that want gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    return LatentQuery(
        q_nope=draw(1, TOKENS, HEADS, NOPE),
        q_rope=draw(1, TOKENS, HEADS, ROPE),
        latent=draw(1, TOKENS, RANK),
        k_rope=draw(1, TOKENS, ROPE),
        w_uk=draw(HEADS, NOPE, RANK),
        w_uv=draw(HEADS, VALUE, RANK),
        scale=0.4,
        index=IndexQuery(draw(1, TOKENS, 8, 6), draw(1, TOKENS, 6), draw(1, TOKENS, 8))
        if index
        else None,
        shares=not index,
        topk=TOPK,
    )


def inputs(query: LatentQuery) -> list[Tensor]:
    return [x for x in query if isinstance(x, Tensor)]


def written_out(query: LatentQuery, allowed: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Keys and values of every head, a mask, a softmax; output and leaves, all float64."""
    leaves = [x.detach().double().requires_grad_() for x in inputs(query)]
    q_nope, q_rope, latent, k_rope, w_uk, w_uv = leaves
    keys = torch.einsum("btr,hnr->bthn", latent, w_uk)
    values = torch.einsum("btr,hvr->bthv", latent, w_uv)
    scores = torch.einsum("bshn,bthn->bhst", q_nope, keys)
    scores = scores + torch.einsum("bshn,btn->bhst", q_rope, k_rope)
    probabilities = (scores * query.scale).masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("bhst,bthv->bshv", probabilities, values), leaves


def visible(lengths: tuple[int, ...]) -> Tensor:
    lower, upper = Layout.packed(lengths).bounds(TOKENS)
    column = torch.arange(TOKENS)
    return (column >= lower[:, None]) & (column < upper[:, None])


@pytest.mark.parametrize("lengths", [(TOKENS,), LENGTHS])
@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_output_and_gradients(mode: Mode, lengths: tuple[int, ...]) -> None:
    query, trace = new_query(index=True), SelectionTrace()
    out = CausalAttend(Layout.packed(lengths), mode, trace).attend_latent(0, query)
    allowed = visible(lengths)
    if mode == "sparse":
        chosen = torch.zeros(TOKENS, TOKENS + 1, dtype=torch.bool)
        chosen.scatter_(1, trace.selections[0].long() % (TOKENS + 1), True)
        assert (chosen[:, :-1] & ~allowed).sum() == 0
        assert chosen[:, :-1].sum(1).tolist() == allowed.sum(1).clamp(max=TOPK).tolist()
        allowed = chosen[:, :-1]
    expected, leaves = written_out(query, allowed)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)

    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weight).sum().backward()
    (expected * weight.double()).sum().backward()
    for mine, theirs in zip(inputs(query), leaves, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=1e-5, rtol=1e-4)
    assert query.index is not None
    assert all(x.grad is None for x in query.index)


@torch.no_grad()
def test_a_layer_that_shares_uses_the_newest_selection() -> None:
    trace = SelectionTrace()
    attend = CausalAttend(mode="sparse", trace=trace)
    attend.attend_latent(0, new_query(index=True, seed=1))
    attend.attend_latent(1, new_query(index=True, seed=2))
    out = attend.attend_latent(2, new_query(index=False, seed=3))
    assert sorted(trace.selections) == [0, 1]
    chosen = torch.zeros(TOKENS, TOKENS + 1, dtype=torch.bool)
    chosen.scatter_(1, trace.selections[1].long() % (TOKENS + 1), True)
    expected, _ = written_out(new_query(index=False, seed=3), chosen[:, :-1])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_sharing_what_nobody_selected_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="layer 4 shares a selection"):
        CausalAttend(mode="sparse").attend_latent(4, new_query(index=False))


@torch.no_grad()
def test_auto_selects_as_soon_as_a_sequence_is_longer_than_topk() -> None:
    for lengths, selects in (((TOPK,) * 4 + (4,), False), ((TOPK + 1,) * 4, True)):
        trace, query = SelectionTrace(), new_query(index=True)
        outs = {
            mode: CausalAttend(Layout.packed(lengths), mode, trace if mode == "auto" else None)
            for mode in ("auto", "sparse", "dense")
        }
        outs = {mode: attend.attend_latent(0, query) for mode, attend in outs.items()}
        assert bool(trace.selections) == selects
        torch.testing.assert_close(outs["auto"], outs["sparse"], atol=1e-5, rtol=1e-5)
        same = torch.allclose(outs["auto"], outs["dense"], atol=1e-4)
        assert same != selects


@torch.no_grad()
def test_rows_of_no_sequence_give_zeros() -> None:
    layout = Layout((4,), (11,), (4,), (11,))
    for mode in ("dense", "sparse"):
        out = CausalAttend(layout, mode).attend_latent(0, new_query(index=True))[0]
        assert out[4:15].abs().min() > 0
        assert not out[:4].any()
        assert not out[15:].any()


@pytest.mark.parametrize("mode", ["dense", "sparse"])
@pytest.mark.parametrize("half", ["autocast", "weights"])
def test_bf16_trains_and_keeps_what_decides_in_fp32(mode: Mode, half: str) -> None:
    config = preset("glm5-tiny", 61, indexer={"topk": 6}, max_positions=64)
    dtype = torch.bfloat16 if half == "weights" else torch.float32
    model = Decoder(config, dtype=dtype)
    model.init_weights(0)
    ids = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    seen: list[torch.dtype] = []

    class Spy(CausalAttend):
        def attend_latent(self, layer: int, query: LatentQuery) -> Tensor:
            assert query.index is not None
            seen.append(query.index.weights.dtype)
            return super().attend_latent(layer, query)

    with torch.autocast("cpu", torch.bfloat16, enabled=half == "autocast"):
        loss = model.logits(model(ids, attend=Spy(mode=mode))).float().logsumexp(-1).mean()
    loss.backward()
    assert seen == [torch.float32] * config.num_layers
    for name, parameter in model.named_parameters():
        if ".indexer." in name or name.startswith("mtp."):
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_the_indexers_objective_reaches_the_indexers_alone() -> None:
    model = Decoder(preset("glm5-tiny", 61, max_positions=64))
    model.init_weights(0)
    ids = torch.randint(0, 61, (1, 20), generator=torch.Generator().manual_seed(0))
    queries: list[IndexQuery] = []

    class Keep(SelectionTrace):
        def dense(
            self, layer: int, index: IndexQuery, q: Tensor, k: Tensor, layout: Layout, scale: float
        ) -> None:
            queries.append(index)

    attend = CausalAttend(mode="dense", trace=Keep())
    hidden = model(ids, attend=attend)
    model.mtp_forward(0, hidden, ids, attend=attend)
    assert len(queries) == model.config.num_layers + 1
    torch.stack([x.square().sum() for index in queries for x in index]).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (".indexer." in name), name
