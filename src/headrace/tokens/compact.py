"""The compact chat format of models trained from scratch: GLM-5's tokens, as few as possible.

    <sop><|system|>Use bash, then answer.⏎tools: bash<|user|>How many?<|assistant|><tool_call>bash
    <arg_key>command</arg_key><arg_value>ls | wc -l</arg_value></tool_call><|observation|>3
    <|assistant|>3<|user|>

(without the line breaks). As in GLM-5 a turn has no closing token: the model ends its turn by
sampling the next role's opener, <|observation|> after tool calls and <|user|> otherwise, so the
stop token is sampled, trained, and at the same time the first token of the next turn.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.errors import UserError
from headrace.tokens.calls import read_tagged_call, tagged_example
from headrace.tokens.detokenise import TokenBytes
from headrace.tokens.lexer import Tags
from headrace.tokens.message_builder import Spaces
from headrace.tokens.messages import Message, call_arguments, tool_names
from headrace.tokens.parsed import ParsedCall, ParsedMessage
from headrace.tokens.reader import Block, Grammar, TaggedReader, read_whole
from headrace.tokens.schema import Tool
from headrace.tokens.tokenizer import TextTokenizer


class CompactRenderer:
    """Renders and parses the compact format. See `ChatRenderer` for the methods' contracts.

    Text of messages is always encoded as plain text, so no content can forge a role or a call.
    """

    id = "compact"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """
        Raises:
            UserError: the tokenizer lacks one of the chat tokens.
        """
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self._sop = self._require("<sop>")
        self._system = self._require("<|system|>")
        self._user = self._require("<|user|>")
        self._assistant = self._require("<|assistant|>")
        self._observation = self._require("<|observation|>")
        self._call = self._require("<tool_call>")
        self._call_end = self._require("</tool_call>")
        self._key = self._require("<arg_key>")
        self._key_end = self._require("</arg_key>")
        self._value = self._require("<arg_value>")
        self._value_end = self._require("</arg_value>")
        end_of_text = self._require("<|endoftext|>")
        self.stop_ids = (self._user, self._observation, end_of_text)
        self._openers = {
            "system": self._system,
            "developer": self._system,
            "user": self._user,
            "tool": self._observation,
        }
        self.think_end_id: int | None = None
        atoms = {token: literal for literal, token in tokenizer.special_ids.items()}
        self._grammar = Grammar(
            tags=Tags(TokenBytes(tokenizer), atoms),
            call="<tool_call>",
            call_end="</tool_call>",
            read_block=_read_block,
            example=tagged_example,
            stop_ids=frozenset(self.stop_ids),
            decode=tokenizer.decode,
            spaces=Spaces.KEPT,
        )

    def _require(self, token: str) -> int:
        found = self.tokenizer.special_ids.get(token)
        if found is None:
            raise UserError(
                f"renderer 'compact': tokenizer {self.tokenizer.name_or_path!r} has no token "
                f"{token}; train one with headrace or name another renderer"
            )
        return found

    # ------------------------------------------------------------------ messages to ids

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        ids, _ = self._layout(messages, tools)
        ids.append(self._assistant)
        return ids

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None:
        if not prompt_ids or not new_messages:
            return None
        sampled_stop = completion_ids[-1] if completion_ids else None
        ids: list[int] = []
        for message in new_messages:
            if message["role"] == "assistant":
                return None
            ids += self._turn(message, sampled_stop)
            sampled_stop = None
        ids.append(self._assistant)
        return ids

    def render_training(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        return self._layout(messages, tools)

    def _layout(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        """Ids of whole turns and where the model samples to be trained on."""
        ids = [self._sop]
        rest = messages
        system = ""
        if messages and messages[0]["role"] in ("system", "developer"):
            system, rest = messages[0]["content"], messages[1:]
        if tools:
            listed = "tools: " + ", ".join(tool_names(tools))
            system = f"{system}\n{listed}" if system else listed
        if system or len(rest) < len(messages):
            ids.append(self._system)
            ids += self.tokenizer.encode_text(system)
        mask = [False] * len(ids)
        stop: int | None = None
        for message in rest:
            if message["role"] == "assistant":
                body, stop = self._assistant_turn(message)
                ids.append(self._assistant)
                ids += body
                mask.append(False)
                mask += [message.get("train", True)] * len(body)
            else:
                turn = self._turn(message, stop)
                stop = None
                ids += turn
                mask += [False] * len(turn)
        return ids, mask

    def _turn(self, message: Message, sampled_stop: int | None) -> list[int]:
        """A turn that is not the assistant's; its opener is there already if it was sampled."""
        opener = self._openers[message["role"]]
        text = self.tokenizer.encode_text(message["content"])
        return text if opener == sampled_stop else [opener, *text]

    def _assistant_turn(self, message: Message) -> tuple[list[int], int]:
        """What the model samples for `message`, stop token included, and that stop token."""
        encode = self.tokenizer.encode_text
        ids = encode(message["content"])
        calls = message.get("tool_calls") or ()
        for call in calls:
            function = call["function"]
            ids.append(self._call)
            ids += encode(function["name"])
            arguments = call_arguments(function["arguments"])
            if arguments is None:  # a client made it up; show the model what was written
                ids += [self._value, *encode(function["arguments"]), self._value_end]
            else:
                for key, value in arguments.items():
                    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
                    ids += [self._key, *encode(key), self._key_end]
                    ids += [self._value, *encode(text), self._value_end]
            ids.append(self._call_end)
        stop = self._observation if calls else self._user
        ids.append(stop)
        return ids, stop

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
        del prompt_ids, sampled_ids  # this format has no thinking
        return []


def _read_block(block: Block, tools: dict[str, Tool]) -> list[ParsedCall]:
    return [read_tagged_call(block.lexemes, tools)]
