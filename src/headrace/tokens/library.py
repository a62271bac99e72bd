"""Model families whose templates the `renderers` library carries (GLM-5, Qwen3, gpt-oss ...).

The library renders and bridges; this module holds it to the laws: a bridge that would change a held
token is refused, and special tokens in text from outside are shielded from the encoder. It adds
what templates have no place for: thinking kept over user turns where the template drops it, on and
off from request to request, and several thoughts in one message. `headrace.tokens.library_reading`
reads completions.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.tokens.library_messages import shape_messages
from headrace.tokens.library_reading import LibraryReading
from headrace.tokens.library_training import lay_out_turns, lay_out_whole
from headrace.tokens.messages import Message
from headrace.tokens.parsed import ParsedMessage, StreamReader
from headrace.tokens.reader import TaggedReader, read_whole
from headrace.tokens.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from renderers import Renderer

_log = logging.getLogger(__name__)

_KEEPING_OPTIONS = {
    "clear_thinking": False,
    "preserve_thinking": True,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
"""Options of templates that can keep the thinking of earlier turns, and their value for it."""

_TAIL = 16
"""So many ids at the end of a prompt show how the assistant's turn was opened."""

_RETENTION = "thinking_retention"
"""The library's option for bridges; "all" keeps thinking, whatever the template would do."""


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
        self._variants: dict[str, LibraryRenderer] = {repr(sorted(self._options.items())): self}
        self._implied_stops: dict[bool, int] = {}
        self._reading = LibraryReading(name, self._renderer, tokenizer)
        self.option_names = frozenset(type(config).model_fields) - {"name"}
        """Options this format knows, e.g. enable_thinking."""
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())
        self.think_end_id = self._reading.think_end_id
        self._keeping_option = next(iter(_KEEPING_OPTIONS.keys() & self.option_names), None)
        self.keeps_thinking = self._keeps(config)
        """Whether the thinking of earlier turns stays in the context when a user speaks again."""
        self._keeps_by_turns = self.keeps_thinking and self._keeping_option is None

    def with_options(self, **changes: Any) -> "LibraryRenderer":
        """The same format with some options set otherwise; equal options give one object.

        Raises:
            UserError: an option is unknown.
        """
        options = {**self._options, **changes}
        if options == self._options:
            return self
        key = repr(sorted(options.items()))
        if key not in self._variants:
            variant = LibraryRenderer(self._name, self.tokenizer, options)
            variant._variants = self._variants
            self._variants[key] = variant
        return self._variants[key]

    def _keeps(self, config: Any) -> bool:
        option = self._keeping_option
        if option is not None:
            return getattr(config, option) == _KEEPING_OPTIONS[option]
        return self._options.get(_RETENTION) == "all"

    @property
    def call_style(self) -> str | None:
        """ "tags" for calls as GLM writes them, "json" for Hermes', None for others."""
        return self._reading.call_style

    @property
    def has_thinking(self) -> bool:
        """Whether the format has a place for thinking at all."""
        return self._name != "llama-3"

    @property
    def can_keep_thinking(self) -> bool:
        """Whether `with_thinking(keep=True)` is possible."""
        return self._keeping_option is not None or self._written_thinking is not None

    @property
    def can_switch_thinking(self) -> bool:
        """Whether `with_thinking(enabled=False)` is possible."""
        return "enable_thinking" in self.option_names

    def with_thinking(
        self, *, enabled: bool | None = None, keep: bool | None = None
    ) -> "LibraryRenderer":
        """The same format with thinking switched, where the format can; None leaves it as it is.

        Args:
            enabled: whether the next turn thinks.
            keep: see `keeps_thinking`.
        """
        changes: dict[str, Any] = {}
        if enabled is not None and self.can_switch_thinking:
            changes["enable_thinking"] = enabled
        if keep is not None and keep != self.keeps_thinking:
            if self._keeping_option is not None:
                changes[self._keeping_option] = _KEEPING_OPTIONS[self._keeping_option] is keep
            elif self.can_keep_thinking:
                changes[_RETENTION] = "all" if keep else None
        return self.with_options(**changes)

    # ------------------------------------------------------------------ messages to ids

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        try:
            if self._keeps_by_turns:
                kept = self._render_kept(messages, tools)
                if kept is not None:
                    return kept
            return self._render(messages, tools, generate=True)
        except Exception as error:  # templates raise anything on conversations they do not know
            raise ValueError(f"{self.id}: {error!r}") from error

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generate: bool
    ) -> list[int]:
        several = any(
            "reasoning_content" in call
            for message in messages
            for call in message.get("tool_calls", ())
        )
        shaped, continued = shape_messages(
            self.tokenizer,
            messages,
            self.keeps_thinking,
            batches=several and self._reading.joins_parts and self._written_thinking is not None,
        )
        rendered = self._renderer.render(
            shaped,
            tools=list(tools) or None,  # type: ignore[arg-type]  # OpenAI tools, as documented
            add_generation_prompt=generate,
        )
        ids, places = list(rendered.token_ids), list(rendered.message_indices)
        if continued:
            self._reading.join_parts(ids, places, continued)
        return ids

    def _render_kept(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | None:
        """The prompt as it came about turn by turn, with the thinking that the template would drop.

        None when the template cannot be continued so, for example after two messages of the
        assistant in a row.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or turns[0] == 0 or turns[-1] == len(messages) - 1:
            return None
        ids: list[int] = []
        completion: list[int] = []
        since = 0
        for i in [*turns, len(messages)]:
            thinks = bool(messages[i].get("reasoning_content")) if i < len(messages) else None
            as_sampled = self.with_thinking(enabled=thinks)
            if completion:
                delta = as_sampled.bridge(ids, completion, messages[since:i], tools)
                if delta is None:
                    return None
                ids += [*completion, *delta]
            else:
                ids = as_sampled._render(messages[:i], tools, generate=True)
            if i < len(messages):
                made = as_sampled.completion(messages[: i + 1], ())
                if made is None:
                    return None
                completion, since = made, i + 1
        return ids

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None:
        """See `ChatRenderer`. None also when a user speaks again and the tokens held have thinking
        that this format drops then: the prompt is to be rendered afresh."""
        keeper = self
        if (
            not self.keeps_thinking
            and self._reading.think_id is not None
            and any(message["role"] == "user" for message in new_messages)
        ):
            recent = [*prompt_ids[-_TAIL:], *completion_ids]
            if self._reading.holds_thinking(prompt_ids) or self._reading.holds_thinking(recent):
                return None
            keeper = self.with_thinking(keep=True)  # nothing is dropped, so nothing is refused
        switched = keeper._as_prompted(prompt_ids)
        opener, wanted = switched._opener, keeper._opener
        if switched is not keeper and (opener is None or wanted is None):
            switched, opener = keeper, wanted
        delta = switched._bridge(prompt_ids, completion_ids, new_messages, tools)
        if delta is None or opener == wanted or opener is None:
            return delta
        if wanted is None or delta[len(delta) - len(opener) :] != opener:
            return None
        return [*delta[: len(delta) - len(opener)], *wanted]

    def _bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None:
        closing: list[int] = []
        prompt, completion = prompt_ids, list(completion_ids)
        reader = self.reader(prompt_ids, ())
        end = self.think_end_id
        if isinstance(reader, TaggedReader) and end is not None:
            # Where thinking stands is known better here. The library, which looks for it in all
            # of them once more, is shown the end of the prompt and a completion in which it ended.
            stop = completion[-1:] if completion and completion[-1] in self.stop_ids else []
            thinks = False
            if not self._reading.has_ended_thinking(completion):
                reader.feed(completion)
                thinks = reader.thinks
            if thinks and stop:
                return None  # ids that end thinking would have to stand before a held one
            closing = list(self._thinking_end) if thinks else []
            prompt, completion = prompt_ids[-_TAIL:], [end, *stop]
        prompt = list(prompt)
        held = [*prompt, *completion]
        try:
            bridged = self._renderer.bridge_to_next_turn(
                prompt,
                completion,
                shape_messages(self.tokenizer, new_messages)[0],
                tools=list(tools) or None,  # type: ignore[arg-type]  # OpenAI tools, as documented
            )
        except Exception as error:  # a foreign template; a fork is the safe answer
            _log.warning("%s: bridge failed: %r", self.id, error)
            return None
        if bridged is None or bridged.token_ids[: len(held)] != held:
            return None
        return [*closing, *bridged.token_ids[len(held) :]]

    @cached_property
    def _opener(self) -> list[int] | None:
        """Ids that open the assistant's turn; None if more of a prompt depends on thinking."""
        probe: list[Message] = [{"role": "user", "content": "u"}]
        try:
            before = self._render(probe, (), generate=False)
            whole = self._render(probe, (), generate=True)
            alike = all(
                self.with_thinking(enabled=enabled)._render(probe, (), generate=False) == before
                for enabled in ((True, False) if self.can_switch_thinking else ())
            )
        except Exception as error:  # templates raise anything on conversations they do not know
            _log.debug("%s: no opener: %r", self.id, error)
            return None
        return whole[len(before) :] if alike and whole[: len(before)] == before else None

    def _as_prompted(self, prompt_ids: Sequence[int]) -> "LibraryRenderer":
        """This format with thinking on or off as the prompt left it, where the prompt shows it."""
        if not self.can_switch_thinking or not prompt_ids:
            return self
        for enabled in (False, True):  # the opener without thinking may go on after the other
            variant = self.with_thinking(enabled=enabled)
            opener = variant._opener
            if opener and list(prompt_ids[-len(opener) :]) == opener:
                return variant
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
        return read_whole(self.reader(prompt_ids, tools), completion_ids)

    def reader(self, prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> StreamReader:
        def parse(ids: list[int]) -> Any:
            return self._as_prompted(prompt_ids)._renderer.parse_response(
                ids,
                tools=list(tools) or None,  # type: ignore[arg-type]  # OpenAI tools, as documented
                prompt_ids=list(prompt_ids),
            )

        return self._reading.reader(prompt_ids, tools, parse)

    def close_thinking(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> list[int]:
        reader = self.reader(prompt_ids, ())
        reader.feed(sampled_ids)
        if not isinstance(reader, TaggedReader) or not reader.thinks:
            return []
        return list(self._thinking_end)

    @property
    def _thinking_end(self) -> list[int]:
        """What stands between thinking and answer where the template writes both."""
        if self.think_end_id is None:
            return []
        written = self._written_thinking
        if written is None:
            return [self.think_end_id]
        encode = self.tokenizer.encode_text
        return [*encode(written[0]), self.think_end_id, *encode(written[1])]

    @cached_property
    def _written_thinking(self) -> tuple[str, str] | None:
        """Texts around the tag that ends the thinking of the last turn; None if there is none."""
        answer: Message = {
            "role": "assistant",
            "content": "answer",
            "reasoning_content": "thought",
        }
        try:
            whole = self._render([{"role": "user", "content": "u"}, answer], (), generate=False)
        except Exception as error:  # templates raise anything on conversations they do not know
            _log.debug("%s: no thinking: %r", self.id, error)
            return None
        if self.think_end_id not in whole:
            return None
        at = len(whole) - 1 - whole[::-1].index(self.think_end_id)
        before, found, left = self.decode(whole[:at]).rpartition("thought")
        right, answered, _ = self.decode(whole[at + 1 :]).partition("answer")
        return (left, right) if found and answered and before else None

    # ------------------------------------------------------------------ supervised training

    def render_training(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        """See `ChatRenderer`. Where the template cannot be continued turn by turn (for example
        because it drops earlier thinking), its own layout of the whole conversation is used."""
        turns = lay_out_turns(self, messages, tools)
        if turns is not None:
            return turns
        return lay_out_whole(self._renderer, self.tokenizer, messages, tools)

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
        if self._keeps_by_turns:  # the turn's own thinking is all that it depends on
            users = (i for i in range(len(messages) - 1, 0, -1) if messages[i]["role"] == "user")
            messages, prompt = messages[next(users, 0) :], None
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
            after = self._render([*messages, follow], (), generate=False)
            # What follows is empty, so the last of them is its opener.
            stops = [token for token in after if token in self.stop_ids]
            self._implied_stops[calls] = stops[-1] if stops else self.stop_ids[0]
        return self._implied_stops[calls]
