"""Checkpoints of latent-attention models: both ways, sharded, and prediction layers never lost."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_oracle import CASES, build, draw_ids
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.errors import UserError
from headrace.model import checkpoint
from headrace.model.causal import CausalAttend
from headrace.model.checkpoint import load_checkpoint, load_weights_into, save_checkpoint
from headrace.model.config import ModelConfig, MtpConfig
from headrace.model.decoder import Decoder
from headrace.model.presets import preset

FP32_ALWAYS = ("mlp.gate.weight", "e_score_correction_bias", "indexer.weights_proj.weight")


def new_model(mtp: MtpConfig | None = None, **changes: Any) -> Decoder:
    """Random weights, selection biases too."""
    mtp = MtpConfig(3, shared=True) if mtp is None else mtp
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_layers": 3, "max_positions": 64}
    config = preset("glm5-tiny", 61, mtp=mtp, **shape, **changes)
    model = Decoder(config)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return model.eval()


def read_tensors(path: Path) -> dict[str, Tensor]:
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_weights(a: Decoder, b: Decoder) -> None:
    theirs = b.hf_tensors()
    for name, tensor in a.hf_tensors().items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def load_in_transformers(path: Path) -> tuple[Any, set[str]]:
    """The model, and the weights of the file that it has no place for."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return model.eval(), set(info["unexpected_keys"])


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str, tmp_path: Path) -> None:
    reference, ids = build(case), draw_ids(2, 20)
    reference.save_pretrained(tmp_path / "from")
    model = load_checkpoint(tmp_path / "from")
    save_checkpoint(model, tmp_path / "to")
    theirs, ours = read_tensors(tmp_path / "from"), read_tensors(tmp_path / "to")
    assert set(theirs) == set(ours)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    again, unexpected = load_in_transformers(tmp_path / "to")
    assert not unexpected
    assert type(again) is type(reference)
    # Loaded anew, transformers attends and multiplies experts with other kernels.
    torch.testing.assert_close(again(ids).logits, reference(ids).logits, atol=1e-5, rtol=0)
    assert ModelConfig.from_file(tmp_path / "to") == model.config


@torch.no_grad()
def test_sharded_by_transformers(tmp_path: Path) -> None:
    reference, ids = build("glm"), draw_ids(2, 20)
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    model = load_checkpoint(tmp_path)
    torch.testing.assert_close(model.logits(model(ids)), reference(ids).logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_sharded_by_headrace(tmp_path: Path) -> None:
    model, ids = new_model(), torch.randint(0, 61, (2, 20))
    save_checkpoint(model, tmp_path / "it", max_shard_bytes=100_000)
    files = sorted(path.name for path in (tmp_path / "it").iterdir())
    count = len(files) - 2
    assert count > 3
    assert files == [
        "config.json",
        *(f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "it" / "model.safetensors.index.json").read_text())
    sizes = dict.fromkeys(files[1:-1], 0)
    for name, tensor in read_tensors(tmp_path / "it").items():
        sizes[index["weight_map"][name]] += tensor.nbytes
    assert max(sizes.values()) <= 100_000
    assert sum(sizes.values()) == index["metadata"]["total_size"]

    assert_same_weights(model, load_checkpoint(tmp_path / "it"))
    other, unexpected = load_in_transformers(tmp_path / "it")
    assert all(name.startswith("model.layers.3.") for name in unexpected)
    torch.testing.assert_close(other(ids).logits, model.logits(model(ids)), atol=1e-5, rtol=0)

    # A whole checkpoint in place of a sharded one leaves nothing of it.
    save_checkpoint(model, tmp_path / "it")
    assert sorted(p.name for p in (tmp_path / "it").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_saving_holds_one_shard_of_converted_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, limit = new_model(), 50_000
    alive: list[weakref.ref[Tensor]] = []
    written: list[int] = []

    def watch(tensors: dict[str, Tensor], *arguments: Any, **options: Any) -> None:
        converted = [x for x in tensors.values() if x.dtype == torch.bfloat16]
        assert all(reference() is None for reference in alive)
        alive[:] = [weakref.ref(x) for x in converted]
        written.append(sum(x.nbytes for x in tensors.values()))
        save_file(tensors, *arguments, **options)

    monkeypatch.setattr(checkpoint, "save_file", watch)
    save_checkpoint(model, tmp_path / "it", dtype=torch.bfloat16, max_shard_bytes=limit)
    assert len(written) > 3
    assert max(written) <= limit


def test_a_tensor_larger_than_a_shard_stands_alone(tmp_path: Path) -> None:
    model = new_model()
    save_checkpoint(model, tmp_path / "it", max_shard_bytes=1)
    assert len(list((tmp_path / "it").glob("*.safetensors"))) == len(model.hf_tensors())
    assert_same_weights(model, load_checkpoint(tmp_path / "it"))


def test_what_decides_stays_in_fp32(tmp_path: Path) -> None:
    model = new_model()
    save_checkpoint(model, tmp_path / "half", dtype=torch.bfloat16)
    stored, original = read_tensors(tmp_path / "half"), model.hf_tensors()
    exact = [name for name in stored if name.endswith(FP32_ALWAYS)]
    # Three layers select and one predicts; two of them and the predicting one have experts.
    assert len(exact) == 4 + 3 + 3
    for name, tensor in stored.items():
        assert tensor.dtype == (torch.float32 if name in exact else torch.bfloat16), name
    loaded = load_checkpoint(tmp_path / "half", dtype=torch.bfloat16)
    for name, tensor in loaded.hf_tensors().items():
        assert tensor.dtype == (torch.float32 if name in exact else torch.bfloat16), name
        if name in exact:
            assert torch.equal(tensor, original[name])
    save_checkpoint(loaded, tmp_path / "again")
    again = read_tensors(tmp_path / "again")
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())


@torch.no_grad()
@pytest.mark.parametrize(
    "mtp", [MtpConfig(3, shared=True), MtpConfig(1, shared=True), MtpConfig(2, shared=False)]
)
def test_prediction_layers_come_back_bit_for_bit(mtp: MtpConfig, tmp_path: Path) -> None:
    model, ids = new_model(mtp), torch.randint(0, 61, (2, 20))
    save_checkpoint(model, tmp_path / "it")
    names = {name for name in read_tensors(tmp_path / "it") if _layer(name) >= 3}
    assert {_layer(name) for name in names} == set(range(3, 3 + mtp.stored_layers))
    for piece in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.indexer.wq_b"):
        assert f"model.layers.3.{piece}.weight" in names
    loaded = load_checkpoint(tmp_path / "it")
    assert loaded.config == model.config
    assert_same_weights(model, loaded)
    results = []
    for which in (model, loaded):
        hidden, attend = which(ids), CausalAttend()
        for step in range(mtp.depth):
            hidden = which.mtp_forward(step, hidden, ids, attend=attend)
        results.append(hidden)
    assert torch.equal(*results)
    other = new_model(mtp)
    other.init_weights(9)
    load_weights_into(other, tmp_path / "it")
    assert_same_weights(model, other)


def _layer(name: str) -> int:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def test_promised_prediction_layers_that_are_not_there(tmp_path: Path) -> None:
    save_checkpoint(new_model(), tmp_path / "it")
    file = tmp_path / "it" / "model.safetensors"
    # What saving with transformers does: the config keeps its promise, the weights are gone.
    save_file({k: v for k, v in load_file(file).items() if _layer(k) < 3}, file)
    with pytest.raises(UserError) as caught:
        load_checkpoint(tmp_path / "it")
    for piece in ("model.layers.3.", "num_nextn_predict_layers = 1", "original checkpoint", "to 0"):
        assert piece in str(caught.value)
    config = json.loads((tmp_path / "it" / "config.json").read_text())
    config["num_nextn_predict_layers"] = 0
    (tmp_path / "it" / "config.json").write_text(json.dumps(config))
    assert load_checkpoint(tmp_path / "it").mtp is None


def test_prediction_layers_nobody_asked_for_are_not_dropped(tmp_path: Path) -> None:
    model = new_model()
    save_checkpoint(model, tmp_path / "it")
    config = replace(model.config, mtp=None).to_hf()
    (tmp_path / "it" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="num_nextn_predict_layers = 0 and the file more"):
        load_checkpoint(tmp_path / "it")


@pytest.mark.parametrize("ending", ["embed_tokens.weight", "shared_head.head.weight"])
def test_copies_in_prediction_layers_must_be_copies(ending: str, tmp_path: Path) -> None:
    model = new_model(tie_embeddings=False)
    save_checkpoint(model, tmp_path / "it")
    file = tmp_path / "it" / "model.safetensors"
    tensors = load_file(file)
    original = "lm_head.weight" if "head" in ending else "model.embed_tokens.weight"
    tensors[f"model.layers.3.{ending}"] = tensors[original].clone()
    save_file(tensors, file)
    assert_same_weights(model, load_checkpoint(tmp_path / "it"))
    tensors[f"model.layers.3.{ending}"][5, 5] += 1
    save_file(tensors, file)
    with pytest.raises(UserError, match=rf"{ending} differs from {original}"):
        load_checkpoint(tmp_path / "it")


def test_lacking_weights_of_all_kinds_name_no_wrong_remedy(tmp_path: Path) -> None:
    save_checkpoint(new_model(), tmp_path / "it")
    file = tmp_path / "it" / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if _layer(k) < 2}, file)
    with pytest.raises(UserError, match=r"lacks weight model\.layers\.2.* do not belong together"):
        load_checkpoint(tmp_path / "it")
