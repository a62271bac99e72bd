"""What a chat renderer is: messages to ids, ids to a message, and the exact step between turns.

`create_renderer` finds the renderer of a checkpoint. Everything else in the product talks to the
`ChatRenderer` protocol and never sees a template.
"""

import contextlib
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import UserError
from headrace.tokens.messages import Message
from headrace.tokens.parsed import ParsedCall as ParsedCall
from headrace.tokens.parsed import ParsedMessage as ParsedMessage
from headrace.tokens.parsed import StreamReader
from headrace.tokens.tokenizer import TextTokenizer, load_tokenizer


class ChatRenderer(Protocol):
    """Messages to ids and back for one checkpoint. Pure apart from its tokenizer; thread-safe.

    Messages are normalised (`headrace.tokens.messages.normalise`).

    Attributes:
        id: recorded with every call.
        tokenizer: the checkpoint's tokenizer.
        stop_ids: sampling ends after one of these.
        vocab_size: number of token ids.
        think_end_id: the token that ends thinking, or None where no single token does. A request
            with a budget for thinking stops there too (`headrace.tokens.thinking`).
    """

    id: str
    tokenizer: TextTokenizer
    stop_ids: tuple[int, ...]
    vocab_size: int
    think_end_id: int | None

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Prompt ids of a conversation, ending where the assistant's next turn begins.

        Raises:
            ValueError: the template has no place for these messages.
        """
        ...

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None:
        """Ids to append after `prompt_ids + completion_ids` so that the next turn can begin.

        Closes the assistant's turn as the template does, also when the completion was cut, then
        renders `new_messages` (no assistant among them) and opens the next turn. No held id is
        changed (law L1). None when the template cannot be continued so.
        """
        ...

    def parse(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        tools: Sequence[dict[str, Any]],
    ) -> ParsedMessage:
        """Read any completion (law L13); never raises for any ids, linear in their number."""
        ...

    def reader(self, prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> StreamReader:
        """Read one completion of this prompt while it is sampled; agrees with `parse`."""
        ...

    def close_thinking(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> list[int]:
        """Ids that end thinking after `prompt_ids + sampled_ids`, as this format ends it.

        [] when it is not in thinking there. They are part of the completion and are read as such
        by `parse` and `bridge`, but were never sampled and so never train (law L3).
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens as literals."""
        ...

    def render_training(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        """A finished conversation for supervised training.

        Ids are laid out as render, sampling and bridge would have produced them. The mask, of the
        same length, is True on what the model is to sample (content, tool calls, stop token) of
        assistant messages whose `train` is not False.
        """
        ...


_LIBRARY_BY_MODEL_TYPE = {
    "glm_moe_dsa": "glm-5",
    "glm4_moe": "glm-4.5",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "gpt_oss": "gpt-oss",
}
"""Renderers of the `renderers` library by a checkpoint's config.json `model_type`."""


def create_renderer(
    name: str, tokenizer_dir: str | Path, options: dict[str, Any] | None = None
) -> ChatRenderer:
    """The renderer called `name` over the tokenizer in `tokenizer_dir`.

    Args:
        name: "auto", "compact" (own format of small models), "chatml" (the checkpoint's own
            ChatML template), "chatml-xml" (the same with calls as <invoke> elements) or any
            renderer of the `renderers` library ("glm-5", "qwen3", "llama-3", ...).
        tokenizer_dir: checkpoint directory.
        options: settings of a library renderer, e.g. {"enable_thinking": False}.

    Raises:
        UserError: unknown name, unreadable tokenizer, or a checkpoint that does not fit.
    """
    from headrace.tokens.chatml import TemplateRenderer
    from headrace.tokens.compact import CompactRenderer

    tokenizer = load_tokenizer(tokenizer_dir)
    if name == "auto":
        name = _detect(tokenizer, Path(tokenizer_dir))
    if options and name in ("compact", "chatml", "chatml-xml"):
        raise UserError(f"renderer {name!r} has no options, got {sorted(options)}; remove them")
    if name == "compact":
        return CompactRenderer(tokenizer)
    if name in ("chatml", "chatml-xml"):
        return TemplateRenderer(tokenizer, "xml" if name == "chatml-xml" else "json")
    from headrace.tokens.library import LibraryRenderer, library_names

    known = ["auto", "compact", "chatml", "chatml-xml", *library_names()]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise UserError(f"renderer {name!r} is unknown; {hint}")
    return LibraryRenderer(name, tokenizer, options)


def _detect(tokenizer: TextTokenizer, directory: Path) -> str:
    from headrace.tokens.chatml import TemplateRenderer

    own = tokenizer.config.get("headrace_renderer")
    if isinstance(own, str):
        return own
    model_type = None
    # The model loader reports a broken config.json; here the template may still tell.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        model_type = json.loads((directory / "config.json").read_text()).get("model_type")
    if model_type in _LIBRARY_BY_MODEL_TYPE:
        return _LIBRARY_BY_MODEL_TYPE[model_type]
    if TemplateRenderer.fits(tokenizer):
        return "chatml"
    raise UserError(
        f"renderer 'auto': the chat template of {str(directory)!r} is not recognised; "
        "name a renderer (compact, chatml, glm-5, qwen3, ...)"
    )
