"""`headrace model`: what a model shape consists of, as a table.

Works on a `ModelConfig` alone, so that a shape of any size can be looked at on any machine.
"""

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from headrace.errors import UserError
from headrace.model.config import ModelConfig
from headrace.model.presets import PRESETS, cache_bytes_per_token, count_parameters, preset


def find_config(name: str) -> ModelConfig:
    """The shape a preset's name or a checkpoint directory stands for.

    Raises:
        UserError: neither, or an unsupported checkpoint.
    """
    if name not in PRESETS and Path(name).is_dir():
        return ModelConfig.from_file(name)
    try:
        return preset(name)
    except UserError as error:
        raise UserError(f"{error} (or give a checkpoint directory)") from error


def model_table(name: str) -> Table:
    """Shape, parameters and cache size of a preset or checkpoint directory.

    Raises:
        UserError: see `find_config`.
    """
    config = find_config(name)
    table = Table(title=name, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for row in (*_shape(config), *_size(config)):
        table.add_row(*row)
    return table


def _shape(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Rows about the architecture."""
    latent, indexer, moe, mtp = config.latent, config.indexer, config.moe, config.mtp
    yield "written as", config.family
    yield "layers", f"{config.num_layers} of hidden size {config.hidden_size}"
    tied = "tied with" if config.tie_embeddings else "apart from"
    yield "vocabulary", f"{config.vocab_size}, embedding {tied} output projection"
    yield "positions", f"{config.max_positions}, rotary base {config.rope_theta:.10g}"
    if latent is None:
        yield (
            "attention",
            f"grouped-query: {config.num_heads} heads of {config.head_dim}, "
            f"{config.num_kv_heads} for keys and values",
        )
    else:
        yield (
            "attention",
            f"multi-latent: {config.num_heads} heads of {latent.nope_dim} + {latent.rope_dim} "
            f"rotated, values {latent.value_dim}, ranks {latent.q_rank} and {latent.kv_rank}",
        )
    if indexer is not None:
        sharing = sum(indexer.shared)
        shared = f", {sharing} layers share a selection" if sharing else ""
        yield (
            "indexer",
            f"{indexer.num_heads} heads of {indexer.head_dim}, top {indexer.topk}{shared}",
        )
    dense = config.num_layers if moe is None else moe.leading_dense
    if dense:
        yield "dense layers", f"{dense}, inner width {config.intermediate_size}"
    if moe is not None:
        yield (
            "expert layers",
            f"{config.num_layers - dense}, {moe.experts_per_token} of {moe.num_experts} experts "
            f"+ {moe.num_shared} shared, inner width {moe.intermediate_size}",
        )
    if mtp is not None:
        sets = "one set of parameters" if mtp.shared else f"{mtp.stored_layers} sets of parameters"
        yield "prediction steps", f"{mtp.depth}, {sets}"


def _size(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Rows about parameters and memory."""
    count = count_parameters(config)
    yield "total parameters", f"{_short(count.total)} ({count.total:,})"
    for part, size in sorted(count.by_part.items(), key=lambda item: -item[1]):
        yield f"  {part}", f"{_short(size)}, {size / count.total:.1%}"
    yield "active per token", f"{_short(count.active)} ({count.active:,}), input embedding left out"
    if count.mtp:
        yield "prediction layers", f"{_short(count.mtp)} more ({count.mtp:,})"
    yield "weights in bf16", _short(2 * count.stored, ("TB", "GB", "MB", "kB"))
    size = cache_bytes_per_token(config)
    context = _short(size * config.max_positions, ("TB", "GB", "MB", "kB"))
    yield "cache per token", f"{size:,} bytes in bf16; {context} for all positions"


def _short(count: int, units: tuple[str, ...] = ("T", "B", "M", "k")) -> str:
    """Three digits and a unit; units are of 10^12, 10^9, 10^6 and 10^3."""
    for power, unit in zip((12, 9, 6, 3), units, strict=True):
        value = count / 10**power
        if value >= 1:
            return f"{value:.{max(0, 3 - len(str(int(value))))}f}{' ' * (len(unit) > 1)}{unit}"
    return str(count)
