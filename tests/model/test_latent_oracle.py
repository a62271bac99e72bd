"""Latent and sparse attention, experts and the indexer against transformers on the same weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from latent_oracle import (
    CASES,
    SPARSE,
    TOPK,
    GrowingLatentCache,
    Selections,
    build,
    draw_ids,
    load,
)
from torch import Tensor

from headrace.model.causal import CausalAttend
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.trace import SelectionTrace
from headrace.ops import Layout

TOKENS = 20
assert TOKENS > TOPK, "selection must matter"


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.3
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def causal(batch: int, tokens: int, pads: tuple[int, ...] = ()) -> list[list[range]]:
    """What each token sees, row by row; `pads` are left of it."""
    return [[range(pad, token + 1) for token in range(tokens)] for pad in (pads or (0,) * batch)]


def as_sets(selection: Tensor, batch: int, tokens: int) -> list[list[set[int]]]:
    """int32 [batch * tokens, K] of flat key rows -> keys inside each row."""
    rows = selection.view(batch, tokens, -1).tolist()
    return [
        [{key - index * tokens for key in keys if key >= 0} for keys in row]
        for index, row in enumerate(rows)
    ]


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_and_selections(case: str, tmp_path: Path) -> None:
    reference = build(case)
    model, ids = load(reference, tmp_path), draw_ids(2, TOKENS)
    theirs, ours = Selections(reference), SelectionTrace()
    expected = reference(ids).logits
    hidden = model(ids, attend=CausalAttend(trace=ours))
    assert_equal(model.logits(hidden), expected)
    assert model.num_parameters() == reference.num_parameters()

    assert set(ours.selections) == set(theirs.by_layer)
    assert bool(ours.selections) == (case in SPARSE)
    for layer, selection in ours.selections.items():
        wanted = theirs.sets(layer, causal(2, TOKENS))
        assert as_sets(selection, 2, TOKENS) == wanted, f"layer {layer}"
    if case in SPARSE:
        # Selecting matters here, and attending densely would not have passed.
        dense = model.logits(model(ids, attend=CausalAttend(mode="dense")))
        assert (dense - expected).abs().max() > 0.1


def test_layers_that_share_have_no_indexer() -> None:
    reference = build("glm-index-frequency")
    theirs = [layer.self_attn.indexer is None for layer in reference.model.layers]
    for spelling in ({}, {"indexer_types": None}):
        config = ModelConfig.from_hf({**reference.config.to_dict(), **spelling})
        assert config.indexer is not None
        assert list(config.indexer.shared) == theirs == [False, False, True, True, False, True]


@torch.no_grad()
@pytest.mark.parametrize("case", ["glm", "glm-index-share", "v32", "v3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(case: str, side: str, tmp_path: Path) -> None:
    reference = build(case)
    model, lengths = load(reference, tmp_path), (TOKENS, 13, 9)
    ids = draw_ids(3, TOKENS)
    pads = tuple(TOKENS - n if side == "left" else 0 for n in lengths)
    mask = torch.zeros_like(ids)
    for row, (pad, length) in enumerate(zip(pads, lengths, strict=True)):
        mask[row, pad : pad + length] = 1
    ids = ids * mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    starts = tuple(row * TOKENS + pad for row, pad in enumerate(pads))
    layout = Layout(starts, lengths, starts, lengths)
    assert torch.equal(layout.positions(ids.numel()).view_as(ids) * mask, positions * mask)

    theirs, ours = Selections(reference), SelectionTrace()
    expected = reference(ids, attention_mask=mask, position_ids=positions).logits
    hidden = model(ids, positions, attend=CausalAttend(layout, trace=ours))
    assert hidden.isfinite().all()
    real = mask.bool()
    assert_equal(model.logits(hidden)[real], expected[real])
    for layer, selection in ours.selections.items():
        chosen = as_sets(selection, 3, TOKENS)
        wanted = theirs.sets(layer, causal(3, TOKENS, pads))
        for row in range(3):
            for token in range(TOKENS):
                if real[row, token]:
                    assert chosen[row][token] == wanted[row][token]
                else:
                    assert chosen[row][token] == set()


@torch.no_grad()
@pytest.mark.parametrize("case", ["glm", "glm-index-share", "v3"])
def test_packed_documents_equal_separate_ones(case: str, tmp_path: Path) -> None:
    reference = build(case)
    model, lengths = load(reference, tmp_path), (11, 3, 15, 1)
    ids, layout = draw_ids(1, sum(lengths)), Layout.packed(lengths)
    positions = layout.positions(ids.numel())[None]
    packed = model.logits(model(ids, positions, attend=CausalAttend(layout)))
    for piece, logits in zip(ids.split(lengths, 1), packed.split(lengths, 1), strict=True):
        assert_equal(logits, reference(piece).logits)


@torch.no_grad()
@pytest.mark.parametrize("case", ["glm", "glm-index-share", "v32", "v3"])
@pytest.mark.parametrize("pieces", [[1] * TOKENS, [7, 1, 9, 3], [2, 16, 2]])
def test_chunked_prefill_and_cache(case: str, pieces: list[int], tmp_path: Path) -> None:
    reference = build(case)
    model, ids = load(reference, tmp_path), draw_ids(2, TOKENS)
    whole, cache = SelectionTrace(), GrowingLatentCache()
    model(ids, attend=CausalAttend(trace=whole))
    hidden, start = [], 0
    for size in pieces:
        end = start + size
        positions = torch.arange(start, end).expand(2, size)
        hidden.append(model(ids[:, start:end], positions, cache))
        for layer, selection in whole.selections.items():
            first = torch.tensor([0, TOKENS])[:, None, None]
            wanted = selection.view(2, TOKENS, -1)[:, start:end]
            wanted = torch.where(wanted < 0, wanted, wanted - first)
            assert torch.equal(cache.selections[layer], wanted)
        start = end
    assert_equal(model.logits(torch.cat(hidden, 1)), reference(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("case", ["glm", "glm-index-share", "glm-index-frequency", "v32", "v3"])
def test_greedy_continuation(case: str, tmp_path: Path) -> None:
    reference = build(case)
    model, prompt, new = load(reference, tmp_path), draw_ids(2, 9), 14
    expected = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        use_cache=True,
    )
    cache, ids, chunk = GrowingLatentCache(), prompt, prompt
    for _ in range(new):
        positions = torch.arange(ids.shape[1])[-chunk.shape[1] :].expand_as(chunk)
        chunk = model.logits(model(chunk, positions, cache)[:, -1:]).argmax(-1)
        ids = torch.cat((ids, chunk), 1)
    assert len(set(ids[0, 9:].tolist())) > 3
    assert torch.equal(ids, expected)


@torch.no_grad()
@pytest.mark.parametrize("case", ["glm", "v32"])
def test_the_wrong_rotation_of_the_indexer_shows_beyond_topk_only(
    case: str, tmp_path: Path
) -> None:
    reference = build(case)
    model = load(reference, tmp_path)
    indexer = model.config.indexer
    assert indexer is not None
    other = "deepseek_v32" if case == "glm" else "glm_moe_dsa"
    wrong_indexer = replace(indexer, rope_interleaved=not indexer.rope_interleaved)
    wrong = Decoder(replace(model.config, family=other, indexer=wrong_indexer))
    wrong.load_state_dict(model.state_dict())
    ids = draw_ids(2, TOKENS)
    expected = reference(ids).logits
    logits = wrong.logits(wrong(ids))
    torch.testing.assert_close(logits[:, :TOPK], expected[:, :TOPK], atol=1e-5, rtol=1e-5)
    assert (logits - expected).abs().max() > 0.1


@pytest.mark.parametrize("case", ["glm", "glm-index-share", "v3"])
@pytest.mark.parametrize("topk", [TOPK, 64])
def test_gradients(case: str, topk: int, tmp_path: Path) -> None:
    changes = {} if case == "v3" else {"index_topk": topk}
    reference = build(case, **changes)
    model, ids = load(reference, tmp_path).train(), draw_ids(2, TOKENS)
    targets = ids.roll(-1, 1).flatten()
    loss = F.cross_entropy(model.logits(model(ids)).flatten(0, 1), targets)
    expected = F.cross_entropy(reference(ids).logits.flatten(0, 1), targets)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    loss.backward()
    expected.backward()

    # The gradient takes the place of the weights, so that it too is read by Hugging Face names.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".indexer." in name:
                # The language-model loss must not reach what selects.
                assert parameter.grad is None
                parameter.zero_()
            else:
                assert parameter.grad is not None, name
                parameter.copy_(parameter.grad)
    ours = model.hf_tensors()
    for name, parameter in reference.named_parameters():
        if ".indexer." in name:
            continue
        if ".experts." in name:
            prefix, kind = name.rsplit(".", 1)
            pieces = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
            actual = torch.stack(
                [
                    torch.cat([ours[f"{prefix}.{expert}.{piece}.weight"] for piece in pieces])
                    for expert in range(parameter.shape[0])
                ]
            )
        else:
            actual = ours[name]
        torch.testing.assert_close(
            actual, parameter.grad, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: name + text
        )
