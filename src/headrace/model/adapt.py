"""A trained model of one architecture made into one of another: an indexer added to a dense base.

The result is a new decoder with weights of its own; the given one stays as it is. What changes the
rotary embedding alone is `Decoder.set_rope`.
"""

from dataclasses import replace

import torch

from headrace.errors import UserError
from headrace.model.config import IndexerConfig, ModelConfig, latent_family
from headrace.model.decoder import Decoder

_INDEXER = ".indexer."


def extend_with_indexer(model: Decoder, indexer: IndexerConfig, seed: int) -> Decoder:
    """The model with fresh indexers in every layer that selects, prediction layers included.

    With dense attention (`CausalAttend(mode="dense")`) the result computes what `model` does; the
    indexers are then trained against that attention before they may select.
    Source: DeepSeek-V3.2 report, dense warm-up stage; GLM-5, arXiv 2602.15763.

    Args:
        model: latent attention without an indexer; not changed.
        indexer: of the result.
        seed: of the new weights.

    Raises:
        UserError: the model has an indexer already or no latent attention.
    """
    config = model.config
    if config.latent is None:
        raise UserError(
            f"model family {config.family!r}: an indexer needs latent attention; "
            "start from a model that has it, e.g. one of preset glm5-tiny"
        )
    if config.indexer is not None:
        raise UserError(
            "model config: the model has an indexer already; train that one, or start from a "
            "dense base (indexer = none)"
        )
    extended = _with_weights_of(
        model, replace(config, indexer=indexer, family=latent_family(indexer))
    )
    extended.init_weights(seed, only=lambda name: _INDEXER in name)
    return extended


@torch.no_grad()
def _with_weights_of(model: Decoder, config: ModelConfig) -> Decoder:
    """A decoder of `config` on the same device, with copies of every weight that both have.

    Raises:
        ValueError: they differ in more than indexers.
    """
    weight = model.embed.weight
    other = Decoder(config, device=weight.device, dtype=weight.dtype)
    missing, unexpected = other.load_state_dict(model.state_dict(), strict=False)
    foreign = [name for name in (*missing, *unexpected) if _INDEXER not in name]
    if foreign or unexpected:
        raise ValueError(f"weights {foreign or unexpected} have no counterpart")
    return other.train(model.training)
