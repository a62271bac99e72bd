"""A gateway in front of a scripted engine, for tests that come through its clients."""

from typing import NamedTuple

from scripted import ScriptedEngine, merged_tokenizer

from headrace.gateway.server import GatewayServer
from headrace.rollout.types import Call
from headrace.tokens.library import LibraryRenderer

TOKENIZER = merged_tokenizer()
RENDERER = LibraryRenderer("glm-5", TOKENIZER)
THOUGHT = TOKENIZER.encode("list them</think>")
CALL = TOKENIZER.encode(
    "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call><|observation|>"
)
SAID = TOKENIZER.encode("there are 12<|user|>")
USER = {"role": "user", "content": "how many lines?"}


class Running(NamedTuple):
    """A server, its engine, the calls that were recorded, and the key of its one session."""

    server: GatewayServer
    engine: ScriptedEngine
    calls: list[Call]
    key: str

    @property
    def root(self) -> str:
        return self.server.base_url.removesuffix("/v1")
