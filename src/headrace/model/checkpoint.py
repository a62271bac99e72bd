"""Hugging Face checkpoint directories in and out: config.json and safetensors, whole or sharded.

Works on a decoder's tensors under their Hugging Face names (`Decoder.hf_tensors`), so it knows no
architecture. Names and shapes are checked for the whole checkpoint before the first weight changes.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.errors import UserError
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.directory_swap import replaced_directory

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Largest weights file written by default; a checkpoint that needs more is split."""
_ALWAYS_FP32 = ("mlp.gate.weight", "e_score_correction_bias", "indexer.weights_proj.weight")
_DERIVED = ("rotary_emb.inv_freq",)
_COPIES = {
    ".embed_tokens.weight": "model.embed_tokens.weight",
    ".shared_head.head.weight": "lm_head.weight",
}
"""What some writers repeat in prediction layers, by ending, and the weight it must equal."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class HalfLoaded(RuntimeError):
    """A checkpoint failed when a part of it was already in the model, whose weights are now of no
    version."""


def load_checkpoint(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Decoder:
    """Build a decoder from a Hugging Face directory.

    Args:
        path: directory with config.json and model.safetensors, or a sharded index.
        dtype: what the weights are cast to.
        device: where they go; None is torch's default device.

    Raises:
        UserError: unsupported architecture, or a missing, corrupt or unfitting file.
    """
    model = Decoder(ModelConfig.from_file(path), device=device, dtype=dtype)
    with torch.no_grad():
        for target, source in _checked_weights(model, Path(path)):
            target.copy_(source)
    return model


@torch.no_grad()
def load_weights_into(model: Decoder, path: str | Path) -> None:
    """Overwrite the weights of `model` in place with those of a checkpoint; nothing is reallocated.

    Storage, dtype and device of the parameters stay, so optimizers, compiled graphs and shared
    memory keep pointing at them. An error that can be told from the files' headers leaves the model
    as it was.

    Raises:
        UserError: a missing, corrupt or unfitting file, or another architecture than the model's;
            the model is as it was.
        HalfLoaded: the files failed later than that.
    """
    check_architecture(model.config, ModelConfig.from_file(path), f"checkpoint {path}")
    begun = False
    try:
        for target, source in _checked_weights(model, Path(path)):
            begun = True
            target.copy_(source)
    except Exception as error:
        if not begun:
            raise
        raise HalfLoaded(
            f"checkpoint {path} failed when parts of it were loaded ({error}); "
            "these weights are of no version"
        ) from error


def check_architecture(running: ModelConfig, config: ModelConfig, what: str) -> None:
    """Refuse weights of another model.

    Args:
        running: the model that is to take them.
        config: of the weights.
        what: their name in the message.

    Raises:
        UserError: the two differ.
    """
    if config == running:
        return
    changed = ", ".join(
        f"{name} {getattr(running, name)!r} -> {getattr(config, name)!r}"
        for name in vars(config)
        if getattr(config, name) != getattr(running, name)
    )
    raise UserError(
        f"{what}: not the running model's architecture ({changed}); load weights of the same model"
    )


def save_checkpoint(
    model: Decoder,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Hugging Face directory that headrace and transformers load, replacing `path` at once.

    Of weights that have to be converted or moved to the CPU, one file's worth is held at a time.
    Routers, their selection biases and the indexers' head weights are stored as fp32 always.

    Args:
        model: weights are read as they are now.
        path: directory to create or replace as a whole.
        dtype: of the stored weights; None keeps each weight's own.
        tokenizer_from: directory whose tokenizer files are copied along; may be `path` itself.
        max_shard_bytes: largest file; a model that needs more is written as several with an index.
            A single tensor is never split.

    Raises:
        UserError: the directory cannot be written, or `tokenizer_from` has no tokenizer.
    """
    config = checkpoint_config(model, dtype)
    with checkpoint_directory(Path(path)) as draft:
        if tokenizer_from is not None:
            copy_tokenizer(Path(tokenizer_from), draft)
        write_weights(
            model.hf_tensors(), config, draft, dtype=dtype, max_shard_bytes=max_shard_bytes
        )


def checkpoint_config(model: Decoder, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Contents of the config.json of a model's checkpoint, stored as `dtype` or as it is."""
    return {**model.config.to_hf(), "dtype": _name(dtype or model.embed.weight.dtype)}


@contextmanager
def checkpoint_directory(path: Path) -> Iterator[Path]:
    """`replaced_directory`, with what the file system refuses turned into one line for the user."""
    try:
        with replaced_directory(path) as draft:
            yield draft
    except (OSError, SafetensorError) as error:
        # safetensors reports a full disk as its own error type.
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"checkpoint {path}: cannot be written ({reason}); "
            "free disk space or choose another directory"
        ) from error


def write_weights(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json and the weights, in one file or several, into an existing directory.

    Args:
        tensors: by Hugging Face name; any device.
        config: contents of config.json.
        path: the directory.
        dtype, max_shard_bytes: as for `save_checkpoint`.

    Raises:
        OSError, SafetensorError: the files cannot be written.
    """
    config_file = path / "config.json"
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # safetensors makes its files private whatever the umask says; readers may be other users.
    mode = config_file.stat().st_mode & 0o777
    sizes = {
        name: tensor.numel() * stored_dtype(name, tensor, dtype).itemsize
        for name, tensor in tensors.items()
    }
    shards = _split(sizes, max_shard_bytes)
    files = [WEIGHTS_FILE]
    if len(shards) > 1:
        files = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
        weight_map = {
            name: file for file, names in zip(files, shards, strict=True) for name in names
        }
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (path / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file, names in zip(files, shards, strict=True):
        stored = {
            name: tensors[name].to("cpu", stored_dtype(name, tensors[name], dtype)).contiguous()
            for name in names
        }
        save_file(stored, path / file, metadata={"format": "pt"})
        (path / file).chmod(mode)


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, in groups of at most `limit` bytes; one that is larger stands alone."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer files of one checkpoint directory into another.

    Raises:
        UserError: `source` holds none.
        OSError: a file cannot be copied.
    """
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise UserError(
            f"tokenizer directory {source}: holds no tokenizer files; "
            "give a directory with tokenizer.json"
        )
    for name in found:
        shutil.copyfile(source / name, target / name)


def _checked_weights(model: Decoder, path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """The model's weights and the checkpoint's, in pairs, once every name and shape is checked."""
    targets = model.hf_tensors()
    with ExitStack() as stack:
        sources: dict[str, Any] = {}
        for file in _weight_files(path):
            opened = stack.enter_context(_open(file))
            sources |= dict.fromkeys(opened.keys(), opened)
        _check_names(path, set(sources), set(targets), model.config)
        _check_copies(path, sources)
        for name, target in targets.items():
            shape = tuple(sources[name].get_slice(name).get_shape())
            if shape != tuple(target.shape):
                raise UserError(
                    f"checkpoint {path}: {name} has shape {list(shape)} but config.json asks for "
                    f"{list(target.shape)}; the two files do not belong together"
                )
        for name, target in targets.items():
            yield target, sources[name].get_tensor(name)


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, each once."""
    if (path / WEIGHTS_FILE).is_file():
        return [path / WEIGHTS_FILE]
    index = path / INDEX_FILE
    if not index.is_file():
        raise UserError(
            f"checkpoint {path}: has neither {WEIGHTS_FILE} nor {INDEX_FILE}; "
            "convert the weights to safetensors or give another directory"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is corrupt ({error}); restore the file") from error
    for name in names:
        # A shard lies beside its index: a name that leads elsewhere is not a checkpoint's.
        if Path(name).name != name or not (path / name).is_file():
            raise UserError(f"{index}: shard {name!r} is missing; restore the file")
    return [path / name for name in names]


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} is corrupt or unreadable ({error}); restore the file from its source"
        ) from error


def _check_names(path: Path, found: set[str], wanted: set[str], config: ModelConfig) -> None:
    # Some writers also store what is derived or held once elsewhere.
    extra = {name for name in found - wanted if not name.endswith((*_DERIVED, *_COPIES))}
    if config.tie_embeddings:
        extra.discard("lm_head.weight")
    lacking = wanted - found
    count = 0 if config.mtp is None else config.mtp.stored_layers
    predicting = f"num_nextn_predict_layers = {count}"
    for problem, names, remedy in (
        ("lacks", lacking, "weights and config.json do not belong together"),
        ("has the unexpected", extra, "weights and config.json do not belong together"),
    ):
        if not names:
            continue
        if all(_layer(name) >= config.num_layers for name in names):
            # transformers neither loads nor saves prediction layers.
            remedy = (
                f"config.json promises prediction layers ({predicting}) that are not there: take "
                "the original checkpoint, or set that field to 0 to go on without them"
                if names is lacking
                else f"config.json has {predicting} and the file more prediction layers: set that "
                "field to their number"
            )
        first = min(names)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UserError(f"checkpoint {path}: {problem} weight {first}{more}; {remedy}")


def _layer(name: str) -> int:
    """Index of the layer a Hugging Face weight belongs to; -1 for none."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _check_copies(path: Path, sources: Mapping[str, Any]) -> None:
    """Raises UserError when a prediction layer has an embedding or output of its own.

    There is no place to put it, and dropping it would change what the layer predicts.
    """
    for name, source in sources.items():
        original = next((o for ending, o in _COPIES.items() if name.endswith(ending)), name)
        if original not in sources:
            # With tied embeddings the output projection is not stored.
            original = "model.embed_tokens.weight"
        if original == name:
            continue
        if not torch.equal(source.get_tensor(name), sources[original].get_tensor(original)):
            raise UserError(
                f"checkpoint {path}: {name} differs from {original}; prediction layers with an "
                "embedding or output of their own are not supported: use another checkpoint"
            )


def stored_dtype(name: str, view: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What a weight is stored as when `dtype` is asked for; None is its own.

    Rounding a few of them, routers for one, to bfloat16 would change discrete choices.
    """
    return view.dtype if dtype is None or name.endswith(_ALWAYS_FP32) else dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
