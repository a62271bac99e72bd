"""How hard problems are for the model that learns, and how sure that is.

A problem is usually attempted by one group only, so estimates pool: each kind of problem (task,
family, level) has a Beta posterior of its pass rate, and a problem met again has one of its own
that begins at its kind's. Old evidence fades, because the model changes. Pure bookkeeping: it
knows rewards and names, nothing of rollouts, and what it says decides nothing here.
"""

import math
from collections.abc import Sequence

import msgspec

MOST_INSTANCES = 256
"""Problems with an estimate of their own; the one longest not met is forgotten first."""
FIRST_CORRELATION = 0.2
"""Assumed likeness of rollouts of one group until groups tell; see `Difficulty.correlation`."""
_FIRST_GROUPS = 8.0
"""So many groups that assumption weighs."""
_STRENGTH = (1.0, 20.0)
"""Least and most rollouts that a kind's pass rate weighs in the estimate of one of its problems."""
_BISECTIONS = 48
_TINY = 1e-300


class Beta(msgspec.Struct, frozen=True):
    """A Beta distribution of a pass rate.

    Attributes:
        a: successes plus prior, > 0.
        b: failures plus prior, > 0.
    """

    a: float
    b: float

    @property
    def mean(self) -> float:
        """Expected pass rate."""
        return self.a / (self.a + self.b)

    @property
    def variance(self) -> float:
        """Variance of the pass rate."""
        total = self.a + self.b
        return self.a * self.b / (total * total * (total + 1.0))

    def below(self, x: float) -> float:
        """Probability that the pass rate is below `x`: the regularised incomplete beta function."""
        if x <= 0.0:
            return 0.0
        if x >= 1.0:
            return 1.0
        # The continued fraction converges fast on this side of the mean; the other is its mirror.
        if x > (self.a + 1.0) / (self.a + self.b + 2.0):
            return 1.0 - _lower(self.b, self.a, 1.0 - x)
        return _lower(self.a, self.b, x)

    def quantile(self, q: float) -> float:
        """The pass rate that the true one is below with probability `q`, 0 <= q <= 1."""
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            if self.below(middle) < q:
                low = middle
            else:
                high = middle
        return (low + high) / 2.0

    def interval(self, mass: float = 0.9) -> tuple[float, float]:
        """The central credible interval that holds this probability."""
        return self.quantile((1.0 - mass) / 2.0), self.quantile((1.0 + mass) / 2.0)


def _lower(a: float, b: float, x: float) -> float:
    """I_x(a, b) by its continued fraction, evaluated forwards with Lentz's method.

    Source: DLMF 8.17.22 and 3.10(iii).
    """
    front = math.exp(
        a * math.log(x)
        + b * math.log1p(-x)
        + math.lgamma(a + b)
        - math.lgamma(a)
        - math.lgamma(b)
        - math.log(a)
    )
    value, c, d = 1.0, 1.0, 0.0
    for step in range(1, 500):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / _away_from_zero(1.0 + term * d)
        c = _away_from_zero(1.0 + term / c)
        value *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return min(1.0, max(0.0, front / value))


def _away_from_zero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY


class Evidence(msgspec.Struct):
    """What is known of one kind of problem, or of one problem; fades with time.

    Attributes:
        successes: sum of rewards, faded.
        failures: what was missing from 1 in them, faded.
        recent: groups, faded.
        at: groups of the task decided when this was faded last.
        groups: groups seen in all, not faded.
    """

    successes: float = 0.0
    failures: float = 0.0
    recent: float = 0.0
    at: int = 0
    groups: int = 0

    def fade(self, now: int, half_life: float) -> None:
        """Let evidence grow old up to `now`, in groups of the task."""
        kept = 0.5 ** ((now - self.at) / half_life)
        self.successes *= kept
        self.failures *= kept
        self.recent *= kept
        self.at = now

    def add(self, rewards: Sequence[float]) -> None:
        """Add a group."""
        total = sum(rewards)
        self.successes += total
        self.failures += len(rewards) - total
        self.recent += 1.0
        self.groups += 1


class _Spread(msgspec.Struct):
    """How much more the means of groups vary than those of independent rollouts would."""

    excess: float = 0.0
    scale: float = 0.0
    at: int = 0


class DifficultyState(msgspec.Struct):
    """All that `Difficulty` knows, JSON-compatible through msgspec.

    Attributes:
        decided: groups by task: the clock by which its evidence fades.
        kinds: evidence by task, family and level, under `kind_key`.
        instances: evidence by content id, the one met last at the end.
        spread: by task.
    """

    decided: dict[str, int] = {}
    kinds: dict[str, Evidence] = {}
    instances: dict[str, Evidence] = {}
    spread: dict[str, _Spread] = {}


def kind_key(task: str, family: str, level: int) -> str:
    """Under which name the evidence of a kind of problem is kept."""
    return f"{task}\t{level}\t{family}"


def split_key(key: str) -> tuple[str, int, str]:
    """Task, level and family of a `kind_key`."""
    task, level, family = key.split("\t", 2)
    return task, int(level), family


class Difficulty:
    """Pass rates with their uncertainty.

    Args:
        half_life: groups of a task after which its evidence counts half.
        state: of an earlier process; None begins with a flat prior.

    Raises:
        ValueError: half_life is not above 0.
    """

    def __init__(self, half_life: float, state: DifficultyState | None = None) -> None:
        if half_life <= 0:
            raise ValueError(f"half_life {half_life} is not above 0")
        self._half_life = half_life
        self.state = state or DifficultyState()

    def observe(
        self, task: str, family: str, level: int, rewards: Sequence[float], content: str = ""
    ) -> None:
        """A group was decided.

        Args:
            task: its task.
            family: kind of problem.
            level: its difficulty as the task has it.
            rewards: of its valid rollouts; what lies outside [0, 1] counts as its edge.
            content: names the problem; "" keeps no estimate of its own.
        """
        state = self.state
        now = state.decided[task] = state.decided.get(task, 0) + 1
        if not rewards:
            return
        rewards = [min(1.0, max(0.0, reward)) for reward in rewards]
        kind = state.kinds.setdefault(kind_key(task, family, level), Evidence(at=now))
        if kind.groups:
            self._compare(task, now, self._pass_rate(task, kind).mean, rewards)
        kind.fade(now, self._half_life)
        kind.add(rewards)
        if content:
            own = state.instances.pop(content, None) or Evidence(at=now)
            own.fade(now, self._half_life)
            own.add(rewards)
            state.instances[content] = own
            while len(state.instances) > MOST_INSTANCES:
                state.instances.pop(next(iter(state.instances)))

    def _compare(self, task: str, now: int, mean: float, rewards: Sequence[float]) -> None:
        """Learn from a group how alike its rollouts are, given its kind's pass rate before it."""
        n = len(rewards)
        spread = self.state.spread.setdefault(task, _Spread(at=now))
        kept = 0.5 ** ((now - spread.at) / self._half_life)
        noise = mean * (1.0 - mean)
        away = sum(rewards) / n - mean
        spread.excess = spread.excess * kept + n * away * away - noise
        spread.scale = spread.scale * kept + (n - 1) * noise
        spread.at = now

    def correlation(self, task: str) -> float:
        """Likeness of rollouts of one group beyond that of their kind, in [0, 1].

        Problems of one kind differ, so n rollouts of one of them say less of the kind than n of
        different ones: as much as n / (1 + (n - 1) r) do. This r, the intraclass correlation, is
        estimated by moments over all kinds of the task.

        Source: Kish, Survey Sampling (1965), section 5.4 (design effect).
        """
        spread = self.state.spread.get(task) or _Spread()
        prior = _FIRST_GROUPS * 0.25
        found = (spread.excess + prior * FIRST_CORRELATION) / (spread.scale + prior)
        return min(1.0, max(0.0, found))

    def of_kind(self, task: str, family: str, level: int) -> Beta:
        """The pass rate of a kind of problem; flat when it was never met."""
        return self._pass_rate(task, self.state.kinds.get(kind_key(task, family, level)))

    def of_instance(self, task: str, family: str, level: int, content: str) -> Beta | None:
        """The pass rate of one problem; None when it was not met, or is forgotten."""
        own = self.state.instances.get(content)
        if own is None:
            return None
        kind = self.of_kind(task, family, level)
        r = self.correlation(task)
        least, most = _STRENGTH
        # A Beta population of problems whose rollouts correlate by r has a + b = (1 - r) / r.
        strength = min(most, max(least, (1.0 - r) / r)) if r > 0 else most
        # Rollouts of one problem are independent once its own pass rate is what is asked for.
        kept = self._kept(task, own)
        return Beta(
            kept * own.successes + strength * kind.mean,
            kept * own.failures + strength * (1.0 - kind.mean),
        )

    def of_level(self, task: str, level: int) -> Beta | None:
        """The pass rate of a level: the mean over its families met so far; None without any.

        Families count the same however often each was attempted, as what is attempted is chosen.
        """
        found = [
            self._pass_rate(task, evidence)
            for key, evidence in self.state.kinds.items()
            if split_key(key)[:2] == (task, level)
        ]
        if not found:
            return None
        mean = sum(p.mean for p in found) / len(found)
        variance = sum(p.variance for p in found) / len(found) ** 2
        total = mean * (1.0 - mean) / variance - 1.0  # the Beta with this mean and variance
        return Beta(mean * total, (1.0 - mean) * total)

    def levels(self, task: str) -> list[int]:
        """Levels of a task met so far, easiest first."""
        return sorted({n for t, n, _ in map(split_key, self.state.kinds) if t == task})

    def _pass_rate(self, task: str, evidence: Evidence | None) -> Beta:
        """The posterior that evidence of a kind gives now."""
        if evidence is None or evidence.recent == 0.0:
            return Beta(1.0, 1.0)
        n = max(1.0, (evidence.successes + evidence.failures) / evidence.recent)
        kept = self._kept(task, evidence) / (1.0 + (n - 1.0) * self.correlation(task))
        return Beta(1.0 + kept * evidence.successes, 1.0 + kept * evidence.failures)

    def _kept(self, task: str, evidence: Evidence) -> float:
        """What share of evidence is left now."""
        return 0.5 ** ((self.state.decided.get(task, 0) - evidence.at) / self._half_life)
