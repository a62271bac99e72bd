"""Parts of a decoder over packed weights: what the plain parts compute, one row at a time."""

from pathlib import Path

import pytest
import torch
from engine_harness import ask, drain, latent_model, logprobs, new_core, output, random_prompt
from torch import Tensor

from headrace.engine.packed_model import EngineHeads, PackedMixture, PackedProducts
from headrace.model.block import Block
from headrace.model.checkpoint import load_checkpoint, save_checkpoint
from headrace.model.config import LatentConfig, MoeConfig
from headrace.model.decoder import Decoder
from headrace.model.latent_attention import LatentAttention
from headrace.model.moe import MixtureOfExperts
from headrace.model.rope import Rotation
from headrace.model.step import Step
from headrace.ops import row_independent, use

torch.set_num_threads(1)

DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def model_of(dtype: torch.dtype, folder: Path) -> Decoder:
    """Experts, heads and an indexer of odd widths."""
    model = latent_model(
        "glm_moe_dsa",
        hidden_size=72,
        head_dim=26,
        latent=LatentConfig(q_rank=40, kv_rank=44, nope_dim=22, rope_dim=4, value_dim=22),
        moe=MoeConfig(7, 3, 40, leading_dense=1, scaling=1.5),
    )
    save_checkpoint(model, folder / "model")
    return load_checkpoint(folder / "model", dtype=dtype)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert (got - want).abs().max() <= CLOSE[got.dtype] * want.abs().max()


def no_step() -> Step:
    return Step(Rotation(torch.empty(0), torch.empty(0), True), None)  # type: ignore[arg-type]  # unused by experts


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_token_keeps_its_bits_among_any_others(
    dtype: torch.dtype, backend: str, tmp_path: Path
) -> None:
    model = model_of(dtype, tmp_path)
    block = model.layers[1]
    assert isinstance(block, Block)
    assert isinstance(block.feed_forward, MixtureOfExperts)
    assert isinstance(block.attention, LatentAttention)
    mixture, heads = block.feed_forward, EngineHeads(block.attention)
    x, nope, latents = randn(1, 70, 72, dtype=dtype), randn(70, 4, 22), randn(70, 4, 44)
    nope, latents = nope.to(dtype), latents.to(dtype)
    w_uk, w_uv = block.attention.kv_up.weight.view(4, -1, 44).split((22, 22), dim=1)
    want = (
        mixture(x, no_step()),
        torch.einsum("shn,hnr->shr", nope, w_uk),
        torch.einsum("shr,hvr->shv", latents, w_uv),
    )

    products = PackedProducts(model, "float32", row_independent=True)
    assert sorted(products.heads or {}) == [0, 1, 2, 3]
    packed = block.feed_forward
    assert isinstance(packed, PackedMixture)

    def all_of(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        with row_independent(), use(backend):
            return (
                packed(x[:, rows], no_step()),
                heads.absorb(nope[rows]),
                heads.expand(latents[rows]),
            )

    whole = all_of(slice(None))
    for got, plain in zip(whole, want, strict=True):
        assert_close(got, plain)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for begin, end in ((0, 1), (3, 5), (5, 22), (22, 70), (1, 70)):
                mixed, absorbed, expanded = all_of(slice(begin, end))
                assert torch.equal(mixed, whole[0][:, begin:end])
                assert torch.equal(absorbed, whole[1][begin:end])
                assert torch.equal(expanded, whole[2][begin:end])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_an_indexer_asks_the_same_of_a_token_among_any_others(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = model_of(dtype, tmp_path)
    PackedProducts(model, "bfloat16")
    block = model.layers[0]
    assert isinstance(block, Block)
    assert isinstance(block.attention, LatentAttention)
    indexer = block.attention.indexer
    assert indexer is not None
    x, latent = randn(1, 70, 72, dtype=dtype), randn(1, 70, 40, dtype=dtype)
    angles = randn(1, 70, 1, 4).to(dtype)

    def all_of(rows: slice) -> list[Tensor]:
        with row_independent():
            rotation = Rotation(angles[:, rows].cos(), angles[:, rows].sin(), True)
            return [part[0] for part in indexer(x[:, rows], latent[:, rows], rotation)]

    whole = all_of(slice(None))
    assert whole[2].dtype == torch.float32
    for begin, end in ((0, 1), (3, 5), (5, 22), (1, 70)):
        for part, every in zip(all_of(slice(begin, end)), whole, strict=True):
            assert torch.equal(part, every[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_copies_follow_new_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    def outcome(core) -> list[tuple]:
        for i in range(3):
            core.add(ask(f"r{i}", random_prompt(i, 9 + 8 * i), temperature=1.0, seed=i))
        results = drain(core)
        return [(output(r), logprobs(r)) for _, r in sorted(results.items())]

    paths = [tmp_path / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        save_checkpoint(latent_model("glm_moe_dsa", seed), path)
    config = {"deterministic": True, "draft_tokens": 2}
    core = new_core(load_checkpoint(paths[0], dtype=dtype), **config)
    before = outcome(core)
    core.load_weights(str(paths[1]), 1)
    after = outcome(core)
    assert after == outcome(new_core(load_checkpoint(paths[1], dtype=dtype), **config))
    assert after != before


def test_without_row_independence_prediction_layers_stay(tmp_path: Path) -> None:
    model = model_of(torch.bfloat16, tmp_path)
    joined = [m.join for m in model.mtp.stored()] if model.mtp is not None else []
    products = PackedProducts(model, "bfloat16")
    # Experts and heads are packed wherever anything is: a decoding step's few rows read them whole.
    assert sorted(products.heads or {}) == [0, 1, 2, 3]
    mixtures = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    assert mixtures
    assert all(isinstance(m, PackedMixture) for m in mixtures)
    assert model.mtp is not None
    assert [m.join for m in model.mtp.stored()] == joined
    alone = PackedProducts(model_of(torch.bfloat16, tmp_path), "bfloat16", row_independent=True)
    assert alone.nbytes > products.nbytes
