"""What thinking modes cost: how the context grows over 20 turns, how much of it is computed anew.

An agent's conversation of 20 assistant turns, a user message before every fifth: four times the
agent thinks and calls a tool, then it thinks and answers. Thoughts, calls and results are random
words of fixed lengths. Each mode samples the same conversation the way the gateway does: a prompt
continues the tokens held by the renderer's bridge, and where the mode takes thinking out of the
context it is rendered afresh, a fork.

    interleaved  thinks before every turn; the next user message drops earlier thinking
    preserved    thinks before every turn; all thinking stays
    turn         thinks only before the first turn after a user message; dropped as above
    budget       preserved, with a budget that ends every thought at half its length
    batched      preserved, three thoughts and calls in one turn, whose results come together:
                 the same calls in fewer turns

`context_T_MODE` is the number of tokens in the context when turn T has been sampled, mean over
conversations. An engine is assumed that keeps everything it ever computed for the conversation:
`reuse_MODE` is the share of all prompt tokens that begin a sequence it holds, `prefill_MODE` the
number of the others, `prefill_per_new_token_MODE` that number over the tokens of prompts that no
earlier prompt or completion of the conversation had (1 is the least there can be). `forks_MODE` are
prompts that were rendered afresh. `calls_MODE` counts tool calls within the 20 turns, and
`context_per_call_MODE` is the last context over them. GLM-5's format over a byte-level BPE;
`_qwen3` is the same conversations in a ChatML template with <think>.
"""

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from headrace.observe.machine import describe_machine
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.messages import Message, normalise
from headrace.tokens.thinking import Thinking, ThinkingMode, next_leg, request_renderer
from headrace.tokens.tokenizer import TextTokenizer
from headrace.tokens.training import train_tokenizer

TURNS = 20
TURNS_A_QUESTION = 5
SHOWN = (1, 5, 10, 15, 20)
WORDS = {"question": 30, "thought": 80, "command": 8, "result": 60, "answer": 40}
BUDGETS = {"budget": 0.5}
BATCH = 3

MODES: dict[str, ThinkingMode] = {
    "interleaved": ThinkingMode.INTERLEAVED,
    "preserved": ThinkingMode.PRESERVED,
    "turn": ThinkingMode.TURN,
    "budget": ThinkingMode.PRESERVED,
    "batched": ThinkingMode.PRESERVED,
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]

_SYLLABLES = ("ka", "to", "mi", "re", "su", "lo", "ne", "pa", "dri", "ven", "gol", "us")


class Turn(NamedTuple):
    """What is sampled in one turn, and what comes into the conversation after it."""

    message: Message
    thinks: bool
    after: list[Message]


class Cost(NamedTuple):
    """One conversation under one mode, in tokens."""

    contexts: list[int]
    prompts: int
    prefill: int
    new: int
    forks: int
    calls: int


class Writer:
    """Random texts; equal seeds write equal ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, kind: str) -> str:
        """As many words as texts of this kind have."""
        made = (
            "".join(self._random.choices(_SYLLABLES, k=self._random.randint(1, 3)))
            for _ in range(WORDS[kind])
        )
        return " ".join(made)


def conversation(seed: int, mode: str) -> tuple[list[Message], list[Turn]]:
    """How it begins, and its turns. The texts do not depend on the mode."""
    writer = Writer(seed)
    question: Message = {"role": "user", "content": writer.text("question")}
    turns: list[Turn] = []
    while len(turns) < TURNS:
        steps = [_step(writer, i) for i in range(TURNS_A_QUESTION - 1)]
        size = BATCH if mode == "batched" else 1
        for start in range(0, len(steps), size):
            group = steps[start : start + size]
            calls = [call if size > 1 else _without_thought(call) for call, _ in group]
            message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
            if size == 1:
                message["reasoning_content"] = group[0][0]["reasoning_content"]
            turns.append(_turn(message, mode, start == 0, [result for _, result in group]))
        answer: Message = {
            "role": "assistant",
            "content": writer.text("answer"),
            "reasoning_content": writer.text("thought"),
        }
        follow: Message = {"role": "user", "content": writer.text("question")}
        turns.append(_turn(answer, mode, False, [follow]))
    system: Message = {"role": "system", "content": "You solve tasks with a shell."}
    return [system, question], turns[:TURNS]


def _step(writer: Writer, number: int) -> tuple[dict[str, Any], Message]:
    name = f"call-{number}"
    function = {"name": "bash", "arguments": json.dumps({"command": writer.text("command")})}
    call = {
        "id": name,
        "type": "function",
        "function": function,
        "reasoning_content": writer.text("thought"),
    }
    return call, {"role": "tool", "tool_call_id": name, "content": writer.text("result")}


def _without_thought(call: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in call.items() if key != "reasoning_content"}


def _turn(message: Message, mode: str, first: bool, after: list[Message]) -> Turn:
    thinks = mode != "turn" or first
    if not thinks:
        message.pop("reasoning_content", None)
    (checked,) = normalise([message])
    return Turn(checked, thinks, after)


def sample(renderer: LibraryRenderer, seed: int, mode: str) -> Cost:
    """Run one conversation and count."""
    messages, turns = conversation(seed, mode)
    held: list[list[int]] = []
    seen: list[Message] = list(messages)
    fresh: list[Message] = []
    contexts: list[int] = []
    prompts = prefill = new = forks = calls = 0
    prompt: list[int] = []
    completion: list[int] = []
    for turn in turns:
        now = request_renderer(renderer, Thinking(MODES[mode], turn.thinks))
        assert isinstance(now, LibraryRenderer)
        delta = now.bridge(prompt, completion, fresh, TOOLS) if prompt else None
        if delta is None:
            forks += bool(prompt)
            kept = now.with_thinking(keep=True).bridge(prompt, completion, fresh, TOOLS)
            prompt = now.render(seen, TOOLS)
            new += len(prompt if kept is None else kept)
        else:
            prompt = [*prompt, *completion, *delta]
            new += len(delta)
        prompts += len(prompt)
        prefill += len(prompt) - max((_common(prompt, other) for other in held), default=0)
        completion, inserted = _complete(now, [*seen, turn.message], prompt, mode)
        new += inserted
        prompts += inserted
        prefill += inserted
        held.append([*prompt, *completion])
        contexts.append(len(prompt) + len(completion))
        calls += len(turn.message.get("tool_calls", ()))
        fresh = turn.after
        seen += [turn.message, *fresh]
    return Cost(contexts, prompts, prefill, new, forks, calls)


def _complete(
    renderer: LibraryRenderer, messages: list[Message], prompt: list[int], mode: str
) -> tuple[list[int], int]:
    """What is sampled, with what a budget puts between its legs; and how much that is."""
    whole = renderer.completion(messages, TOOLS)
    if whole is None:
        raise RuntimeError(f"mode {mode}: the message is not what is sampled after its prompt")
    tag = renderer.think_end_id
    if mode not in BUDGETS or tag is None:
        return whole, 0
    end = whole.index(tag)
    first = whole[: int(end * BUDGETS[mode])]
    inserted = next_leg(renderer, prompt, first) or []
    rest = whole[end + 1 :]
    after = inserted[inserted.index(tag) + 1 :]
    if after and rest[: len(after)] == after:
        rest = rest[len(after) :]
    return [*first, *inserted, *rest], len(inserted)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def renderers() -> dict[str, LibraryRenderer]:
    """Suffix of metrics to renderer."""
    writer = Writer(0)
    texts = [writer.text("thought") for _ in range(200)]
    glm = train_tokenizer(texts, 1024, "glm-5")
    spec = json.loads(glm._tokenizer.to_str())
    spec["added_tokens"] = []
    chatml = Tokenizer.from_str(json.dumps(spec))
    tags = ("think", "tool_call", "tool_response")
    chatml.add_special_tokens(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        + [f"<{slash}{tag}>" for tag in tags for slash in ("", "/")]
    )
    return {
        "": LibraryRenderer("glm-5", glm),
        "_qwen3": LibraryRenderer("qwen3", TextTokenizer(chatml, name_or_path="chatml")),
    }


def measure(conversations: int) -> dict[str, float]:
    """All metrics."""
    metrics: dict[str, float] = {}
    for suffix, renderer in renderers().items():
        for mode in MODES:
            costs = [sample(renderer, seed, mode) for seed in range(conversations)]
            name = f"{mode}{suffix}"
            for turn in SHOWN:
                lengths = [cost.contexts[turn - 1] for cost in costs]
                metrics[f"context_{turn}_{name}"] = statistics.mean(lengths)
            prompts, prefill = sum(c.prompts for c in costs), sum(c.prefill for c in costs)
            metrics[f"reuse_{name}"] = 1 - prefill / prompts
            metrics[f"prefill_{name}"] = prefill / conversations
            metrics[f"prefill_per_new_token_{name}"] = prefill / sum(c.new for c in costs)
            metrics[f"forks_{name}"] = sum(c.forks for c in costs) / conversations
            calls = sum(cost.calls for cost in costs)
            metrics[f"calls_{name}"] = calls / conversations
            metrics[f"context_per_call_{name}"] = sum(c.contexts[-1] for c in costs) / calls
    return {name: round(value, 4) for name, value in metrics.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--quick", action="store_true", help="two conversations instead of 16")
    options = parser.parse_args()
    conversations = 2 if options.quick else 16
    metrics = measure(conversations)
    machine = describe_machine()
    if not options.json:
        titles = [f"turn {turn}" for turn in SHOWN]
        print(f"{'':20}" + "".join(f"{title:>9}" for title in [*titles, "reuse", "forks"]))
        for suffix in ("", "_qwen3"):
            for mode in MODES:
                row = [metrics[f"context_{turn}_{mode}{suffix}"] for turn in SHOWN]
                shown = "".join(f"{value:9.0f}" for value in row)
                reuse, forks = metrics[f"reuse_{mode}{suffix}"], metrics[f"forks_{mode}{suffix}"]
                print(f"{mode + suffix:20}{shown}{reuse:9.3f}{forks:9.1f}")
    print(
        json.dumps(
            {
                "name": "thinking_modes",
                "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['system']}",
                "config": {
                    "conversations": conversations,
                    "turns": TURNS,
                    "turns_a_question": TURNS_A_QUESTION,
                    "words": WORDS,
                    "batch": BATCH,
                    "budget": BUDGETS["budget"],
                },
                "metrics": metrics,
                "notes": "counts of tokens, no clock: equal on every machine",
            }
        )
    )


if __name__ == "__main__":
    main()
