"""Model families whose templates the `renderers` library carries (GLM-5, Qwen3, gpt-oss ...).

The library renders, bridges and parses; this module holds it to the laws: a bridge that would
change a held token is refused, a parser that fails becomes a malformed message, and special tokens
in text from outside are shielded from the encoder.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.rollout.types import ParseState
from headrace.tokens.messages import Message, call_arguments
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
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())

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
            new: dict[str, Any] = {k: v for k, v in message.items() if k != "train"}
            if message["role"] == "developer":
                new["role"] = "system"
            if message["role"] != "assistant":
                new["content"] = self.tokenizer.shield(message["content"])
            elif "tool_calls" in message:
                new["tool_calls"] = [_shape_call(call) for call in message["tool_calls"]]
            shaped.append(new)
        return shaped

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
            read = self._renderer.parse_response(
                list(completion_ids),
                tools=list(tools) or None,  # type: ignore[arg-type]  # OpenAI tools, as documented
                prompt_ids=list(prompt_ids),
            )
        except Exception as error:  # law L13: foreign parsers may raise, this one may not
            _log.warning("%s: parse failed: %r", self.id, error)
            return failed
        if not stopped:
            return failed
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
            sampled = self._completion(messages[: i + 1], tools)
            if sampled is None:
                return None
            completion, since = sampled, i + 1
            ids += [*delta, *completion]
            mask += [False] * len(delta) + [message.get("train", True)] * len(completion)
        if not completion or since < len(messages):
            return None
        return ids, mask

    def _completion(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | None:
        """What the model samples for the last of `messages`, or None when it is not a suffix."""
        prompt = self._render(messages[:-1], tools, generate=True)
        whole = self._render(messages, tools, generate=False)
        if whole[: len(prompt)] != prompt:
            return None
        sampled = whole[len(prompt) :]
        stop = next((i for i, token in enumerate(sampled) if token in self.stop_ids), None)
        if stop is not None:
            return sampled[: stop + 1]
        return [*sampled, self._implied_stop(messages, tools)]

    def _implied_stop(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
        """The stop token of templates whose turns end with the next role's opener."""
        follow: Message = {"role": "tool" if messages[-1].get("tool_calls") else "user"}
        follow["content"] = ""
        before = len(self._render(messages, tools, generate=False))
        after = self._render([*messages, follow], tools, generate=False)
        token = after[before] if before < len(after) else self.stop_ids[0]
        return token if token in self.stop_ids else self.stop_ids[0]

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


def _shape_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = call_arguments(function["arguments"])
    shaped = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {**call, "function": shaped}


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
