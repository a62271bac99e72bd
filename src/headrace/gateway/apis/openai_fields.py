"""What the bodies of OpenAI's APIs have in common, and how it is read.

`top_k`, `min_p` and `repetition_penalty` are the extensions that vLLM and SGLang share. Which
values are in range is not decided here: a `Turn` checks that, whichever API it came through.
"""

from typing import Any

import msgspec

from headrace.gateway.turn import Wish


class StreamOptions(msgspec.Struct, frozen=True):
    """What to add to a stream."""

    include_usage: bool = False


class SampledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What chat completions and completions say alike: how to sample, and how to answer."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None

    @property
    def answers(self) -> int:
        """How many are wanted."""
        return 1 if self.n is None else self.n

    @property
    def counted(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def wish(self, **own: Any) -> Wish:
        """How to sample.

        Args:
            own: fields of `Wish` that one API reads in its own way.
        """
        shared = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # vLLM's spelling of "all"
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
        }
        return Wish.of(**shared | own)
