"""What can be said of a recipe's models and data before anything starts, and without torch.

The model's shape is followed from stage to stage, data is looked at where it lies. A mistake found
here costs a second; found by the stage that meets it, it costs the stages before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from headrace.data.corpora import open_corpus
from headrace.errors import UserError
from headrace.model.config import IndexerConfig, ModelConfig, latent_family
from headrace.model.presets import preset
from headrace.recipe import (
    AgenticRlStage,
    DistillationObjective,
    DsaAdaptStage,
    DsaWarmupStage,
    LanguageStage,
    MeasureTable,
    MidtrainStage,
    ModelTable,
    Recipe,
    SftStage,
    suggest,
)
from headrace.stages.language import corpus_spec, replayed_row, source_spec
from headrace.stages.new_model import shape_of
from headrace.tokens.thinking import ThinkingMode

_CONVERSATIONS = 1000
"""Of a file, that many are read ahead; a mistake further on is found by the stage."""
_LEAST_FACT_TOKENS = 8
"""Fewer tokens than any tokenizer here needs for a hidden fact, or for the question about one."""
_LEAST_TEXT_CONTEXT = 8
_PARTS = ("latent", "indexer", "moe", "mtp")
"""Fields of a model's shape that are tables."""


def check_recipe(recipe: Recipe) -> None:
    """Look for mistakes in models, sizes, corpora and conversation files.

    Raises:
        UserError: the first one.
    """
    positions = _follow_shapes(recipe)
    for name in _texts_needed(recipe):
        with _named(f"data.{name}"):
            corpus = open_corpus(corpus_spec(recipe.data[name]))
            if next(corpus.documents("train"), None) is None:
                raise UserError("no document to train on; widen globs or lower held_out")
    _check_sources(recipe)
    if recipe.measure is not None:
        _check_measure(recipe, recipe.measure, positions)
    _check_teachers(recipe)
    for stage in recipe.stages:
        if isinstance(stage, SftStage) and stage.conversations is not None:
            _check_conversations(recipe, stage, stage.conversations)


def new_config(model: ModelTable, vocab_size: int) -> ModelConfig:
    """Shape of the new model that a recipe asks for.

    Raises:
        UserError: unknown preset or field, or values that do not fit each other.
    """
    shape = shape_of(model)
    for part in _PARTS:
        value = shape.get("overrides", {}).get(part)
        if value is not None and not isinstance(value, dict):
            raise UserError(
                f'model.overrides.{part} = {value!r}; write a table of its fields, or "none"'
            )
    try:
        if "preset" in shape:
            return preset(shape["preset"], vocab_size, **shape["overrides"])
        return ModelConfig(vocab_size=vocab_size, **shape["config"])
    except (TypeError, ValueError) as error:
        raise UserError(f"model.overrides: a value is of the wrong type ({error})") from error


# -- shapes ------------------------------------------------------------------------------------


def _follow_shapes(recipe: Recipe) -> int | None:
    """Check every stage against the model it will get.

    Returns:
        The longest sequence that any stage's model can hold; None when that cannot be known yet.
    """
    config: ModelConfig | None
    if recipe.model.path is None:
        assert recipe.tokenizer is not None  # the recipe's validator saw to it
        config = new_config(recipe.model, recipe.tokenizer.vocab_size)
    elif Path(recipe.model.path).is_dir():
        config = ModelConfig.from_file(recipe.model.path)
    else:
        return None  # a name whose checkpoint may have to be fetched first
    shapes: dict[str, ModelConfig] = {}
    longest = config.max_positions
    for stage in recipe.stages:
        if stage.start_from is not None:
            config = shapes[stage.start_from]
        if isinstance(stage, LanguageStage):
            with _named(f"stages.{stage.name}"):
                config = _after(stage, config)
        shapes[stage.name] = config
        longest = max(longest, config.max_positions)
    return longest


def _after(stage: LanguageStage, config: ModelConfig) -> ModelConfig:
    """The shape a stage makes of `config`."""
    if isinstance(stage, MidtrainStage):
        longest = max(step.sequence for step in stage.context)
        return replace(config, max_positions=max(config.max_positions, longest))
    if stage.sequence > config.max_positions:
        raise UserError(
            f"sequence = {stage.sequence} exceeds the model's {config.max_positions} positions; "
            "lower it, or extend the context in a midtrain stage before"
        )
    if isinstance(stage, DsaWarmupStage):
        return _with_indexer(stage, config)
    if isinstance(stage, DsaAdaptStage) and config.indexer is None:
        raise UserError("the model has no indexer to adapt to; put a dsa_warmup stage before")
    return config


def _with_indexer(stage: DsaWarmupStage, config: ModelConfig) -> ModelConfig:
    if config.latent is None:
        raise UserError(
            f"a {config.family} model has no latent attention, which an indexer needs; "
            'start from one that has, e.g. model.preset = "glm5-tiny"'
        )
    if config.indexer is None:
        indexer = IndexerConfig(stage.index_heads, stage.index_head_dim, stage.topk)
        return replace(config, indexer=indexer, family=latent_family(indexer))
    layers = range(config.num_layers)
    shares = [config.shares_selection(layer) for layer in layers]
    for field, same in {
        "index_heads": stage.index_heads == config.indexer.num_heads,
        "index_head_dim": stage.index_head_dim == config.indexer.head_dim,
        "topk": stage.topk == config.indexer.topk,
        "share_every": shares == [layer % stage.share_every != 0 for layer in layers],
    }.items():
        if field in stage.model_fields_set and not same:
            raise UserError(
                f"{field} = {getattr(stage, field)} is not that of the indexer the model has "
                f"already; leave {field} out to train that one, or start from a model without "
                '(model.overrides: indexer = "none")'
            )
    return config


# -- data --------------------------------------------------------------------------------------


def _mixes(recipe: Recipe) -> Iterator[tuple[str, int]]:
    """(entry of [data], sequence) of all running text that stages read."""
    for stage in recipe.stages:
        if isinstance(stage, MidtrainStage):
            for step in stage.context:
                mix = stage.mix if step.mix is None else step.mix
                yield from ((name, step.sequence) for name in mix or recipe.data)
        elif isinstance(stage, LanguageStage):
            yield from ((name, stage.sequence) for name in stage.mix or recipe.data)
        elif isinstance(stage, SftStage):
            row = replayed_row(stage, recipe.engine.max_context)
            yield from ((name, row) for name in stage.mix)


def _texts_needed(recipe: Recipe) -> list[str]:
    """Entries of [data] whose source will be read, each once."""
    names = [name for name, _ in _mixes(recipe) if recipe.data[name].shape != "retrieval"]
    if recipe.tokenizer is not None and recipe.tokenizer.corpus is not None:
        names.append(recipe.tokenizer.corpus)
    return list(dict.fromkeys(names))


def _check_sources(recipe: Recipe) -> None:
    for name, sequence in _mixes(recipe):
        with _named(f"data.{name}"):
            spec = source_spec(recipe.data[name], 1.0, sequence)
            if spec.shape == "retrieval":
                _check_room(spec.retrieval.tokens[0], spec.retrieval.keys[1])


def _check_room(tokens: int, keys: int) -> None:
    """Raises UserError when so many facts and a question cannot stand in so many tokens."""
    needed = (keys + 1) * _LEAST_FACT_TOKENS
    if tokens < needed:
        raise UserError(
            f"{keys} facts and a question need more than {needed} tokens, but documents have "
            f"{tokens}; lower the number of keys or raise the length"
        )


def _check_measure(recipe: Recipe, table: MeasureTable, positions: int | None) -> None:
    if table.text_bytes and table.text_context < _LEAST_TEXT_CONTEXT:
        raise UserError(
            f"measure.text_context = {table.text_context}; make it at least {_LEAST_TEXT_CONTEXT}"
        )
    if table.text_bytes:
        name = table.corpus or next(iter(recipe.data))
        with _named(f"data.{name}"):
            corpus = open_corpus(corpus_spec(recipe.data[name]))
            if next(corpus.documents("held_out"), None) is None:
                raise UserError(
                    f"held_out = {recipe.data[name].held_out:g} holds no document out, but "
                    "[measure] needs one; raise it, or set measure.text_bytes = 0"
                )
    for length in table.retrieval_lengths:
        if positions is not None and length > positions:
            raise UserError(
                f"measure.retrieval_lengths: no stage's model can hold {length} tokens "
                f"({positions} at most); leave it out, or extend the context in a midtrain stage"
            )
        for keys in table.retrieval_keys:
            with _named(f"measure.retrieval_lengths {length}, retrieval_keys {keys}"):
                _check_room(length, keys)


def _check_teachers(recipe: Recipe) -> None:
    """A teacher is an earlier stage or a checkpoint of a model with the same vocabulary."""
    earlier: list[str] = []
    for stage in recipe.stages:
        objective = stage.objective if isinstance(stage, AgenticRlStage) else None
        if isinstance(objective, DistillationObjective):
            for teacher in filter(None, (objective.teacher, *objective.teachers.values())):
                if teacher not in earlier and not (Path(teacher) / "config.json").is_file():
                    raise UserError(
                        f'stages.{stage.name}.objective: teacher "{teacher}" is neither an earlier '
                        f"stage nor a checkpoint directory{suggest(teacher, earlier)}"
                    )
        earlier.append(stage.name)


def _check_conversations(recipe: Recipe, stage: SftStage, path: str) -> None:
    from headrace.data.chat import read_conversations

    if path == "builtin":
        formats = (recipe.model.renderer, recipe.tokenizer and recipe.tokenizer.format)
        if formats in (("auto", "compact"), ("compact", "compact")):
            raise UserError(
                f"stages.{stage.name}.conversations: built-in ones hold thinking, which the "
                'compact format cannot; set tokenizer.format = "glm-5"'
            )
        return
    with _named(f"stages.{stage.name}.conversations"):
        rows = islice(read_conversations(path, ThinkingMode(stage.thinking)), _CONVERSATIONS)
        if sum(1 for _ in rows) == 0:
            raise UserError(f"{path!r} holds no conversation; give one on each line")


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Put the place in the recipe before a mistake's text."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
