"""Tiny latent-attention models in transformers, and a cache that keeps the contract of `Attend`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

from headrace.model.attention import LatentQuery
from headrace.model.checkpoint import load_checkpoint
from headrace.model.decoder import Decoder
from headrace.ops import Layout, select_topk, sparse_latent_attention

VOCAB = 97
TOPK = 6
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
# So many indexer heads that sums of relus are never zero twice in a row of scores: where two scores
# are equal at the cut, transformers picks either key.
INDEXER = {"index_topk": TOPK, "index_head_dim": 16, "index_n_heads": 16}
SHARED = ["full", "shared", "full", "shared"]
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "glm": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM, INDEXER),
    "glm-tied": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM, {**INDEXER, "tie_word_embeddings": True}),
    "glm-index-share": (
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
        {**INDEXER, "indexer_types": SHARED},
    ),
    "glm-index-frequency": (
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
        {**INDEXER, "num_hidden_layers": 6, "index_topk_freq": 3, "index_skip_topk_offset": 2},
    ),
    "glm-two-dense": (
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
        {
            **INDEXER,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "v32": (DeepseekV32Config, DeepseekV32ForCausalLM, INDEXER),
    # This config promises a prediction layer unless told otherwise, and the model has none.
    "v3": (DeepseekV3Config, DeepseekV3ForCausalLM, {"num_nextn_predict_layers": 0}),
}
SPARSE = [name for name in CASES if name != "v3"]


def build(case: str, **changes: Any) -> Any:
    """A random model of transformers in eval mode, norms and selection biases drawn as well."""
    config, kind, values = CASES[case]
    torch.manual_seed(0)
    model: Any = kind(config(**{**TINY, **values, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                # Far from uniform attention and logits, so that an error shows.
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model.eval()


def load(reference: Any, path: Path) -> Decoder:
    """The same weights in headrace, by way of a checkpoint."""
    reference.save_pretrained(path)
    return load_checkpoint(path).eval()


def draw_ids(*shape: int, seed: int = 1) -> Tensor:
    """Token ids, none of them the padding id."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


class Selections:
    """Records what transformers' indexers select: {layer: [B, T, topk]}."""

    def __init__(self, model: Any) -> None:
        self.by_layer: dict[int, Tensor] = {}
        for index, layer in enumerate(model.model.layers):
            indexer = getattr(layer.self_attn, "indexer", None)
            if indexer is not None:
                indexer.register_forward_hook(
                    lambda *call, index=index: self.by_layer.__setitem__(index, call[-1])
                )

    def sets(self, layer: int, visible: list[list[range]]) -> list[list[set[int]]]:
        """Per row and token, the selected keys among those visible to it."""
        chosen = self.by_layer[layer].tolist()
        return [
            [set(keys) & set(seen) for keys, seen in zip(row, ranges, strict=True)]
            for row, ranges in zip(chosen, visible, strict=True)
        ]


class GrowingLatentCache:
    """Everything seen so far, per sequence; the new tokens select and attend over all of it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Tensor] = {}
        self._selection: Tensor | None = None
        self.selections: dict[int, Tensor] = {}
        """Of the newest call: [B, T, topk], keys counted from each sequence's first."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError("latent attention only")

    def attend_latent(self, layer: int, query: LatentQuery) -> Tensor:
        batch, tokens = query.latent.shape[:2]
        rows = self._grow(layer, "kv", torch.cat((query.latent, query.k_rope), -1))
        length = rows.shape[1]
        starts = tuple(range(0, batch * length, length))
        layout = Layout(
            tuple(range(0, batch * tokens, tokens)), (tokens,) * batch, starts, (length,) * batch
        )
        if query.index is not None:
            keys = self._grow(layer, "index", query.index.k)
            assert query.topk is not None
            self._selection = select_topk(
                query.index.q.flatten(0, 1),
                query.index.weights.flatten(0, 1),
                keys.flatten(0, 1),
                layout,
                query.topk,
            )
            first = torch.tensor(starts)[:, None, None]
            chosen = self._selection.view(batch, tokens, -1)
            self.selections[layer] = torch.where(chosen < 0, chosen, chosen - first)
        if query.topk is None:
            _, upper = layout.bounds(batch * tokens)
            within = (
                torch.arange(length)[None] + torch.tensor(starts).repeat_interleave(tokens)[:, None]
            )
            chosen = torch.where(within < upper[:, None], within, -1).int()
        else:
            assert self._selection is not None
            chosen = self._selection
        absorbed = torch.einsum("bthn,hnr->bthr", query.q_nope, query.w_uk)
        out, _ = sparse_latent_attention(
            torch.cat((absorbed, query.q_rope), -1).flatten(0, 1),
            rows.flatten(0, 1),
            chosen,
            scale=query.scale,
            value_dim=query.latent.shape[-1],
        )
        return torch.einsum("bthr,hvr->bthv", out.unflatten(0, (batch, tokens)), query.w_uv)

    def _grow(self, layer: int, what: str, new: Tensor) -> Tensor:
        """All rows of [B, L, width] so far, `new` included."""
        held = self._kept.get((layer, what))
        self._kept[layer, what] = new.clone() if held is None else torch.cat((held, new), 1)
        return self._kept[layer, what]
