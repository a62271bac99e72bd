"""What the scheduler hands around: sequences, and the plan of one pass over the model."""

import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class Sequence:
    """One request inside the engine: its tokens and where their keys and values are.

    Attributes:
        id: of the request.
        session: whose share of the engine it uses.
        priority: higher goes first.
        arrived: seconds on the engine's clock.
        deadline: likewise; the scheduler does not look at it.
        prompt_length: tokens of the prompt.
        limit: most tokens to sample.
        takes_over: computed tokens of others may stand in for its own; False if every position has
            to be computed for this request, e.g. because its logits are wanted.
        length: tokens known, prompt and sampled.
        computed: leading tokens whose keys and values are in `blocks`.
        blocks: position p lies in blocks[p // block_tokens]. While the sequence runs the list only
            grows; it is another list after a preemption or new weights.
        state: "waiting", "running" (holds blocks) or "done".
        decoding: all tokens but the last sampled one are computed.
        drafts: guesses at the tokens after the known ones, computed along with the next pass.
        preemptions: how often it had to give its blocks back.
        reused: tokens it did not compute because the cache held them when it first ran.
        turn: when it first ran, counted in sequences; -1 before. Earlier ones keep their blocks.
        number: when it arrived, counted in sequences.

    Args:
        prompt: [n] token ids, n >= 1.

    Raises:
        ValueError: an empty prompt, or a limit below 1.
    """

    __slots__ = (
        "_buffer",
        "arrived",
        "blocks",
        "computed",
        "deadline",
        "decoding",
        "drafts",
        "id",
        "length",
        "limit",
        "number",
        "preemptions",
        "priority",
        "prompt_length",
        "reused",
        "session",
        "state",
        "takes_over",
        "turn",
    )

    def __init__(
        self,
        id: str,
        prompt: npt.ArrayLike,
        *,
        limit: int,
        session: str = "",
        priority: int = 0,
        arrived: float = 0.0,
        deadline: float = math.inf,
        takes_over: bool = True,
    ) -> None:
        self._buffer: Tokens = np.array(prompt, dtype=np.int32)
        if self._buffer.ndim != 1 or not len(self._buffer) or limit < 1:
            raise ValueError(
                f"sequence {id!r}: a prompt of shape {self._buffer.shape} and a limit of {limit}; "
                "at least one token of each is needed"
            )
        self.id = id
        self.session = session
        self.priority = priority
        self.arrived = arrived
        self.deadline = deadline
        self.takes_over = takes_over
        self.prompt_length = self.length = len(self._buffer)
        self.limit = limit
        self.computed = 0
        self.blocks: list[int] = []
        self.state: Literal["waiting", "running", "done"] = "waiting"
        self.decoding = False
        self.drafts: list[int] = []
        self.preemptions = 0
        self.reused = 0
        self.turn = -1
        self.number = -1

    @property
    def tokens(self) -> Tokens:
        """[length] prompt and sampled tokens; a view that the next `append` may leave behind."""
        return self._buffer[: self.length]

    def append(self, token: int) -> None:
        """One more sampled token."""
        if self.length == len(self._buffer):
            room = min(self.prompt_length + self.limit, 2 * self.length + 64) - self.length
            self._buffer = np.concatenate((self._buffer, np.zeros(max(room, 1), np.int32)))
        self._buffer[self.length] = token
        self.length += 1


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence to compute in a pass.

    Attributes:
        sequence: whose.
        start: position of the first.
        count: how many, >= 1; behind the last known token they are the sequence's drafts.
        samples: the chunk ends at the last known token or behind it, so the next one is to be
            sampled.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool


class Copy(NamedTuple):
    """The first `tokens` rows of block `source` go to block `target`, before the pass."""

    source: int
    target: int
    tokens: int


class Plan(NamedTuple):
    """One pass: `copies` first, in any order, then all chunks at once; decodes come first."""

    chunks: list[Chunk]
    copies: list[Copy]
