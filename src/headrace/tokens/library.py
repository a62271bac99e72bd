"""Model families whose templates the `renderers` library carries (GLM-5, Qwen3, gpt-oss ...).

The library renders, bridges and parses; this module holds it to the laws: a bridge that would
change a held token is refused, a parser that fails becomes a malformed message, and special tokens
in text from outside are shielded from the encoder.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.rollout.types import ParseState
from headrace.tokens.messages import TRAINING_KEYS, Message, call_arguments
from headrace.tokens.renderer import ParsedCall, ParsedMessage
from headrace.tokens.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from renderers import Renderer

_log = logging.getLogger(__name__)


def library_names() -> list[str]:
    """Names that `LibraryRenderer` accepts."""
    from renderers import base

    base._populate_registry()
    return sorted(set(base.RENDERER_REGISTRY) - {"default"})


class LibraryRenderer:
    """One renderer of the library. See `ChatRenderer` for the methods' contracts."""

    def __init__(
        self, name: str, tokenizer: TextTokenizer, options: dict[str, Any] | None = None
    ) -> None:
        """
        Args:
            name: one of `library_names()`.
            tokenizer: the checkpoint's tokenizer.
            options: fields of the library's configuration of this renderer.

        Raises:
            UserError: an option is unknown, or the tokenizer lacks tokens the format needs.
        """
        import pydantic
        import renderers

        default = renderers.config_from_name(name)
        if default is None:
            raise UserError(f"renderer {name!r} is no library renderer; name one, e.g. 'glm-5'")
        try:
            config = type(default).model_validate({"name": name, **(options or {})})
            self._renderer: Renderer = renderers.create_renderer(tokenizer, config)  # type: ignore[arg-type]  # the declared union lists classes we only know by name
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"renderer {name!r}: option {'.'.join(map(str, first['loc']))} = "
                f"{first.get('input')!r}: {first['msg']}"
            ) from error
        except (AssertionError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"renderer {name!r} does not fit tokenizer {tokenizer.name_or_path!r}: {error}"
            ) from error
        self.id = f"renderers:{name}"
        self._name = name
        self._options = dict(options or {})
        self._variants: dict[tuple[tuple[str, Any], ...], LibraryRenderer] = {}
        self._implied_stops: dict[bool, int] = {}
        self.option_names = frozenset(type(config).model_fields) - {"name"}
        """Options this format knows, e.g. enable_thinking."""
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())

    def with_options(self, **changes: Any) -> "LibraryRenderer":
        """The same format with some options set otherwise; equal changes give one object.

        Raises:
            UserError: an option is unknown.
        """
        options = {**self._options, **changes}
        if options == self._options:
            return self
        key = tuple(sorted(changes.items()))
        if key not in self._variants:
            self._variants[key] = LibraryRenderer(self._name, self.tokenizer, options)
        return self._variants[key]

    # ------------------------------------------------------------------ messages to ids

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        try:
            return self._render(messages, tools, generate=True)
        except Exception as error:  # templates raise anything on conversations they do not know
            raise ValueError(f"{self.id}: {error!r}") from error

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generate: bool
    ) -> list[int]:
        return self._renderer.render_ids(
            self._shape(messages),
            tools=list(tools) or None,  # type: ignore[arg-type]  # OpenAI tools, as documented
            add_generation_prompt=generate,
        )

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None:
        held = [*prompt_ids, *completion_ids]
        try:
            bridged = self._renderer.bridge_to_next_turn(
                list(prompt_ids),
                list(completion_ids),
                self._shape(new_messages),
                tools=list(tools) or None,  # type: ignore[arg-type]  # OpenAI tools, as documented
            )
        except Exception as error:  # a foreign parser inside the bridge; a fork is the safe answer
            _log.warning("%s: bridge failed: %r", self.id, error)
            return None
        if bridged is None or bridged.token_ids[: len(held)] != held:
            return None
        return list(bridged.token_ids[len(held) :])

    def _shape(self, messages: Sequence[Message]) -> list[Any]:
        """Messages as the library takes them: arguments as objects, outside text shielded."""
        shaped: list[Any] = []
        for message in messages:
            new: dict[str, Any] = {k: v for k, v in message.items() if k not in TRAINING_KEYS}
            if message["role"] == "developer":
                new["role"] = "system"
            if message["role"] != "assistant":
                new["content"] = self.tokenizer.shield(message["content"])
            else:
                self._shape_assistant(new)
            shaped.append(new)
        return shaped

    def _shape_assistant(self, message: dict[str, Any]) -> None:
        """Shield its texts and arguments, except thinking that a client left inside the content."""
        shield = self.tokenizer.shield
        if "reasoning_content" in message:
            message["reasoning_content"] = shield(message["reasoning_content"])
        if "reasoning_content" in message or "</think>" not in message["content"]:
            message["content"] = shield(message["content"])
        if "tool_calls" in message:
            message["tool_calls"] = [_shape_call(call, shield) for call in message["tool_calls"]]

    def _as_prompted(self, prompt_ids: Sequence[int]) -> "LibraryRenderer":
        """This format with thinking on or off as the prompt left it, where the prompt shows it."""
        if "enable_thinking" not in self.option_names or not prompt_ids:
            return self
        tags = self.tokenizer.special_ids
        if prompt_ids[-1] == tags.get("<think>"):
            return self.with_options(enable_thinking=True)
        if prompt_ids[-1] == tags.get("</think>"):
            return self.with_options(enable_thinking=False)
        return self

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
        raw = self.decode(completion_ids[:-1] if stopped else completion_ids)
        failed = ParsedMessage(
            raw, None, (), ParseState.MALFORMED if stopped else ParseState.TRUNCATED, raw
        )
        try:
            read = self._as_prompted(prompt_ids)._renderer.parse_response(
                list(completion_ids),
                tools=list(tools) or None,  # type: ignore[arg-type]  # OpenAI tools, as documented
                prompt_ids=list(prompt_ids),
            )
        except Exception as error:  # law L13: foreign parsers may raise, this one may not
            _log.warning("%s: parse failed: %r", self.id, error)
            return failed
        if not stopped or read.reasoning_complete is False:
            return failed  # thinking that never ends has no answer after it
        calls: list[ParsedCall] = []
        for call in read.tool_calls:
            shaped = _parsed_call(call)
            if shaped is None:
                return failed
            calls.append(shaped)
        return ParsedMessage(
            read.content, read.reasoning_content or None, tuple(calls), ParseState.OK, raw
        )

    # ------------------------------------------------------------------ supervised training

    def render_training(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        """See `ChatRenderer`. Where the template cannot be continued turn by turn (for example
        because it drops earlier thinking), its own layout of the whole conversation is used."""
        turns = self._by_turns(messages, tools)
        return self._whole(messages, tools) if turns is None else turns

    def _by_turns(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[bool]] | None:
        ids: list[int] = []
        mask: list[bool] = []
        prompt: list[int] = []
        completion: list[int] = []
        since = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if completion:
                delta = self.bridge(prompt, completion, messages[since:i], tools)
                if delta is None:
                    return None
                prompt = [*prompt, *completion, *delta]
            elif i:
                prompt = delta = self.render(messages[:i], tools)
            else:
                return None
            sampled = self.completion(messages[: i + 1], tools)
            if sampled is None:
                return None
            completion, since = sampled, i + 1
            ids += [*delta, *completion]
            mask += [False] * len(delta) + [message.get("train", True)] * len(completion)
        if not completion or since < len(messages):
            return None
        return ids, mask

    def completion(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        prompt: Sequence[int] | None = None,
    ) -> list[int] | None:
        """What the model samples for the last of `messages`, stop token included.

        Args:
            prompt: ids of `render(messages[:-1])`, when the caller has them.

        Returns:
            None when this template does not lay the message out after its own prompt, for example
            a message without thinking where the prompt has opened it.
        """
        if prompt is None:
            prompt = self._render(messages[:-1], tools, generate=True)
        whole = self._render(messages, tools, generate=False)
        if whole[: len(prompt)] != list(prompt):
            return None
        sampled = whole[len(prompt) :]
        stop = next((i for i, token in enumerate(sampled) if token in self.stop_ids), None)
        if stop is not None:
            return sampled[: stop + 1]
        return [*sampled, self._implied_stop(calls=bool(messages[-1].get("tool_calls")))]

    def _implied_stop(self, *, calls: bool) -> int:
        """The stop token of templates whose turns end with the next role's opener.

        It depends on whether the turn makes calls and on nothing else, so a conversation of three
        messages shows it. That has no thinking, which a following user message might take away.
        """
        if calls not in self._implied_stops:
            turn: Message = {"role": "assistant", "content": "a"}
            follow: Message = {"role": "user", "content": ""}
            if calls:
                function = {"name": "f", "arguments": "{}"}
                turn["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
                follow = {"role": "tool", "content": "", "tool_call_id": "c", "name": "f"}
            messages: list[Message] = [{"role": "user", "content": "u"}, turn]
            before = len(self._render(messages, (), generate=False))
            after = self._render([*messages, follow], (), generate=False)
            token = after[before] if before < len(after) else self.stop_ids[0]
            self._implied_stops[calls] = token if token in self.stop_ids else self.stop_ids[0]
        return self._implied_stops[calls]

    def _whole(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        import renderers

        sample = renderers.build_training_sample(
            self._renderer,
            self._shape(messages),
            tools=list(tools) or None,  # type: ignore[arg-type]  # OpenAI tools, as documented
            role_to_mask=lambda message: message["role"] == "assistant",
            ensure_final_stop=True,
            message_loss_mask=[message.get("train", True) for message in messages],
        )
        return sample.token_ids, sample.loss_mask


def _shape_call(call: dict[str, Any], shield: Callable[[str], str]) -> dict[str, Any]:
    function = call["function"]
    arguments = call_arguments(function["arguments"]) or {}
    shaped = {"name": function["name"], "arguments": _shield_strings(arguments, shield)}
    return {**call, "function": shaped}


def _shield_strings(value: Any, shield: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, dict):
        return {key: _shield_strings(item, shield) for key, item in value.items()}
    if isinstance(value, list):
        return [_shield_strings(item, shield) for item in value]
    return value


def _parsed_call(call: Any) -> ParsedCall | None:
    import msgspec
    from renderers import ToolCallParseStatus

    # An undeclared tool is the agent's to refuse: it tells the model so in a tool result.
    if call.status not in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL):
        return None
    arguments = call.arguments
    if isinstance(arguments, str):
        arguments = call_arguments(arguments)
    if not call.name or not isinstance(arguments, dict):
        return None
    try:
        return ParsedCall(call.name, msgspec.json.encode(arguments).decode())
    except (TypeError, ValueError, RecursionError):
        return None
