"""How many prompt tokens a pass may compute beside running requests, so that these are slowed down
by no more than a factor.

What a prompt token costs depends on the model, the machine and the length of its context, so it is
measured: the time of passes without prompts, and what passes with some take beyond that. Knows
nothing of requests.
"""

_WEIGHT = 0.3
"""Of the newest measurement in the running averages."""


class Pacer:
    """Follows the clock of an engine's passes.

    Args:
        factor: how many times longer than without prompts a pass may take, above 1.
        least: prompt tokens that a pass may compute in any case: prompts must get on.
        most: and in no case more.

    Raises:
        ValueError: a factor or bounds that leave nothing to choose.
    """

    def __init__(self, factor: float, *, least: int, most: int) -> None:
        if not factor > 1 or not 1 <= least <= most:
            raise ValueError(
                f"factor {factor} must exceed 1, and 1 <= least {least} <= most {most}"
            )
        self._factor = factor
        self._least = least
        self._most = most
        self._alone = 0.0
        self._each = 0.0

    @property
    def tokens(self) -> int:
        """Prompt tokens that the next pass may compute."""
        if not self._alone or not self._each:
            return self._least
        allowed = (self._factor - 1) * self._alone / self._each
        return max(self._least, min(self._most, int(allowed)))

    def passed(self, seconds: float, *, decoding: int, prompt_tokens: int) -> None:
        """A pass took so long.

        Args:
            decoding: requests that decoded in it; passes without any say nothing.
            prompt_tokens: computed beside them.
        """
        if not decoding:
            return
        if not prompt_tokens:
            self._alone = _mixed(self._alone, seconds)
        elif self._alone:
            # At least something: a pass may seem faster than one without prompts.
            beyond = max(seconds - self._alone, 0.01 * self._alone)
            self._each = _mixed(self._each, beyond / prompt_tokens)


def _mixed(average: float, newest: float) -> float:
    return newest if not average else (1 - _WEIGHT) * average + _WEIGHT * newest
