"""What a checkpoint directory says about itself without loading it: vocabulary, kind, tensors.

Adapters of inference servers ask it before they point a server at a directory: servers load what
they find, keep old tensors where new ones are missing, and some end when they find nothing. Knows
neither torch nor any server.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.model.shared_folder import is_published

_HEADER_LIMIT = 100 << 20
"""Longest header that the safetensors format allows, bytes."""
_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")


class ServedCheckpoint:
    """A checkpoint directory as its files describe it.

    Args:
        path: directory with config.json and safetensors files.

    Raises:
        UserError: it cannot be read, or a file of it is incomplete.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if is_published(path):
            raise UserError(
                f"weights {path}: inference servers read checkpoint directories, not versions in "
                'shared memory; set engine.weight_transport = "disk"'
            )
        self.config = _read_config(self.path)
        self.tensors = _read_tensors(self.path)

    @property
    def vocab_size(self) -> int:
        """Ids are below this.

        Raises:
            UserError: config.json does not say.
        """
        return self._positive("vocab_size")

    @property
    def max_positions(self) -> int:
        """Most tokens of prompt + output the model was made for.

        Raises:
            UserError: config.json does not say.
        """
        return self._positive("max_position_embeddings")

    @property
    def has_experts(self) -> bool:
        """Whether feed-forward layers choose among experts."""
        return any(_count(self._text_config.get(key)) > 1 for key in _EXPERT_KEYS)

    @property
    def has_latent_attention(self) -> bool:
        """Whether keys and values are kept as latents (MLA)."""
        return bool(self._text_config.get("kv_lora_rank"))

    def require_same_tensors(self, other: "ServedCheckpoint") -> None:
        """Refuse `other` as new weights of this model unless it has the same tensors.

        Raises:
            UserError: names a tensor that is missing, new, or of another shape.
        """
        for name in sorted(self.tensors.keys() | other.tensors.keys()):
            ours, theirs = self.tensors.get(name), other.tensors.get(name)
            if ours != theirs:
                raise UserError(
                    f"weights {other.path}: tensor {name} is {_words(theirs)} there and "
                    f"{_words(ours)} in {self.path}; give a checkpoint of the same model"
                )

    @property
    def _text_config(self) -> Mapping[str, Any]:
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    def _positive(self, key: str) -> int:
        number = _count(self._text_config.get(key))
        if number < 1:
            raise UserError(f"{self.path / 'config.json'}: {key} is missing; add it")
        return number


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _words(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"checkpoint {path}: {file.name} cannot be read ({error.strerror}); name a checkpoint "
            "directory that this machine sees as well as the server"
        ) from error
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{file}: must be a JSON object")
    return config


def _read_tensors(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, from the headers of all safetensors files."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"checkpoint {path}: holds no *.safetensors file; save it as safetensors")
    tensors: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            tensors |= _read_header(file)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise UserError(
                f"{file}: not a complete safetensors file ({error}); save the checkpoint again"
            ) from error
    return tensors


def _read_header(file: Path) -> dict[str, tuple[int, ...]]:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > _HEADER_LIMIT:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if file.stat().st_size != 8 + size + end:
        raise ValueError(f"{file.stat().st_size} bytes, but its header describes {8 + size + end}")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}
