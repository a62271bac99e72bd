"""Checkpoints to and from transformers, hot loading, and files that are broken."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint, load_weights_into, save_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.directory_swap import replaced_directory

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    eos_token_ids=(2,),
)


def new_model(seed: int = 0, config: ModelConfig = CONFIG) -> Decoder:
    model = Decoder(config)
    model.init_weights(seed)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved tiny checkpoint."""
    save_checkpoint(new_model(), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@torch.no_grad()
def test_round_trip_through_headrace_and_transformers(
    reference: Any, load_in_transformers: Callable[[Path], Any], tmp_path: Path, ids: Tensor
) -> None:
    reference.save_pretrained(tmp_path / "from")
    model = load_checkpoint(tmp_path / "from")
    save_checkpoint(model, tmp_path / "to")
    for name, tensor in load_file(tmp_path / "from" / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "to" / "model.safetensors")[name], tensor), name
    again = load_in_transformers(tmp_path / "to")
    assert type(again) is type(reference)
    torch.testing.assert_close(again(ids).logits, reference(ids).logits, atol=0, rtol=0)


@torch.no_grad()
def test_sharded_checkpoint(
    make_reference: Callable[..., Any], tmp_path: Path, ids: Tensor
) -> None:
    reference = make_reference("llama")
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = load_checkpoint(tmp_path)
    torch.testing.assert_close(model.logits(model(ids)), reference(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "model-9.safetensors"])
def test_missing_shard(saved: Path, shard: str) -> None:
    (saved / "model.safetensors").rename(saved.parent / "elsewhere.safetensors")
    index = {"weight_map": {"model.norm.weight": shard}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"shard .* is missing"):
        load_checkpoint(saved)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_corrupt_index(saved: Path, text: str) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="is corrupt"):
        load_checkpoint(saved)


def test_bf16_storage(tmp_path: Path) -> None:
    model = new_model()
    save_checkpoint(model, tmp_path / "half", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_checkpoint(tmp_path / "half")
    assert loaded.embed.weight.dtype == torch.float32
    assert torch.equal(loaded.embed.weight, model.embed.weight.bfloat16().float())
    assert load_checkpoint(tmp_path / "half", dtype=torch.bfloat16).norm.weight.dtype == (
        torch.bfloat16
    )


def test_hot_load_keeps_storage(tmp_path: Path) -> None:
    running, newer = new_model(0), new_model(1)
    save_checkpoint(newer, tmp_path / "newer")
    places = [parameter.data_ptr() for parameter in running.parameters()]
    load_weights_into(running, tmp_path / "newer")
    assert places == [parameter.data_ptr() for parameter in running.parameters()]
    for a, b in zip(running.parameters(), newer.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad


def test_hot_load_of_another_architecture_changes_nothing(tmp_path: Path) -> None:
    other = ModelConfig(**{**vars(CONFIG), "rope_theta": 77.0})
    save_checkpoint(new_model(1, other), tmp_path / "other")
    running = new_model(0)
    with pytest.raises(UserError, match=r"rope_theta 10000\.0 -> 77\.0"):
        load_weights_into(running, tmp_path / "other")
    assert torch.equal(running.embed.weight, new_model(0).embed.weight)


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, -1])
def test_truncated_weights_change_nothing(saved: Path, keep: float) -> None:
    file = saved / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    running = new_model(5)
    with pytest.raises(UserError, match=r"model\.safetensors is corrupt") as caught:
        load_weights_into(running, saved)
    assert "\n" not in str(caught.value)
    for a, b in zip(running.parameters(), new_model(5).parameters(), strict=True):
        assert torch.equal(a, b)


def test_weights_that_do_not_fit(saved: Path) -> None:
    file = saved / "model.safetensors"
    good = load_file(file)
    lacking = {name: tensor for name, tensor in good.items() if "layers.1" not in name}
    name = "model.layers.0.self_attn.k_proj.weight"
    for tensors, message in (
        (lacking, r"lacks weight model\.layers\.1\..* and 8 more"),
        ({**good, "model.extra": torch.zeros(1)}, r"unexpected weight model\.extra"),
        ({**good, name: torch.zeros(3, 48)}, r"k_proj\.weight has shape \[3, 48\] .* \[16, 48\]"),
    ):
        save_file(tensors, file)
        with pytest.raises(UserError, match=message):
            load_checkpoint(saved)


def test_derived_weights_are_ignored(tmp_path: Path) -> None:
    model = new_model(0, ModelConfig(**{**vars(CONFIG), "tie_embeddings": True}))
    save_checkpoint(model, tmp_path / "tied")
    file = tmp_path / "tied" / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, file)
    assert torch.equal(load_checkpoint(tmp_path / "tied").embed.weight, model.embed.weight)


def test_directory_without_weights(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has neither model\.safetensors nor"):
        load_checkpoint(saved)


def test_tokenizer_travels(saved: Path, tmp_path: Path) -> None:
    (saved / "tokenizer.json").write_text("{}")
    (saved / "chat_template.jinja").write_text("hi")
    (saved / "optimizer.pt").write_text("not a tokenizer")
    save_checkpoint(new_model(), saved, tokenizer_from=saved)
    assert {path.name for path in saved.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    with pytest.raises(UserError, match="holds no tokenizer files"):
        save_checkpoint(new_model(), tmp_path / "new", tokenizer_from=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_full_disk_keeps_the_old_checkpoint(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on file size fails a write in the middle, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(UserError, match=r"cannot be written .* free disk space"):
            save_checkpoint(new_model(1), saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (saved / "model.safetensors").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint"]


def test_target_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        save_checkpoint(new_model(), tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "x"


def test_reader_of_a_replaced_directory_sees_old_or_new(tmp_path: Path) -> None:
    target = tmp_path / "it"
    with replaced_directory(target) as draft:
        (draft / "a").write_text("old")
        assert not target.exists()
    with (target / "a").open() as held:
        with replaced_directory(target) as draft:
            (draft / "a").write_text("new")
            assert (target / "a").read_text() == "old"
        assert (target / "a").read_text() == "new"
        assert held.read() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_replacing_without_the_exchange_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.model.directory_swap.ctypes.CDLL", lambda *_, **__: object())
    for value in ("old", "new"):
        with replaced_directory(tmp_path / "it") as draft:
            (draft / "a").write_text(value)
    assert (tmp_path / "it" / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_drafts_of_dead_writers_are_removed(tmp_path: Path) -> None:
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    (tmp_path / f".it.draft-{dead}-aa").mkdir()
    (tmp_path / f".it.draft-{os.getpid()}-bb").mkdir()
    (tmp_path / f".other.draft-{dead}-cc").mkdir()
    with replaced_directory(tmp_path / "it"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {
        "it",
        f".it.draft-{os.getpid()}-bb",
        f".other.draft-{dead}-cc",
    }
