"""What becomes of a complete group: advantages or a reason, and what a stage learns from it.

The decision itself is pure (`groups`). Here it goes to the ledger, in one transaction with what the
choice of further tasks and problems remembers of it, so that a resume knows as much.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.rollout.choosing.curriculum import choices_key
from headrace.rollout.choosing.overgeneration import Overgeneration
from headrace.rollout.choosing.sharing import TaskSharing
from headrace.rollout.groups import (
    GroupDecision,
    ScoredRollout,
    WeightedRollout,
    advantages,
    judged,
)
from headrace.rollout.naming import place
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.rows import WaitingGroup
from headrace.rollout.source_config import SourceConfig
from headrace.rollout.types import DropReason, Outcome, Session
from headrace.tasks.types import TaskInstance


class GroupDecisions:
    """Decides the groups of one stage.

    Args:
        config: of the stage.
        ledger: where decisions go.
        sharing: which task is next; told of every decision.
        generated: how many groups a batch costs; told likewise.
    """

    def __init__(
        self,
        config: SourceConfig,
        ledger: Ledger,
        sharing: TaskSharing,
        generated: Overgeneration,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._sharing = sharing
        self._generated = generated

    def decide(self, group_id: str, sessions: Mapping[str, Session]) -> GroupDecision:
        """Decide a group whose sessions have all ended, and keep the decision."""
        scored = [
            ScoredRollout(s.id, s.outcome or Outcome.CANCELLED, s.rewards.get("reward"), s.failure)
            # As dispatched, not as finished; see `BatchQueue.cut`.
            for s in sorted(sessions.values(), key=lambda session: place(session.id))
        ]
        decision = self._weighted(scored, max(self._config.group_size, len(scored)))
        first = next(iter(sessions.values()))
        with self._ledger.transaction():
            self._ledger.decide_group(group_id, decision)
            self._sharing.decided(first.task, decision)
            self._learn(msgspec.convert(first.instance, TaskInstance), sessions, decision)
            self.save()
        return decision

    def pending_members(self, waiting: WaitingGroup) -> list[WeightedRollout]:
        """A decided group from before a crash: decide again (it is pure), keep what is pending."""
        ordered = sorted(waiting.rollouts, key=lambda rollout: place(rollout.session_id))
        decision = self._weighted(ordered, waiting.size)
        return [m for m in decision.members if m.session_id in waiting.pending]

    @property
    def chosen(self) -> dict[str, Any]:
        """What has to be kept of the choice of tasks and problems with each dispatch."""
        found = self._sharing.state
        curriculum = self._sharing.mix.curriculum
        if curriculum is not None:
            found[choices_key(self._config.stage)] = curriculum.choices
        return found

    def save(self) -> None:
        """Keep how tasks share the stage where a resume looks."""
        for name, value in self._sharing.state.items():
            self._ledger.put_state(name, value)

    def _weighted(self, scored: Sequence[ScoredRollout], size: int) -> GroupDecision:
        config = self._config
        if config.judged:
            return judged(scored, rules=config.failures)
        return advantages(
            scored,
            group_size=size,
            leave_one_out=config.leave_one_out,
            normalise_std=config.advantage_std,
            rules=config.failures,
        )

    def _learn(
        self, instance: TaskInstance, sessions: Mapping[str, Session], decision: GroupDecision
    ) -> None:
        """Remember how a group went, for the choice of others."""
        valid = [s for s in sessions.values() if s.outcome is not None and s.outcome.scored]
        rewards = [s.rewards["reward"] for s in valid]
        if rewards and decision.drop_reason is not DropReason.GROUP_INVALID:
            mean = sum(rewards) / len(rewards)
            self._generated.decided(instance.task, bool(decision.members), mean)
        curriculum = self._sharing.mix.curriculum
        if curriculum is not None:
            curriculum.observe(instance, rewards)
            curriculum.save(self._config.stage, self._ledger.put_state)
