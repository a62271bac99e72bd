"""The constants of one RL stage's rollouts."""

from typing import Literal

import msgspec

from headrace.rollout.choosing.overgeneration import OvergenerationConfig
from headrace.rollout.failures.rules import FailureRules


class SourceConfig(msgspec.Struct, frozen=True):
    """Constants of one RL stage; see `headrace.recipe.AgenticRlStage`."""

    stage: str
    group_size: int
    groups_per_batch: int
    concurrency: int
    staleness: int
    temperature: float
    max_tokens: int
    leave_one_out: bool = False
    advantage_std: bool = False
    judged: bool = False
    """A teacher judges every token: rewards play no part, and every valid rollout trains."""
    failures: FailureRules = FailureRules()
    """What to do about failed rollouts."""
    mode: Literal["async", "one_step_off", "sync"] = "async"
    seed: int = 0
    """The recipe's; with a rollout's place it decides what the rollout samples."""
    ready_batches: int = 2
    """Where half as many batches of finished groups wait for the trainer, fewer rollouts are
    started; where this many do, none. More keep the trainer busy beside uneven rollouts, and make
    what it trains on older."""
    hold_back: bool = True
    """Groups that would be too old when their turn came do not begin; see `admission`."""
    whole_versions: bool = False
    """New weights wait for the rollouts in flight, so that each has one version."""
    dynamic: OvergenerationConfig = OvergenerationConfig()
