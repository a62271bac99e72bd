"""A checkpoint directory of a llama as the bfloat16 GGUF file that llama.cpp reads.

Without a vocabulary: prompts and outputs are token ids.
"""

from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

from headrace.errors import UserError
from headrace.model.config import ModelConfig

_TOP_LEVEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def write_gguf(checkpoint: Path, target: Path) -> None:
    """Write the weights of a checkpoint, matrices rounded to bfloat16.

    Raises:
        UserError: a tensor that llama.cpp's llama has no place for.
    """
    config = ModelConfig.from_file(checkpoint)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for part in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(part).items():
            values = tensor.float().numpy()
            if name.endswith("q_proj.weight"):
                values = to_pairs(values, config.num_heads)
            elif name.endswith("k_proj.weight"):
                values = to_pairs(values, config.num_kv_heads)
            if values.ndim == 1:
                writer.add_tensor(_file_name(name), values)
                continue
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(_file_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def to_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from rotary halves (i, i + d/2) to pairs (2i, 2i+1)."""
    halves = rows.reshape(heads, 2, -1, rows.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _file_name(name: str) -> str:
    """llama.cpp's name of a tensor of a Hugging Face llama."""
    found = _TOP_LEVEL_NAMES.get(name)
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        if rest in _LAYER_NAMES:
            found = f"blk.{layer}.{_LAYER_NAMES[rest]}"
    if found is None:
        raise UserError(f"tensor {name!r} has no place in a llama GGUF; leave llama.cpp out")
    return found
