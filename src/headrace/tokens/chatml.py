"""ChatML checkpoints such as SmolLM2-135M-Instruct, whose own template knows no tools.

Turns follow the checkpoint's jinja template, which is compared with this code when the renderer is
made, default system prompt included. Tools are described in the system turn, called Hermes-style
(`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`) and answered in a user turn
(`<tool_response>...</tool_response>`).
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.errors import UserError
from headrace.rollout.types import ParseState
from headrace.tokens.messages import Message, call_arguments
from headrace.tokens.renderer import ParsedCall, ParsedMessage
from headrace.tokens.tokenizer import TextTokenizer

_START, _END = "<|im_start|>", "<|im_end|>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TAG = re.compile(r"</?tool_call>")
_CALL_FORMAT = '<tool_call>{"name": "tool", "arguments": {"key": "value"}}</tool_call>'


class TemplateRenderer:
    """Renders and parses ChatML. See `ChatRenderer` for the methods' contracts.

    Text of messages is always encoded as plain text. A turn's text is encoded on its own, not
    merged with the role line before it, so prompts, sampled text and training ids line up exactly.
    """

    id = "chatml"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """
        Raises:
            UserError: the checkpoint has no ChatML tokens or template.
        """
        default_system = _default_system(tokenizer)
        if default_system is None:
            raise UserError(
                f"renderer 'chatml': the chat template of {tokenizer.name_or_path!r} is not "
                "plain ChatML; name another renderer (glm-5, qwen3, ...)"
            )
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
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
            system = "\n".join(filter(None, [system, describe_tools(tools)]))
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
        text = message["content"]
        ids: list[int] = []
        for call in message.get("tool_calls", ()):
            body = _call_json(call["function"])
            opener = self.tokenizer.special_ids.get("<tool_call>")
            closer = self.tokenizer.special_ids.get("</tool_call>")
            if opener is None or closer is None:
                text += f"<tool_call>{body}</tool_call>"
            else:
                ids += [*self.tokenizer.encode_text(text), opener]
                ids += [*self.tokenizer.encode_text(body), closer]
                text = ""
        return ids + self.tokenizer.encode_text(text)

    # ------------------------------------------------------------------ ids to a message

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def parse(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        tools: Sequence[dict[str, Any]],
    ) -> ParsedMessage:
        stopped = bool(completion_ids) and completion_ids[-1] in self.stop_ids
        body = list(completion_ids[:-1] if stopped else completion_ids)
        raw = self.decode(body)
        if not stopped:
            return ParsedMessage(raw, None, (), ParseState.TRUNCATED, raw)
        content = _CALL.sub("", raw)
        calls = [_read_call(match.group(1)) for match in _CALL.finditer(raw)]
        if self._start in body or _TAG.search(content) or None in calls:
            return ParsedMessage(raw, None, (), ParseState.MALFORMED, raw)
        readable = tuple(call for call in calls if call is not None)
        return ParsedMessage(
            content.strip() if readable else content, None, readable, ParseState.OK, raw
        )


def describe_tools(tools: Sequence[dict[str, Any]]) -> str:
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
    lines.append(f"Call one with {_CALL_FORMAT}")
    return "\n".join(lines)


def _call_json(function: dict[str, Any]) -> str:
    """A call as the model writes it: JSON with a space after every colon and comma."""
    arguments = call_arguments(function["arguments"])
    value = function["arguments"] if arguments is None else arguments
    call = msgspec.json.encode({"name": function["name"], "arguments": value})
    return msgspec.json.format(call, indent=0).decode()


def _read_call(text: str) -> ParsedCall | None:
    call = call_arguments(text)
    name = call.get("name") if call else None
    arguments = call.get("arguments", {}) if call else None
    if isinstance(arguments, str):
        arguments = call_arguments(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ParsedCall(name, msgspec.json.encode(arguments).decode())


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
