"""Whole conversations of the `renderers` library's formats, for supervised training.

Turn by turn, as they would be sampled, or in the layout that the template gives a finished one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.tokens.library_messages import shape_messages
from headrace.tokens.messages import Message
from headrace.tokens.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from renderers import Renderer

    from headrace.tokens.library import LibraryRenderer


def lay_out_turns(
    renderer: "LibraryRenderer", messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> tuple[list[int], list[bool]] | None:
    """Ids and mask as rendering, sampling and bridging give them; None where that cannot be."""
    ids: list[int] = []
    mask: list[bool] = []
    prompt: list[int] = []
    completion: list[int] = []
    since = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if completion:
            delta = renderer.bridge(prompt, completion, messages[since:i], tools)
            if delta is None:
                return None
            prompt = [*prompt, *completion, *delta]
        elif i:
            prompt = delta = renderer.render(messages[:i], tools)
        else:
            return None
        sampled = renderer.completion(messages[: i + 1], tools)
        if sampled is None:
            return None
        completion, since = sampled, i + 1
        ids += [*delta, *completion]
        mask += [False] * len(delta) + [message.get("train", True)] * len(completion)
    if not completion or since < len(messages):
        return None
    return ids, mask


def lay_out_whole(
    library: "Renderer",
    tokenizer: TextTokenizer,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
) -> tuple[list[int], list[bool]]:
    """Ids and mask as the template lays out a finished conversation.

    Several thoughts of one message stand together at its front.
    """
    import renderers

    sample = renderers.build_training_sample(
        library,
        shape_messages(tokenizer, messages)[0],
        tools=list(tools) or None,  # type: ignore[arg-type]  # OpenAI tools, as documented
        role_to_mask=lambda message: message["role"] == "assistant",
        ensure_final_stop=True,
        message_loss_mask=[message.get("train", True) for message in messages],
    )
    return sample.token_ids, sample.loss_mask
