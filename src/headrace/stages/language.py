"""Stages that learn from given tokens: pre-training, mid-training, sparse attention, SFT.

Each turns its recipe table into what `training.supervised` and the trainer's process need. What
differs between them is data: phases, losses, and which parameters train.
"""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.data.corpora import DEFAULT_GLOBS, CorpusSpec
from headrace.data.retrieval import RetrievalSpec
from headrace.data.sources import Framing, SourceSpec
from headrace.data.stream import StreamSpec, TokenStream
from headrace.errors import UserError
from headrace.model.config import ModelConfig
from headrace.recipe import (
    CorpusTable,
    DsaAdaptStage,
    DsaWarmupStage,
    LanguageStage,
    MidtrainStage,
    Recipe,
    SftStage,
    SupervisedStage,
)
from headrace.stages.context import (
    SAVE_TIMEOUT_S,
    StageContext,
    optimizer_config,
    save_weights,
    training_folder,
)
from headrace.stages.held_out import demonstrations_of, hold_out
from headrace.stages.trainers import open_trainer
from headrace.tokens.messages import normalise
from headrace.tokens.renderer import ChatRenderer, create_renderer
from headrace.tokens.thinking import ThinkingMode
from headrace.tokens.tokenizer import TextTokenizer, load_tokenizer
from headrace.training.batch import Sample, supervised_sample
from headrace.training.streams import TextStream
from headrace.training.supervised import Budget, Phase, Position, send_data, train


async def run_language(
    context: StageContext, stage: LanguageStage, source: Path, target: Path
) -> dict[str, Any]:
    """A stage over running text, from checkpoint `source` to `target`; facts for the record."""
    load: dict[str, Any] = {"losses": losses_of(stage), "trainable": "all"}
    if isinstance(stage, DsaWarmupStage):
        load |= {
            "trainable": "indexer",
            "indexer": {
                "num_heads": stage.index_heads,
                "head_dim": stage.index_head_dim,
                "topk": stage.topk,
                "share_every": stage.share_every,
            },
            "seed": context.recipe.seed,
        }
    phases = phases_of(context.recipe, stage, framing_of(load_tokenizer(source)))
    return await _run(context, stage, source, target, load, phases, samples=None)


async def run_sft(
    context: StageContext, stage: SftStage, source: Path, target: Path
) -> dict[str, Any]:
    """Supervised fine-tuning from checkpoint `source` to `target`; facts for the record."""
    renderer = create_renderer(context.recipe.model.renderer, source)
    started = time.monotonic()
    longest = min(context.recipe.engine.max_context, ModelConfig.from_file(source).max_positions)
    facts: dict[str, Any] = {}
    task = stage.demonstrated_task
    if task is None:
        context.message("reading conversations")
        samples, too_long = await asyncio.to_thread(
            _conversation_samples, stage, context.recipe.seed, renderer, longest
        )
    else:
        context.message(f"making {stage.demonstrations} demonstrations")
        held_out = await hold_out(context.recipe, context.tasks, context.ledger)
        found = await demonstrations_of(
            context.tasks[task], stage.demonstrations, context.recipe.seed, stage.quality, held_out
        )
        facts["demonstrations_held_out"] = stage.demonstrations - len(found)
        facts["demonstrations_right"] = sum(d.right for d in found) / len(found)
        samples, too_long = await asyncio.to_thread(
            _demonstration_samples, found, renderer, stage.prompt_loss, longest
        )
    facts["too_long"] = too_long
    # A batch of samples that train nothing would have no loss to take a step by.
    trained = [sample for sample in samples if _trains(sample)]
    if not trained:
        raise UserError(
            f"stages.{stage.name}: none of the data trains anything: {too_long} sequences are "
            f"longer than {longest} tokens (engine.max_context and the model's positions), "
            f"{len(samples)} have no trained token; raise max_context or give other data"
        )
    if stage.mix:
        context.message("reading text to learn beside")
        trained += await asyncio.to_thread(
            replayed_text, context.recipe, stage, source, trained, longest
        )
    facts["data_s"] = time.monotonic() - started
    load = {
        "losses": losses_of(stage),
        "trainable": "all_but_indexer" if stage.freeze_indexer else "all",
    }
    stream = {
        "kind": "samples",
        "batch_tokens": stage.batch_tokens,
        "seed": context.recipe.seed,
    }
    phases = [Phase(1.0, {"stream": stream})]
    return facts | await _run(context, stage, source, target, load, phases, trained)


async def _run(
    context: StageContext,
    stage: SupervisedStage,
    source: Path,
    target: Path,
    load: Mapping[str, Any],
    phases: list[Phase],
    samples: list[Sample] | None,
) -> dict[str, Any]:
    checkpoint = training_folder(context.run_dir, stage)
    cores = context.cores.all[: stage.threads or None]
    ranks = context.recipe.cluster.trainer_ranks
    async with open_trainer(
        context.cluster, stage.name, cores, context.run_dir, ranks=ranks
    ) as worker:
        parameters = await worker.request(
            "load",
            {
                "path": str(source),
                "optimizer": optimizer_config(stage),
                "guard": {
                    "bad_steps": stage.bad_steps,
                    "spike": stage.spike,
                    "deviations": stage.spike_deviations,
                },
                **load,
            },
            timeout_s=SAVE_TIMEOUT_S,
        )
        if samples is not None:
            await send_data(worker, samples)

        async def report(position: Position, done: float, metrics: dict[str, float]) -> None:
            context.log(stage.name, position.step, metrics)
            context.progress(done)

        position = await train(
            Budget(
                stage.steps,
                stage.seconds,
                stage.learning_rate,
                stage.warmup_steps,
                stage.final_learning_rate,
            ),
            worker=worker,
            phases=phases,
            checkpoint=str(checkpoint),
            checkpoint_every=stage.checkpoint_every,
            keep=stage.keep_checkpoints,
            report=report,
        )
        await save_weights(worker, target, tokenizer=source)
    return {"steps": position.step, "parameters": parameters["parameters"]}


def losses_of(stage: SupervisedStage) -> dict[str, Any]:
    """Keyword arguments of `LossConfig`."""
    losses: dict[str, Any] = {
        "mtp_weight": stage.mtp_weight,
        "balance_weight": stage.balance_weight,
    }
    if isinstance(stage, DsaWarmupStage):
        return {"language": False, "index": "dense"}
    if isinstance(stage, DsaAdaptStage):
        losses |= {"index": "sparse", "index_weight": stage.index_weight}
    return losses


def phases_of(recipe: Recipe, stage: LanguageStage, framing: Framing) -> list[Phase]:
    """The parts of a stage over text, with requests as `TrainerWorker` takes them."""
    if not isinstance(stage, MidtrainStage):
        stream = _text_stream(recipe, stage, stage.sequence, stage.mix, 0, framing)
        return [Phase(1.0, {"stream": stream})]
    phases, until = [], 0.0
    for index, step in enumerate(stage.context):
        until += step.share
        mix = step.mix if step.mix is not None else stage.mix
        request: dict[str, Any] = {
            "stream": _text_stream(recipe, stage, step.sequence, mix, index, framing),
            "positions": step.sequence,
            "rope_theta": step.rope_theta,
        }
        phases.append(Phase(until, request))
    phases[-1] = phases[-1]._replace(until=1.0)
    return phases


def framing_of(tokenizer: TextTokenizer) -> Framing:
    """The usual framing of documents, as far as a tokenizer has its tokens.

    Raises:
        UserError: it has no token that ends a document.
    """
    usual = Framing()
    begin = tuple(token for token in usual.begin if tokenizer.token_id(token) is not None)
    end = tuple(token for token in usual.end if tokenizer.token_id(token) is not None)
    if not end:
        eos = tokenizer.eos_token_id
        end = tuple(token for token, i in tokenizer.special_ids.items() if i == eos)
    if not end:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path!r}: has neither {usual.end[0]} nor an eos_token; "
            "name one in its tokenizer_config.json, documents have to end with it"
        )
    return Framing(begin, end)


def _text_stream(
    recipe: Recipe,
    stage: SupervisedStage,
    sequence: int,
    mix: Mapping[str, float],
    phase: int,
    framing: Framing,
) -> dict[str, Any]:
    """A text stream as the trainer's process takes it."""
    data = recipe.data
    weights = mix or dict.fromkeys(data, 1.0)
    sources = tuple(source_spec(data[name], weight, sequence) for name, weight in weights.items())
    # Another seed for every stage and phase: going on with the same text must not repeat its order.
    place = [s.name for s in recipe.stages].index(stage.name)
    return {
        "kind": "text",
        "spec": msgspec.to_builtins(StreamSpec(sources, framing)),
        "row_tokens": sequence,
        "batch_rows": max(1, stage.batch_tokens // sequence),
        "seed": recipe.seed * 1009 + place * 31 + phase,
    }


def corpus_spec(table: CorpusTable) -> CorpusSpec:
    """The corpus that a [data.NAME] table names."""
    return CorpusSpec(
        source=table.source,
        globs=table.globs or DEFAULT_GLOBS,
        text_field=table.text_field,
        group_field=table.group_field,
        held_out=table.held_out,
    )


def source_spec(table: CorpusTable, weight: float, sequence: int) -> SourceSpec:
    """A [data.NAME] table as part of a mixture of rows of `sequence` tokens."""
    tokens = max(min(table.tokens or sequence, sequence), 64)
    # Framing tokens take some of the row, and facts need room in the shortest document.
    most = tokens - 8
    least = min(most, max(tokens // 4, 32 + 20 * (table.keys[1] + table.queries)))
    return SourceSpec(
        corpus=corpus_spec(table),
        weight=weight,
        shape=table.shape,
        kinds=table.kinds,
        tokens=tokens,
        count=table.count,
        min_tokens=table.min_tokens,
        diff_weight=table.answer_weight,
        retrieval=RetrievalSpec(
            tokens=(least, most),
            keys=table.keys,
            queries=table.queries,
            answer_weight=table.answer_weight,
            context_weight=table.context_weight,
            key_letters=table.key_letters,
            value_digits=table.value_digits,
        ),
    )


def _conversation_samples(
    stage: SftStage, seed: int, renderer: ChatRenderer, longest: int
) -> tuple[list[Sample], int]:
    """Samples of at most `longest` tokens, and how many were longer."""
    from headrace.data.assistant import conversations
    from headrace.data.chat import chat_samples, read_conversations

    if stage.conversations == "builtin":
        found = conversations(seed, stage.count)
        return chat_samples(renderer, found, max_tokens=longest)
    path = str(stage.conversations)
    rows = read_conversations(path, ThinkingMode(stage.thinking))
    return chat_samples(renderer, rows, max_tokens=longest, source=path)


def _demonstration_samples(
    demonstrations: list[Any], renderer: ChatRenderer, prompt_loss: float, longest: int
) -> tuple[list[Sample], int]:
    """Demonstrations as weighted token sequences, and how many were longer."""
    samples, too_long = [], 0
    for demonstration in demonstrations:
        messages = normalise(
            [
                {**message, "train": train} if message["role"] == "assistant" else message
                for message, train in zip(demonstration.messages, demonstration.train, strict=True)
            ]
        )
        ids, mask = renderer.render_training(messages, demonstration.tools)
        if len(ids) > longest:
            too_long += 1
            continue
        samples.append(supervised_sample(ids, [1.0 if m else prompt_loss for m in mask]))
    return samples, too_long


def replayed_row(stage: SftStage, longest: int) -> int:
    """Tokens of a row of the stage's mix: few of a batch, so that all batches are mixed alike and
    none looks like a loss spike."""
    return min(longest, max(64, stage.batch_tokens // 8))


def replayed_text(
    recipe: Recipe, stage: SftStage, source: Path, samples: list[Sample], longest: int
) -> list[Sample]:
    """As much running text of the stage's mix as makes its share of the tokens."""
    tokenizer = load_tokenizer(source)
    row = replayed_row(stage, longest)
    request = _text_stream(recipe, stage, row, stage.mix, 0, framing_of(tokenizer))
    stream = TextStream(
        TokenStream(
            msgspec.convert(request["spec"], StreamSpec),
            tokenizer,
            request["row_tokens"],
            request["batch_rows"],
            request["seed"],
        )
    )
    wanted = sum(map(len, samples)) * stage.mix_share / (1 - stage.mix_share)
    found: list[Sample] = []
    tokens = 0
    while tokens < wanted:
        found += stream.next_batch()
        tokens = sum(map(len, found))
    return found


def _trains(sample: Sample) -> bool:
    """Whether any token is trained; the first one cannot be."""
    return bool((np.frombuffer(sample.weights, "<f4")[1:] > 0).any())
