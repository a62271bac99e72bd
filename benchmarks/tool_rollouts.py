"""Rollouts of two models that call tools, sampled at temperature 1; tools' results are canned.

SmolLM2-135M-Instruct is shown how tools are called by examples in its prompt; the quickstart's
model has had a short warm start on demonstrations of terminal tasks. Both tokens and messages are
kept.
"""

import argparse
import asyncio
import contextlib
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from conversations import Conversation, Embedded
from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.errors import UserError
from headrace.model.checkpoint import load_checkpoint
from headrace.model.config import ModelConfig
from headrace.model.decoder import Decoder
from headrace.model.gguf_import import SMOLLM2, resolve_model
from headrace.sandbox import open_provider
from headrace.sandbox.types import Limits
from headrace.tasks.registry import create_task
from headrace.tasks.terminal.agent import TOOLS
from headrace.tasks.types import Demonstration
from headrace.tokens.messages import Message, normalise
from headrace.tokens.renderer import ChatRenderer, create_renderer
from headrace.tokens.training import train_tokenizer
from headrace.training.batch import supervised_sample
from headrace.training.trainer import OptimizerConfig, Trainer
from retokenising import Rollout, assistant_message

RESULTS = ("3", "(no output)", "notes.txt\nplan.md\nreport.csv", "exit 1: no such file", "alpha 17")
"""What tools answer, in turns."""
EXAMPLES = (
    ("How many lines has notes.txt?", "wc -l < notes.txt", "12"),
    ("Which files are here?", "ls -a", "a.txt\nb.csv"),
    ("Find 'error' in app.log.", 'grep -n "error" app.log', "7: error 42"),
    (
        "What is the sum of column 2 of sales.csv?",
        "awk -F, '{s+=$2} END {print s}' sales.csv",
        "96",
    ),
)
QUESTIONS = (
    "How many files in this directory are larger than 10 KB?",
    "Rename draft.txt to final.txt and show its first line.",
    "What is the largest number in column 2 of data.csv?",
    "Which word is the most frequent one in story.md?",
    "Replace every 'colour' with 'color' in all .txt files.",
    "Show the three newest files and their sizes.",
    "Count the distinct lines of names.txt.",
)


class Source(NamedTuple):
    """A model and what it is asked.

    Attributes:
        prompts: normalised messages, not to be trained on.
        context: most tokens of a conversation.
        questions: asked in turns after every answer; none where tools' results are enough.
    """

    model: Decoder
    renderer: ChatRenderer
    prompts: list[list[Message]]
    context: int
    questions: tuple[str, ...]


def smollm2(arguments: argparse.Namespace) -> Source | None:
    """SmolLM2 with examples of tool calls before each question; None if it is not there."""
    path = None
    # The second is what an installation has left, should it be gone.
    for place in (SMOLLM2, f"~/.cache/headrace/{SMOLLM2}"):
        with contextlib.suppress(UserError):
            path = path or resolve_model(place)
    if path is None:
        return None
    prompts = []
    for number in range(arguments.conversations):
        messages: list[dict[str, Any]] = []
        for asked, command, result in EXAMPLES:
            function = {"name": "bash", "arguments": json.dumps({"command": command})}
            call = {"id": "call-0", "type": "function", "function": function}
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "", "tool_calls": [call], "train": False},
                {"role": "tool", "tool_call_id": "call-0", "content": result},
            ]
        messages.append({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]})
        prompts.append(normalise(messages))
    context = 512 + arguments.turns * (arguments.new + 48)
    renderer = create_renderer("auto", path)
    return Source(load_checkpoint(path), renderer, prompts, context, QUESTIONS)


def quickstart(arguments: argparse.Namespace, folder: Path) -> Source:
    """The quickstart's model after some steps on demonstrations of terminal tasks."""
    wanted = arguments.demonstrations + arguments.conversations
    found = asyncio.run(demonstrations(wanted))
    shown, asked = found[: arguments.demonstrations], found[arguments.demonstrations :]
    train_tokenizer(_texts(shown), 640).save(folder)
    renderer = create_renderer("compact", folder)
    model = Decoder(
        ModelConfig(
            vocab_size=renderer.vocab_size,
            hidden_size=192,
            intermediate_size=512,
            num_layers=3,
            num_heads=6,
            num_kv_heads=6,
            head_dim=32,
            max_positions=384,
        )
    )
    model.init_weights(0)
    trainer = Trainer(model, OptimizerConfig(1e-2, algorithm="muon"))
    rows = []
    for one in shown:
        marked = [{**m, "train": t} for m, t in zip(one.messages, one.train, strict=True)]
        ids, mask = renderer.render_training(normalise(marked), one.tools)
        rows.append(supervised_sample(ids, [1.0 if trained else 0.1 for trained in mask]))
    batch = 16
    for step in range(arguments.steps):
        begin = step * batch % max(1, len(rows) - batch)
        rate = 1e-2 * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / arguments.steps)
        trainer.supervised_step(rows[begin : begin + batch], rate)
    prompts = [normalise(one.messages[:2]) for one in asked]
    return Source(trainer.model, renderer, prompts, 384, ())


async def demonstrations(count: int) -> list[Demonstration]:
    """Of the terminal task; their commands are really run, in a sandbox."""
    provider = open_provider("auto", Limits())
    try:
        task: Any = create_task("terminal", {}, provider)
        return await task.demonstrations(count, 0, 0.7)
    finally:
        await provider.close()


def _texts(shown: Sequence[Demonstration]) -> list[str]:
    return [
        text
        for one in shown
        for message in one.messages
        for text in (
            message.get("content") or "",
            *(call["function"]["arguments"] for call in message.get("tool_calls") or ()),
        )
    ]


def roll_out(source: Source, arguments: argparse.Namespace) -> list[Rollout]:
    """All conversations, turn by turn; one ends early when it does not fit any more."""
    config = EngineConfig(
        max_running=len(source.prompts),
        max_context=source.context,
        prefill_tokens=512,
        dtype="float32",
        seed=0,
    )
    renderer = source.renderer
    # An engine takes its model over, and this one is to be the trainer's afterwards.
    core = EngineCore(copy.deepcopy(source.model), config)
    engine = Embedded(core, arguments.new, renderer.stop_ids)
    rollouts = [Rollout(Conversation(), [], list(prompt), TOOLS) for prompt in source.prompts]
    added = [renderer.render(rollout.messages, TOOLS) for rollout in rollouts]
    going = list(range(len(rollouts)))
    for turn in range(arguments.turns):
        going = [
            number
            for number in going
            if len(rollouts[number].held.ids) + len(added[number]) + arguments.new < source.context
        ]
        for number in going:
            rollouts[number].held.read(added[number])
        answers = engine(
            [rollouts[number].held.before for number in going],
            [1000 * number + turn for number in going],
        )
        for number, answer in zip(going, answers, strict=True):
            one = rollouts[number]
            one.held.wrote(answer)
            one.answers.append(answer)
            result = RESULTS[(number + turn) % len(RESULTS)]
            questions = source.questions
            asked = questions[(number + turn + 1) % len(questions)] if questions else ""
            added[number] = _reply(one, renderer, result, asked)
    return [rollout for rollout in rollouts if rollout.answers]


def _reply(rollout: Rollout, renderer: ChatRenderer, result: str, asked: str) -> list[int]:
    """Take the last answer up as a message, and what comes after it; returns ids to add."""
    held = rollout.held
    parsed = renderer.parse(held.before, held.answer, rollout.tools)
    said = assistant_message(parsed)
    after: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call in said.get("tool_calls", ())
    ]
    if asked or not after:
        after.append({"role": "user", "content": asked or "Go on."})
    normal = normalise([said, *after])
    rollout.messages.extend(normal)
    bridge = renderer.bridge(held.before, held.answer, normal[1:], rollout.tools)
    if bridge is None:
        raise UserError("the model's chat template cannot be continued; choose another model")
    return bridge
