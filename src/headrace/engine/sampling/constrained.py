"""Outputs that spell what a grammar allows: which ids may come next, from token to token.

The grammars are those of llguidance (the extra "constrained"), which reads a dialect of Lark with
JSON schemas in it and says, for a state of its parser, which tokens go on from there. Here such a
state is kept beside a request's, and the request's stop ids are allowed where the grammar is
satisfied. It knows tokens only by what they spell, and no schema, API or chat format.
"""

import importlib
import importlib.util
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine.sampling.stops import Pieces
from headrace.engine.types import EngineError, SamplingParams
from headrace.errors import UserError

_UNFORCED = '%llguidance {"no_forcing": true}\n'
"""Of several ways to spell what has to come now, none is chosen for the model."""

Mask = npt.NDArray[np.bool_]
"""[V], True for ids that may come next."""


def installed() -> bool:
    """Whether grammars can be followed here at all."""
    return importlib.util.find_spec("llguidance") is not None


class GrammarState:
    """Where the output of one request stands in its grammar.

    Until the id `grammar_after` was sampled everything may come but the stop ids, which would end
    the output before the grammar's part of it.

    Args:
        matcher: llguidance's, at the beginning.
        sampling: names the id and the stop ids.
        vocab: ids of the model, V.
    """

    def __init__(self, matcher: Any, sampling: SamplingParams, vocab: int) -> None:
        self._matcher = matcher
        self._after = sampling.grammar_after
        self._vocab = vocab
        self._stop_ids = [i for i in set(sampling.stop_ids) if i < vocab]
        self._begun = self._after is None
        self._ended = False
        self.stuck: int | None = None
        """The first of the last masks that allowed nothing, which no grammar does that the model's
        tokens can spell."""

    def restart(self) -> None:
        """The output begins again."""
        self._matcher.reset()
        self._begun, self._ended = self._after is None, False

    def feed(self, token: int) -> None:
        """The next id of the output."""
        if not self._begun:
            self._begun = token == self._after
        elif token in self._stop_ids:
            self._ended = True
        else:
            self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether nothing may follow but a stop id."""
        if not self._begun or self._ended:
            return self._ended
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def masks(self, drafts: Sequence[int]) -> list[Mask]:
        """What may come after the output, and after each of the drafts behind it.

        Behind a draft that may not come itself everything is allowed: what is drawn there is
        thrown away, since the draft does not stand.
        """
        # A copy, because nothing brings a matcher back from where no token goes on.
        matcher = self._matcher.deep_copy() if drafts else self._matcher
        begun = self._begun
        found = [self._mask(matcher, begun)]
        for number, draft in enumerate(drafts):
            if not found[-1][draft] or draft in self._stop_ids:
                rest = len(drafts) - number
                found += [np.ones(self._vocab, dtype=np.bool_) for _ in range(rest)]
                break
            if begun:
                matcher.consume_token(draft)
            else:
                begun = draft == self._after
            found.append(self._mask(matcher, begun))
        empty = [number for number, mask in enumerate(found) if not mask.any()]
        self.stuck = empty[0] if empty else None
        for number in empty:
            found[number][:] = True  # something has to be drawn
        return found

    def _mask(self, matcher: Any, begun: bool) -> Mask:
        if not begun:
            mask = np.ones(self._vocab, dtype=np.bool_)
            mask[[i for i in self._stop_ids if i != self._after]] = False
            return mask
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        # Its own id for the end, behind the model's, is allowed where no token goes on, too.
        mask = np.unpackbits(bits, count=self._vocab, bitorder="little").astype(np.bool_)
        mask[self._stop_ids] = matcher.is_accepting()
        return mask


class Grammars:
    """Makes the states of requests with grammars, as far as it is known what tokens spell.

    Args:
        pieces: see `StopTexts`; None refuses all grammars.
        tags: ids that are no text, or what gives them, called when they are first needed: a
            grammar reaches them by number alone, `<[7]>`, never by what they spell.
        vocab: ids of the model.
    """

    def __init__(
        self,
        pieces: Pieces | None,
        tags: Collection[int] | Callable[[], Collection[int]],
        vocab: int,
    ) -> None:
        self._pieces = pieces
        self._tags = tags
        self._vocab = vocab
        self._tokenizer: Any = None

    def state(self, sampling: SamplingParams) -> GrammarState | None:
        """For one request; None if it has no grammar.

        Raises:
            EngineError: INVALID: the grammar cannot be read, or none can be followed here.
        """
        if not sampling.grammar:
            return None
        if not installed():
            raise EngineError(
                EngineError.INVALID,
                "grammar cannot be used here: pip install 'headrace[constrained]'",
            )
        llguidance = importlib.import_module("llguidance")  # an optional dependency
        tokenizer = self._vocabulary(llguidance)
        grammar = _UNFORCED + sampling.grammar
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            problem = " ".join(str(matcher.get_error()).split())
            raise EngineError(EngineError.INVALID, f"grammar cannot be read: {problem[:400]}")
        return GrammarState(matcher, sampling, self._vocab)

    def _vocabulary(self, llguidance: Any) -> Any:
        """The model's tokens as llguidance knows them; made once, since that takes a while."""
        if self._tokenizer is None:
            try:
                pieces = self._pieces() if callable(self._pieces) else self._pieces
                tags = self._tags() if callable(self._tags) else self._tags
            except UserError as error:
                raise EngineError(
                    EngineError.INVALID, f"grammar cannot be used here: {error}"
                ) from error
            if pieces is None:
                raise EngineError(
                    EngineError.INVALID,
                    "grammar cannot be used here: this engine does not know what its tokens spell; "
                    "give it a tokenizer",
                )
            self._tokenizer = llguidance.LLTokenizer(_Vocabulary(pieces, tags, self._vocab))
        return self._tokenizer


class _Vocabulary:
    """Tokens in the form that llguidance asks a Python tokenizer for."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = None
    """It adds one behind the last token itself, for the end."""

    def __init__(self, pieces: Sequence[bytes], tags: Collection[int], vocab: int) -> None:
        known = list(pieces[:vocab])
        self.tokens = known + [b""] * (vocab - len(known))
        self.special_token_ids = sorted(i for i in tags if 0 <= i < vocab)
        self._bytes = {piece: i for i, piece in enumerate(self.tokens) if len(piece) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        """Some ids that spell the text; only forced tokens, unused here, would ask for more."""
        data = text.encode() if isinstance(text, str) else text
        return [self._bytes[bytes([b])] for b in data if bytes([b]) in self._bytes]
