"""Published weight versions: whole or absent, checked before use, only what changed is copied."""

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import UserError
from headrace.model import shared_folder, shared_weights
from headrace.model.checkpoint import load_checkpoint, save_checkpoint
from headrace.model.config import LatentConfig, ModelConfig, MoeConfig
from headrace.model.decoder import Decoder
from headrace.model.shared_weights import (
    MANIFEST_FILE,
    TENSORS_FILE,
    SharedWeights,
    load_shared,
    load_shared_into,
    publish,
)

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_positions=64,
    tie_embeddings=False,
)
EXPERTS = ModelConfig(
    family="deepseek_v3",
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=14,
    max_positions=64,
    rope_interleaved=True,
    latent=LatentConfig(q_rank=20, kv_rank=16, nope_dim=10, rope_dim=4, value_dim=12),
    moe=MoeConfig(4, 2, 12, leading_dense=1),
)
QUERY, EMBEDDING = "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"


def new_model(
    seed: int = 0, config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32
) -> Decoder:
    model = Decoder(config, dtype=dtype)
    model.init_weights(seed)
    return model


def publish_model(model: Decoder, folder: Path, version: int, **how: object) -> Path:
    config = model.config.to_hf()
    return publish(model.hf_tensors(), folder, version, **{"config": config, **how})  # type: ignore[arg-type]  # a test's shorthand


def same(a: Decoder, b: Decoder) -> bool:
    ours, theirs = a.hf_tensors(), b.hf_tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def change(model: Decoder, *names: str) -> None:
    for name in names:
        model.hf_tensors()[name].add_(1.0)


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_what_is_published_is_what_is_read(tmp_path: Path, config: ModelConfig) -> None:
    model = new_model(1, config)
    # As an engine lays its weights out: the file is row-major whatever memory is.
    layer: Any = model.layers[0]
    weight = layer.attention.output.weight
    weight.data = weight.data.t().contiguous().t()
    weights = SharedWeights.open(publish_model(model, tmp_path / "w", 7))
    weights.verify()
    assert weights.version == 7
    assert weights.manifest.previous_version is None
    for name, tensor in model.hf_tensors().items():
        found = weights.tensor(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor), name
    running = new_model(2, config)
    places = [parameter.data_ptr() for parameter in running.parameters()]
    held: dict[str, int] = {}
    report = load_shared_into(running, weights.path, held)
    assert same(running, model)
    assert [parameter.data_ptr() for parameter in running.parameters()] == places
    assert all(parameter.requires_grad for parameter in running.parameters())
    assert report.tensors_changed == len(model.hf_tensors())
    assert report.bytes_copied == sum(t.nbytes for t in model.hf_tensors().values())
    assert held == weights.checksums


def test_only_what_changed_is_read_and_copied(tmp_path: Path) -> None:
    model, running, held = new_model(1), new_model(2), {}
    load_shared_into(running, publish_model(model, tmp_path / "w", 1), held)
    change(model, QUERY, EMBEDDING)
    second = publish_model(model, tmp_path / "w", 2)
    weights = SharedWeights.open(second)
    assert weights.manifest.previous_version == 1
    assert set(weights.changed(held)) == {QUERY, EMBEDDING}
    assert weights.changed(weights.manifest.previous) == weights.changed(held)
    # Marks on both sides of a tensor that stayed as it was: neither is looked at.
    other = "model.layers.0.mlp.down_proj.weight"
    running.hf_tensors()[other].fill_(7.0)
    flip(second, other)
    report = load_shared_into(running, second, held)
    assert report.tensors_changed == 2
    changed = [model.hf_tensors()[name] for name in (QUERY, EMBEDDING)]
    assert report.bytes_copied == sum(t.nbytes for t in changed)
    assert bool((running.hf_tensors()[other] == 7.0).all())
    running.hf_tensors()[other].copy_(model.hf_tensors()[other])
    assert same(running, model)
    assert load_shared_into(running, second, held).bytes_copied == 0


def test_a_reader_of_an_old_version_keeps_it_and_the_newest_ones_stay(tmp_path: Path) -> None:
    models = [new_model(seed) for seed in range(5)]
    first = SharedWeights.open(publish_model(models[0], tmp_path, 0))
    view = first.tensor(QUERY)
    for version in range(1, 5):
        publish_model(models[version], tmp_path, version)
        # Whoever was told of the version before may be on its way to it.
        SharedWeights.open(tmp_path / f"v{version - 1:08d}.weights").verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v00000003.weights", "v00000004.weights"]
    first.verify()
    assert torch.equal(view, models[0].hf_tensors()[QUERY])
    # A run that went back to an older number must not lose what it just published.
    again = publish_model(models[1], tmp_path, 1)
    assert SharedWeights.open(again).manifest.previous_version is None
    publish_model(models[2], tmp_path, 1)
    load_shared_into(models[0], again, {})
    assert same(models[0], models[2])


def test_a_version_is_seen_whole_or_not_at_all(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for version in range(40):
                values = {f"t{i}": torch.full((97,), float(version)) for i in range(9)}
                publish(values, tmp_path, version, keep=100)
        except BaseException as error:  # told to the main thread
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    seen: set[int] = set()
    while writer.is_alive() or len(seen) < 40:
        for path in tmp_path.glob("*.weights"):
            weights = SharedWeights.open(path)
            weights.verify()
            values = torch.cat([weights.tensor(name) for name in weights.names])
            assert len(values) == 9 * 97
            assert bool((values == weights.version).all())
            seen.add(weights.version)
        if failures:
            raise failures[0]
    writer.join()


def flip(path: Path, name: str) -> None:
    """Change one bit in the middle of a tensor."""
    entry = SharedWeights.open(path).manifest.tensors[name]
    with (path / TENSORS_FILE).open("r+b") as file:
        file.seek(entry.offset + entry.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def edit(path: Path, **changes: object) -> None:
    """Change an entry of the manifest."""
    manifest = json.loads((path / MANIFEST_FILE).read_text())
    manifest["tensors"][QUERY] |= changes
    (path / MANIFEST_FILE).write_text(json.dumps(manifest))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit": (lambda p: flip(p, QUERY), rf"{QUERY} in {TENSORS_FILE} do not match"),
    "truncated": (lambda p: cut(p / TENSORS_FILE), f"{TENSORS_FILE} has .* bytes but"),
    "no tensors": (lambda p: (p / TENSORS_FILE).unlink(), f"{TENSORS_FILE} cannot be read"),
    "no manifest": (lambda p: (p / MANIFEST_FILE).unlink(), f"{MANIFEST_FILE} cannot be read"),
    "cut manifest": (lambda p: cut(p / MANIFEST_FILE), f"{MANIFEST_FILE} is corrupt"),
    "empty manifest": (lambda p: (p / MANIFEST_FILE).write_text("{}"), "version"),
    "checksum": (lambda p: edit(p, checksum=1), f"{QUERY} .* checksum"),
    "dtype": (lambda p: edit(p, dtype="float31"), f"corrupt .*{QUERY} is float31"),
    "no dtype": (lambda p: edit(p, dtype="nn"), f"corrupt .*{QUERY}"),
    "offset": (lambda p: edit(p, offset=1 << 40), f"corrupt .*{QUERY}"),
    "negative": (lambda p: edit(p, offset=-64), f"corrupt .*{QUERY}"),
    "shape": (lambda p: edit(p, shape=[12, 48]), f"{QUERY} has shape"),
    "nbytes": (lambda p: edit(p, shape=[24, 25]), f"corrupt .*{QUERY}"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_version_is_told_by_name_and_changes_nothing(tmp_path: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    running, held = new_model(2), {}
    load_shared_into(running, publish_model(new_model(0), tmp_path, 1), held)
    before = dict(held)
    path = publish_model(new_model(1), tmp_path, 2)
    damage(path)
    with pytest.raises(UserError, match=message) as caught:
        load_shared_into(running, path, held)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert same(running, new_model(0))
    assert held == before


def test_checksums_tell_apart_what_differs() -> None:
    """Sizes around the table's rows and slabs; bits, swapped words and swapped rows."""
    generator = torch.Generator().manual_seed(0)
    for words in (1, 511, 512, 513, 65536 + 1024, 3 * 65536 + 7):
        data = torch.randint(0, 256, (8 * words - 3,), generator=generator, dtype=torch.uint8)
        seen = {checksum(data), checksum(data[:-1])}
        changes = 2
        for at in range(0, len(data), max(1, len(data) // 9)):
            changed = data.clone()
            changed[at] ^= 1 << at % 8
            seen.add(checksum(changed))
            changes += 1
        for i, j, n in ((0, 8, 8), (8, 4096, 8), (0, 4096, 4096), (0, 1 << 19, 1 << 18)):
            if j + n <= len(data):
                swapped = data.clone()
                swapped[i : i + n], swapped[j : j + n] = data[j : j + n], data[i : i + n]
                seen.add(checksum(swapped))
                changes += 1
        assert len(seen) == changes


def checksum(data: torch.Tensor) -> int:
    return shared_weights.checksum(data.numpy().data)


def test_versions_of_other_models_are_refused(tmp_path: Path) -> None:
    running = new_model(0)
    other = new_model(1, ModelConfig(**{**vars(CONFIG), "rope_theta": 77.0}))
    path = publish_model(other, tmp_path, 1)
    with pytest.raises(UserError, match=r"rope_theta 10000\.0 -> 77\.0"):
        load_shared_into(running, path, {})
    tensors = new_model(1).hf_tensors()
    del tensors[QUERY]
    with pytest.raises(UserError, match=f"lack tensor {QUERY}"):
        load_shared_into(running, publish(tensors, tmp_path, 2), {})
    tensors = {**new_model(1).hf_tensors(), "more": torch.ones(3)}
    with pytest.raises(UserError, match="unexpected tensor more"):
        load_shared_into(running, publish(tensors, tmp_path, 3), {})
    path = publish_model(new_model(1), tmp_path, 4)
    with pytest.raises(UserError, match="are version 4, not 5"):
        load_shared_into(running, path, {}, version=5)
    assert same(running, new_model(0))


def test_tensors_are_stored_as_a_checkpoint_of_that_dtype_would(tmp_path: Path) -> None:
    model = new_model(1, EXPERTS)
    path = publish_model(model, tmp_path / "w", 1, dtype=torch.bfloat16)
    weights = SharedWeights.open(path)
    router = "model.layers.1.mlp.gate.weight"
    assert weights.tensor(router).dtype == torch.float32
    assert weights.tensor(EMBEDDING).dtype == torch.bfloat16
    save_checkpoint(model, tmp_path / "disk", dtype=torch.bfloat16)
    made = load_shared(path, dtype=torch.bfloat16)
    assert same(made, load_checkpoint(tmp_path / "disk", dtype=torch.bfloat16))
    half = new_model(3, EXPERTS, torch.bfloat16)
    report = load_shared_into(half, publish_model(model, tmp_path / "w", 2), {})
    assert same(half, made)
    assert report.bytes_copied == sum(t.nbytes for t in half.hf_tensors().values())
    with pytest.raises(UserError, match="without the model's config"):
        load_shared(publish(model.hf_tensors(), tmp_path / "w", 3))


def test_a_version_that_cannot_be_written_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish_model(new_model(0), tmp_path, 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shared_weights, "checksum", full)
        with pytest.raises(UserError, match=r"No space left.*free memory"):
            publish_model(new_model(1), tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == [first.name]
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: -1)
        with pytest.raises(UserError, match="belongs to another user"):
            publish_model(new_model(1), tmp_path, 2)
    for version, keep, tensors in ((-1, 2, {"a": torch.ones(1)}), (1, 1, {"a": torch.ones(1)})):
        with pytest.raises(ValueError, match="keep"):
            publish(tensors, tmp_path, version, keep)
    SharedWeights.open(first).verify()


def test_a_folder_is_ones_own_only_while_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert shared_folder.shared_folder("r") == tmp_path / "headrace-r"
    (tmp_path / "shm").mkdir()
    folder = tmp_path / "shm" / "headrace-r"
    publish_model(new_model(), folder, 9)

    def use() -> None:
        with shared_folder.own_folder("r") as own:
            assert own == folder
            assert not folder.exists()
            path = publish_model(new_model(), own, 1)
            assert shared_folder.is_published(path)
            assert folder.stat().st_mode & 0o777 == 0o700
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert not folder.exists()
    assert not shared_folder.is_published(tmp_path / "rl-v000001")
