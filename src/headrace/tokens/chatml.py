"""ChatML checkpoints such as SmolLM2-135M-Instruct, whose own template knows no tools.

Turns follow the checkpoint's jinja template, which is compared with this code when the renderer is
made, default system prompt included. Tools are described in the system turn, called Hermes-style
(`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`) and answered in a user turn
(`<tool_response>...</tool_response>`). "chatml-xml" writes calls as <invoke> elements instead. A
model that begins with `<think>...</think>` is understood, and its thinking stays in the context.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from headrace.errors import UserError
from headrace.tokens.calls import (
    invocation_example,
    json_example,
    read_invocations,
    read_json_call,
)
from headrace.tokens.detokenise import TokenBytes
from headrace.tokens.lexer import Tags
from headrace.tokens.message_builder import Spaces
from headrace.tokens.messages import Message, call_arguments, message_parts
from headrace.tokens.parsed import ParsedCall, ParsedMessage
from headrace.tokens.reader import Block, Grammar, TaggedReader, read_whole
from headrace.tokens.schema import Tool
from headrace.tokens.tokenizer import TextTokenizer

_START, _END = "<|im_start|>", "<|im_end|>"
_THINK, _THINK_END = "<think>", "</think>"
_XML_TAGS = ("<invoke name=", "</invoke>", "<parameter name=", "</parameter>")

CallFormat = Literal["json", "xml"]
"""How a call is written: Hermes-style JSON in <tool_call>, or <invoke> in <function_calls>."""

_CALL_TAGS: dict[CallFormat, tuple[str, str]] = {
    "json": ("<tool_call>", "</tool_call>"),
    "xml": ("<function_calls>", "</function_calls>"),
}
_SHOWN_CALLS: dict[CallFormat, str] = {
    "json": '<tool_call>{"name": "tool", "arguments": {"key": "value"}}</tool_call>',
    "xml": '<function_calls><invoke name="tool"><parameter name="key">value</parameter></invoke>'
    "</function_calls>",
}


class TemplateRenderer:
    """Renders and parses ChatML. See `ChatRenderer` for the methods' contracts.

    Text of messages is always encoded as plain text. A turn's text is encoded on its own, not
    merged with the role line before it, so prompts, sampled text and training ids line up exactly.
    """

    def __init__(self, tokenizer: TextTokenizer, calls: CallFormat = "json") -> None:
        """
        Args:
            tokenizer: the checkpoint's tokenizer.
            calls: how tool calls are written.

        Raises:
            UserError: the checkpoint has no ChatML tokens or template.
        """
        default_system = _default_system(tokenizer)
        if default_system is None:
            raise UserError(
                f"renderer 'chatml': the chat template of {tokenizer.name_or_path!r} is not "
                "plain ChatML; name another renderer (glm-5, qwen3, ...)"
            )
        self.id = "chatml" if calls == "json" else f"chatml-{calls}"
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.think_end_id = tokenizer.special_ids.get(_THINK_END)
        self._calls: CallFormat = calls
        self._default_system = default_system
        self._start = tokenizer.special_ids[_START]
        self._end = tokenizer.special_ids[_END]
        self._newline = tokenizer.encode_text("\n")
        end_of_text = tokenizer.special_ids.get("<|endoftext|>")
        self.stop_ids = (self._end,) if end_of_text is None else (self._end, end_of_text)
        self._headers = {
            role: [self._start, *tokenizer.encode_text(f"{role}\n")]
            for role in ("system", "user", "assistant")
        }
        self._grammar = self._make_grammar()

    def _make_grammar(self) -> Grammar:
        opener, closer = _CALL_TAGS[self._calls]
        literals = [_THINK, _THINK_END, opener, closer]
        literals += _XML_TAGS if self._calls == "xml" else ()
        special = self.tokenizer.special_ids
        atoms = {special[tag]: tag for tag in (*literals, _START) if tag in special}
        atoms |= {token: self.tokenizer.decode([token]) for token in self.stop_ids}

        return Grammar(
            tags=Tags(TokenBytes(self.tokenizer), atoms, literals),
            call=opener,
            call_end=closer,
            read_block=_read_xml if self._calls == "xml" else _read_json,
            example=invocation_example if self._calls == "xml" else _hermes_example,
            stop_ids=frozenset(self.stop_ids),
            decode=self.tokenizer.decode,
            think=_THINK,
            think_end=_THINK_END,
            think_anywhere=False,
            spaces=Spaces.KEPT_WITHOUT_CALLS,
        )

    @staticmethod
    def fits(tokenizer: TextTokenizer) -> bool:
        """Whether the checkpoint's own template is the format of this renderer."""
        return _default_system(tokenizer) is not None

    # ------------------------------------------------------------------ messages to ids

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        return self._layout(messages, tools)[0] + self._headers["assistant"]

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None:
        if not prompt_ids or not new_messages:
            return None
        closed = bool(completion_ids) and completion_ids[-1] == self._end
        ids = [] if closed else [self._end]
        ids += self._newline
        for message in new_messages:
            if message["role"] == "assistant":
                return None
            ids += self._turn(message)
        return ids + self._headers["assistant"]

    def render_training(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        ids, mask = self._layout(messages, tools)
        if messages and messages[-1]["role"] == "assistant":
            # Nothing is sampled after the last stop token, so the line break after it is no input.
            del ids[-len(self._newline) :], mask[-len(self._newline) :]
        return ids, mask

    def _layout(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        rest = messages
        system = self._default_system
        if messages and messages[0]["role"] in ("system", "developer"):
            system, rest = messages[0]["content"], messages[1:]
        if tools:
            system = "\n".join(filter(None, [system, describe_tools(tools, self._calls)]))
        ids: list[int] = []
        if system or len(rest) < len(messages):
            ids += self._turn({"role": "system", "content": system})
        mask = [False] * len(ids)
        for message in rest:
            if message["role"] == "assistant":
                header = self._headers["assistant"]
                body = [*self._assistant_text(message), self._end]
                ids += [*header, *body, *self._newline]
                mask += [False] * len(header)
                mask += [message.get("train", True)] * len(body)
                mask += [False] * len(self._newline)
            else:
                turn = self._turn(message)
                ids += turn
                mask += [False] * len(turn)
        return ids, mask

    def _turn(self, message: Message) -> list[int]:
        role, text = message["role"], message["content"]
        if role == "tool":
            role, text = "user", f"<tool_response>{text}</tool_response>"
        elif role == "developer":
            role = "system"
        return [*self._headers[role], *self.tokenizer.encode_text(text), self._end, *self._newline]

    def _assistant_text(self, message: Message) -> list[int]:
        """What the model samples before its stop token."""
        ids: list[int] = []
        text = ""
        for piece, is_tag in self._assistant_pieces(message):
            token = self.tokenizer.special_ids.get(piece) if is_tag else None
            if token is None:
                text += piece
            else:
                ids += [*self.tokenizer.encode_text(text), token]
                text = ""
        return ids + self.tokenizer.encode_text(text)

    def _assistant_pieces(self, message: Message) -> Iterator[tuple[str, bool]]:
        """Texts, and tags that may be tokens of their own (True)."""
        opener, closer = _CALL_TAGS[self._calls]
        for part in message_parts(message):
            if "reasoning_content" in part:
                yield _THINK, True
                yield f"\n{part['reasoning_content']}\n", False
                yield _THINK_END, True
                yield "\n\n", False
            yield part["content"], False
            for call in part.get("tool_calls", ()):
                yield opener, True
                yield self._call_text(call["function"]), False
                yield closer, True

    def _call_text(self, function: dict[str, Any]) -> str:
        if self._calls == "json":
            return _call_json(function)
        arguments = call_arguments(function["arguments"])
        if arguments is None:  # a client made it up; show the model what was written
            arguments = {"arguments": function["arguments"]}
        texts = {
            key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for key, value in arguments.items()
        }
        parameters = "".join(
            f'<parameter name="{key}">{text}</parameter>' for key, text in texts.items()
        )
        return f'<invoke name="{function["name"]}">{parameters}</invoke>'

    # ------------------------------------------------------------------ ids to a message

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def parse(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        tools: Sequence[dict[str, Any]],
    ) -> ParsedMessage:
        return read_whole(self.reader(prompt_ids, tools), completion_ids)

    def reader(self, prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> TaggedReader:
        del prompt_ids  # every turn begins alike
        return TaggedReader(self._grammar, tools)

    def close_thinking(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> list[int]:
        reader = self.reader(prompt_ids, ())
        reader.feed(sampled_ids)
        if not reader.thinks:
            return []
        end = self.tokenizer.special_ids.get(_THINK_END)
        if end is None:
            return self.tokenizer.encode_text(f"\n{_THINK_END}\n\n")
        encode = self.tokenizer.encode_text
        return [*encode("\n"), end, *encode("\n\n")]


def describe_tools(tools: Sequence[dict[str, Any]], calls: CallFormat = "json") -> str:
    """A few lines that tell a model which tools there are and how to call one."""
    lines = ["Tools:"]
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        arguments = ", ".join(
            f"{key}: {value.get('type', 'any') if isinstance(value, dict) else 'any'}"
            for key, value in (properties or {}).items()
        )
        about = function.get("description")
        lines.append(f"{function['name']}({arguments})" + (f": {about}" if about else ""))
    lines.append(f"Call one with {_SHOWN_CALLS[calls]}")
    return "\n".join(lines)


def _call_json(function: dict[str, Any]) -> str:
    """A call as the model writes it: JSON with a space after every colon and comma."""
    arguments = call_arguments(function["arguments"])
    value = function["arguments"] if arguments is None else arguments
    call = msgspec.json.encode({"name": function["name"], "arguments": value})
    return msgspec.json.format(call, indent=0).decode()


def _read_json(block: Block, tools: dict[str, Tool]) -> list[ParsedCall]:
    return [read_json_call(block.text, tools)]


def _read_xml(block: Block, tools: dict[str, Tool]) -> list[ParsedCall]:
    return read_invocations(block.text, tools)


def _hermes_example(tool: Tool | None) -> str:
    return f"<tool_call>{json_example(tool)}</tool_call>"


_PROBE = [("user", "a"), ("assistant", "b"), ("user", "c")]


def _default_system(tokenizer: TextTokenizer) -> str | None:
    """System prompt the template adds when there is none ("" for none); None: not ChatML."""
    if _START not in tokenizer.special_ids or _END not in tokenizer.special_ids:
        return None
    template = tokenizer.chat_template
    if template is None:
        return None
    import jinja2
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def run(messages: list[tuple[str, str]]) -> str:
        shaped = [{"role": role, "content": content} for role, content in messages]
        return environment.from_string(template).render(
            messages=shaped, tools=None, add_generation_prompt=True, eos_token=_END, bos_token=""
        )

    def expect(messages: list[tuple[str, str]]) -> str:
        turns = "".join(f"{_START}{role}\n{text}{_END}\n" for role, text in messages)
        return f"{turns}{_START}assistant\n"

    try:
        with_system = [("system", "s"), *_PROBE]
        if run(with_system) != expect(with_system):
            return None
        bare = run(_PROBE)
    except Exception:  # whatever a foreign template raises, it is not the one we know
        return None
    if not bare.endswith(expect(_PROBE)):
        return None
    added = bare.removesuffix(expect(_PROBE))
    if not added:
        return ""
    match = re.fullmatch(
        re.escape(f"{_START}system\n") + "(.*)" + re.escape(f"{_END}\n"), added, re.DOTALL
    )
    return match.group(1) if match else None
