"""The same rollouts trained from their exact tokens and from re-tokenised text.

1. Rollouts of several turns with tools, sampled at temperature 1 with recorded logprobs, are read
   as messages, rendered and encoded again (`retokenising`), and a trainer with the same weights
   scores both sequences. Two models: SmolLM2-135M-Instruct, if it is installed, shown how tools are
   called by examples in its prompt, and the quickstart's model with its own small BPE after a short
   warm start. Tool results are canned: no command is run.
2. A small RL problem whose answers have many spellings in tokens (`respelling`) is trained from the
   same seeds with the same number of rollouts: from the sampled tokens; from re-tokenised text with
   the trainer's own logprobs in place of the recorded ones, which fit no longer; from re-tokenised
   text with the recorded logprobs laid over it by position.

`_smollm2` and `_quickstart` name the model; without either it is that of SmolLM2 if it is there,
else of the quickstart.

`differ_share`: trajectories with a turn whose tokens are others after the detour. By cause, not
excluding each other: `remerged_share` the same text in other tokens, `reserialised_share` another
text after reading and rendering (JSON spelt anew, spaces, another stop token), `bytes_lost_share`
bytes that are no UTF-8. `turns_*` the same of turns, `calls_*` of turns that call tools;
`turns_with_calls` is their share.
`logprob_error_tokens`: mean |trainer - recorded logprob| of sampled tokens, nats. `_text`: of those
tokens of the re-tokenised sequence that a longest common subsequence of their turn finds among the
sampled ones; `unaligned_share` is the share of its trained tokens without such a partner.
`logprob_error_text_differing`: in trajectories that differ only. `_by_position`: recorded logprobs
laid over a turn's new tokens one by one. `trajectory_error_*`: |difference| of sums over a
trajectory, which needs no alignment.
`reward_VARIANT`: final reward on fresh prompts, mean over seeds, `_low` and `_high` its 95%
interval (Student's t); `progress_VARIANT` the mean of all measurements on the way;
`reward_difference_V`, `progress_difference_V` of tokens minus V, seed by seed, with intervals;
`respelt_VARIANT` the share of sampled answers that were not spelt as text would be, over the whole
training; `masked_VARIANT` the share of trained tokens without a gradient.
"""

import argparse
import asyncio
import contextlib
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
from report import fill_sizes, new_parser, print_report
from respelling import VARIANTS, Job, Outcomes, run
from retokenising import (
    Errors,
    Rollout,
    Turn,
    assistant_message,
    errors,
    exact,
    from_text,
    look_at,
    score,
)

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
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t, two-sided 95%, by number of values."""


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


def compare(source: Source, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of one model, without a suffix."""
    turns: list[list[Turn]] = []
    of_tokens: list[Errors] = []
    of_text: list[Errors] = []
    for rollout in rollouts:
        # What came after the last answer is in no training sequence.
        last = max(i for i, m in enumerate(rollout.messages) if m["role"] == "assistant")
        whole = rollout._replace(messages=rollout.messages[: last + 1])
        sampled, text = exact(whole), from_text(whole, source.renderer)
        turns.append(look_at(whole, text, source.renderer))
        of_tokens.append(errors(whole, sampled, score(source.model, sampled)))
        same = text.ids == sampled.ids
        of_text.append(of_tokens[-1] if same else errors(whole, text, score(source.model, text)))
    return summarise_detour(turns, of_tokens, of_text)


def summarise_detour(
    turns: Sequence[Sequence[Turn]], of_tokens: Sequence[Errors], of_text: Sequence[Errors]
) -> dict[str, float]:
    """Shares and errors over all trajectories."""
    every = [turn for of_one in turns for turn in of_one]
    calls = [turn for turn in every if turn.calls]
    metrics: dict[str, float] = {
        "trajectories": len(turns),
        "turns_with_calls": len(calls) / len(every),
    }
    causes = {"differ": "differs"} | {c: c for c in ("remerged", "reserialised", "bytes_lost")}
    for name, cause in causes.items():
        hit = [[getattr(turn, cause) for turn in of_one] for of_one in turns]
        metrics[f"{name}_share"] = statistics.fmean(map(any, hit))
        metrics[f"turns_{name}_share"] = statistics.fmean(h for of_one in hit for h in of_one)
        metrics[f"calls_{name}_share"] = statistics.fmean(
            [float(getattr(turn, cause)) for turn in calls] or [0.0]
        )
    changed = [
        one
        for one, of_one in zip(of_text, turns, strict=True)
        if any(turn.differs for turn in of_one)
    ]
    for name, found in (("tokens", of_tokens), ("text", of_text), ("text_differing", changed)):
        metrics[f"logprob_error_{name}"] = _mean(e for one in found for e in one.aligned)
        metrics[f"trajectory_error_{name}"] = _mean(one.whole for one in found)
    metrics["logprob_error_by_position"] = _mean(e for one in of_text for e in one.by_position)
    trained = sum(one.trained for one in of_text)
    metrics["unaligned_share"] = 1 - sum(len(one.aligned) for one in of_text) / trained
    metrics["tokens_compared"] = sum(len(one.aligned) for one in of_tokens)
    return metrics


def _mean(values: Any) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% interval."""
    mean = statistics.fmean(values)
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def summarise_rewards(found: dict[str, list[Outcomes]]) -> dict[str, float]:
    """Metrics of the RL problem by variant; lists in the order of seeds."""
    metrics: dict[str, float] = {}

    def put(name: str, values: Sequence[float]) -> None:
        for suffix, value in zip(("", "_low", "_high"), interval(values), strict=True):
            metrics[name + suffix] = value

    for variant, outcomes in found.items():
        put(f"reward_{variant}", [o.final for o in outcomes])
        put(f"progress_{variant}", [o.progress for o in outcomes])
        metrics[f"respelt_{variant}"] = statistics.fmean(o.respelt for o in outcomes)
        metrics[f"masked_{variant}"] = statistics.fmean(o.masked for o in outcomes)
        if variant == "tokens":
            continue
        pairs = list(zip(found["tokens"], outcomes, strict=True))
        put(f"reward_difference_{variant}", [a.final - b.final for a, b in pairs])
        put(f"progress_difference_{variant}", [a.progress - b.progress for a, b in pairs])
    return metrics


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Flags, with sizes filled in."""
    parser = new_parser(__doc__)
    parser.add_argument("--conversations", type=int, help="of each model")
    parser.add_argument("--turns", type=int, default=3, help="of each conversation")
    parser.add_argument("--new", type=int, help="most tokens of a turn")
    parser.add_argument("--demonstrations", type=int, help="the quickstart's model learns from")
    parser.add_argument("--steps", type=int, help="of that, 16 demonstrations each")
    parser.add_argument("--seeds", type=int, help="of the RL problem, 2 to 10")
    parser.add_argument("--updates", type=int, help="of a run")
    parser.add_argument("--groups", type=int, default=8, help="groups per update")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts per group")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    sizes = (
        ("conversations", 6, 48),
        ("new", 32, 48),
        ("demonstrations", 400, 2000),
        ("steps", 30, 250),
        ("seeds", 3, 8),
        ("updates", 30, 200),
    )
    found = fill_sizes(parser.parse_args(arguments), sizes)
    if found.seeds not in T_95:
        parser.error(f"--seeds {found.seeds} has to be from {min(T_95)} to {max(T_95)}")
    return found


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """The RL problem; variants interleaved, seeds outermost."""
    return [
        Job(
            variant,
            seed,
            arguments.updates,
            arguments.groups,
            arguments.group_size,
            arguments.learning_rate,
        )
        for seed in range(arguments.seeds)
        for variant in VARIANTS
    ]


def measure_detours(arguments: argparse.Namespace) -> dict[str, float]:
    """Metrics of both models."""
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        sources = {"smollm2": smollm2(arguments), "quickstart": quickstart(arguments, Path(folder))}
    for name, source in sources.items():
        if source is None:
            continue
        found = compare(source, roll_out(source, arguments))
        if "differ_share" not in metrics:
            metrics |= found
        metrics |= {f"{key}_{name}": value for key, value in found.items()}
    return metrics


def main() -> None:
    """Run the benchmark."""
    arguments = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    jobs = jobs_of(arguments)
    rewards: dict[str, list[Outcomes]] = {}
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        trained = pool.map(run, jobs)  # beside what follows: nothing here is timed
        metrics = measure_detours(arguments)
        for job, outcomes in zip(jobs, trained, strict=True):
            rewards.setdefault(job.variant, []).append(outcomes)
    metrics |= summarise_rewards(rewards) | {"wall_s": time.perf_counter() - started}
    missing = "" if "differ_share_smollm2" in metrics else "SmolLM2 is not there. "
    print_report(
        "tito_vs_text",
        arguments,
        metrics,
        missing + "Pieces of the template are encoded each on its own, so text never merges with "
        "the template around it; pipelines that encode a conversation as one string differ more.",
    )


if __name__ == "__main__":
    main()
