"""Every call format: a renderer, right completions to start from, and what all readings obey."""

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from headrace.rollout.types import ParseState
from headrace.tokens.chatml import TemplateRenderer
from headrace.tokens.compact import CompactRenderer
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.messages import call_arguments
from headrace.tokens.parsed import Delta, DeltaKind, ParsedMessage
from headrace.tokens.renderer import ChatRenderer
from headrace.tokens.tokenizer import TextTokenizer
from headrace.tokens.training import train_tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string"},
                    "limit": {"type": "integer"},
                    "how": {"enum": ["fast", "slow"]},
                    "env": {"type": "object"},
                },
                "required": ["command"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]

_TEXTS = ["ls the files, I count 12 lines <tool_call> name arguments command limit 😀 über"] * 20
_THINK_TOOLS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_RESPONSE = ("<tool_response>", "</tool_response>")
_IM = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
_CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_with(*special: str) -> TextTokenizer:
    """A small byte-level BPE with these special tokens, and a plain ChatML template."""
    spec = json.loads(train_tokenizer(_TEXTS, 330)._tokenizer.to_str())
    spec["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_special_tokens(list(special))
    return TextTokenizer(tokenizer, name_or_path="test", config={"chat_template": _CHATML})


class Format(NamedTuple):
    """A renderer, prompts of it, and right completions as template text."""

    renderer: ChatRenderer
    prompts: list[list[int]]
    completions: list[str]

    def encode(self, text: str) -> list[int]:
        return self.renderer.tokenizer.encode(text)


def _glm_call(name: str, gap: str = "", **arguments: str) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>{gap}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{gap}{pairs}</tool_call>"


def _json_call(name: str, key: str = "arguments", **arguments: Any) -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _hermes(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{_json_call(name, **arguments)}\n</tool_call>"


def _xml(*calls: tuple[str, dict[str, str]]) -> str:
    body = "\n".join(
        f'<invoke name="{name}">'
        + "".join(f'<parameter name="{k}">{v}</parameter>' for k, v in arguments.items())
        + "</invoke>"
        for name, arguments in calls
    )
    return f"<function_calls>\n{body}\n</function_calls>"


def _format(renderer: ChatRenderer, completions: list[str]) -> Format:
    user = [{"role": "user", "content": "how many?"}]
    prompts = [renderer.render(user, TOOLS)]
    if isinstance(renderer, LibraryRenderer) and renderer.can_switch_thinking:
        prompts.append(renderer.with_thinking(enabled=False).render(user, TOOLS))
    return Format(renderer, prompts, completions)


GLM = train_tokenizer(_TEXTS, 330, "glm-5")
_QWEN = tokenizer_with(*_IM, *_THINK_TOOLS, *_RESPONSE)
_BASH = _glm_call("bash", command="ls 😀", limit="12")
_GLM_COMPLETIONS = [
    f"I count.</think>12 lines{_BASH}<|observation|>",
    f"first</think>{_BASH}<think>then</think>{_glm_call('now')}<|observation|>",
    "so</think> über 12\n<|user|>",
]
_HERMES_COMPLETIONS = [
    f"<think>\nI count.\n</think>\n\n{_hermes('bash', command='ls 😀', limit=12)}<|im_end|>",
    f"Now.\n{_hermes('now')}\n{_hermes('bash', command='l')}<|im_end|>",
    " 12 über\n<|im_end|>",
]

FORMATS: dict[str, Format] = {
    "compact": _format(
        CompactRenderer(train_tokenizer(_TEXTS, 330)),
        [f"12{_BASH}{_glm_call('now')}<|observation|>", "12 über\n<|user|>"],
    ),
    "glm-5": _format(LibraryRenderer("glm-5", GLM), _GLM_COMPLETIONS),
    "glm-4.5": _format(
        LibraryRenderer("glm-4.5", tokenizer_with("/nothink", *GLM.special_ids)),
        [
            f"\n<think>I count.</think>\n{_glm_call('bash', chr(10), command='ls 😀')}"
            "<|observation|>",
            "\n<think></think>\n12<|user|>",
            f"\n12 über{_glm_call('now', chr(10))}<|observation|>",
        ],
    ),
    "qwen3": _format(LibraryRenderer("qwen3", _QWEN), _HERMES_COMPLETIONS),
    "chatml": _format(TemplateRenderer(tokenizer_with(*_IM)), _HERMES_COMPLETIONS),
    "chatml with tokens": _format(TemplateRenderer(_QWEN), _HERMES_COMPLETIONS),
    "chatml-xml": _format(
        TemplateRenderer(tokenizer_with(*_IM), "xml"),
        [
            "I look." + _xml(("bash", {"command": "ls 😀", "limit": "12"})) + "<|im_end|>",
            "<think>\nso\n</think>\n\n"
            + _xml(("now", {}), ("bash", {"command": ""}))
            + "<|im_end|>",
            "12 über\n<|im_end|>",
        ],
    ),
    "llama-3": _format(
        LibraryRenderer("llama-3", tokenizer_with(*_LLAMA)),
        [
            _json_call("bash", "parameters", command="ls 😀", limit=12) + "<|eot_id|>",
            '<|python_tag|>{"name": "now", "parameters": {}}<|eom_id|>',
            "12 über\n<|eot_id|>",
        ],
    ),
    "qwen3.5": _format(
        LibraryRenderer(
            "qwen3.5",
            tokenizer_with(
                *_IM,
                *_THINK_TOOLS,
                *_RESPONSE,
                "<|vision_start|>",
                "<|vision_end|>",
                "<|image_pad|>",
                "<|video_pad|>",
            ),
        ),
        [
            "I count.\n</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n"
            "</parameter>\n</function>\n</tool_call><|im_end|>",
            "so\n</think>\n\n12<|im_end|>",
        ],
    ),
    "deepseek-r1": _format(
        LibraryRenderer(
            "deepseek-r1",
            tokenizer_with(
                "<｜begin▁of▁sentence｜>",
                "<｜end▁of▁sentence｜>",
                "<｜User｜>",
                "<｜Assistant｜>",
                "<｜tool▁outputs▁begin｜>",
                "<｜tool▁outputs▁end｜>",
                "<｜tool▁output▁begin｜>",
                "<｜tool▁output▁end｜>",
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁sep｜>",
            ),
        ),
        ["so</think>12<｜end▁of▁sentence｜>", "<think>\nso\n</think>\n\n12<｜end▁of▁sentence｜>"],
    ),
}


def put_together(deltas: Sequence[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls that a client has after these deltas."""
    texts = dict.fromkeys(DeltaKind, "")
    calls: list[list[str]] = []
    for delta in deltas:
        assert delta.text
        if delta.kind is DeltaKind.CALL:
            assert delta.call == len(calls)
            calls.append([delta.text, ""])
        elif delta.kind is DeltaKind.ARGUMENTS:
            assert delta.call == len(calls) - 1
            calls[-1][1] += delta.text
        else:
            texts[delta.kind] += delta.text
    named = [(name, arguments) for name, arguments in calls]
    return texts[DeltaKind.REASONING], texts[DeltaKind.CONTENT], named


def check_reading(
    renderer: ChatRenderer, prompt: Sequence[int], ids: Sequence[int], cuts: Sequence[int] = ()
) -> ParsedMessage:
    """Read `ids` whole and in pieces, and check everything that holds of any reading."""
    parsed = renderer.parse(prompt, ids, TOOLS)
    stopped = bool(ids) and ids[-1] in renderer.stop_ids
    assert (parsed.state is ParseState.TRUNCATED) == (not stopped)
    assert parsed.raw_text == renderer.decode(ids[:-1] if stopped else ids)
    for text in (parsed.content, parsed.reasoning or "", parsed.raw_text, parsed.error or ""):
        text.encode()
    for call in parsed.tool_calls:
        assert call.name
        assert call.status.readable
        assert (call.status == "ok") == (call.error is None)
        assert isinstance(json.loads(call.arguments, parse_constant=_never), dict)
        assert call_arguments(call.arguments) is not None
    for call in parsed.unreadable:
        assert not call.status.readable
        assert call.error
        assert call.raw.strip() in parsed.content
    if parsed.unreadable:
        assert parsed.state is not ParseState.OK
    if parsed.state is ParseState.MALFORMED or parsed.unreadable:
        assert parsed.error
    reader = renderer.reader(prompt, TOOLS)
    deltas: list[Delta] = []
    for start, end in itertools.pairwise([0, *sorted(cuts), len(ids)]):
        deltas += reader.feed(ids[start:end])
    last, message = reader.finish()
    assert message == parsed
    calls = [(call.name, call.arguments) for call in parsed.tool_calls]
    assert put_together([*deltas, *last]) == (parsed.reasoning or "", parsed.content, calls)
    return parsed


def _never(constant: str) -> None:
    raise AssertionError(constant)
