"""The recipe tables for what goes wrong in an RL stage: rules for failures, and tripwires."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headrace.recipe.tables import Fraction, Positive, Table
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.rules import FailureRules, Rule, check_rule
from headrace.rollout.failures.tripwires import Thresholds

_Rule = Literal["retry", "exclude", "pad", "penalise"]


class FailuresTable(Table):
    """What to do about rollouts that failed, by reason. "retry" attempts a rollout's place in its
    group again, in a new session; "pad" repeats valid siblings in its place and drops a group of
    which at most half is valid; "exclude" makes the group smaller; "penalise" lets it count with
    the reward it got. What environment or engine did may not be penalised."""

    retries: Annotated[int, Field(ge=0, le=10)] = 1
    """How often one place is attempted again; then the reason's default applies."""
    penalty: Annotated[float, Field(ge=-1.0, le=1.0)] | None = None
    """Reward of penalised rollouts; by default what their task service gave, usually 0."""
    task_hung: _Rule = "pad"
    """The task service gave no result long after its own timeout."""
    task_raised: _Rule = "pad"
    """The task service raised an exception without a name of its own here."""
    task_lied: _Rule = "pad"
    """The task service gave no finite reward, or a result of another form."""
    task_unavailable: _Rule = "pad"
    """The task service cannot be reached."""
    protocol_misuse: _Rule = "pad"
    """The agent's program sent a request that the gateway refuses."""
    sandbox_start: _Rule = "pad"
    """No sandbox could be made."""
    sandbox_died: _Rule = "pad"
    """The sandbox broke while the rollout ran."""
    worker_died: _Rule = "pad"
    """A helper process of the task service died or hung."""
    env_failed: _Rule = "pad"
    """The task service reports an environment failure of another kind."""
    engine_died: _Rule = "pad"
    """The engine failed during a request."""
    engine_overloaded: _Rule = "pad"
    """The engine's queue stayed full through all retries."""
    engine_deadline: _Rule = "pad"
    """A request was not answered in time."""
    session_calls: _Rule = "penalise"
    """It made all the calls it may."""
    session_tokens: _Rule = "penalise"
    """It sampled all the tokens it may."""
    session_context: _Rule = "penalise"
    """The conversation no longer fits the context."""
    session_time: _Rule = "penalise"
    """It used up its wall clock."""
    turn_limit: _Rule = "penalise"
    """It did not answer within its turns."""
    no_answer: _Rule = "penalise"
    """Its last message holds no answer in the form asked for."""
    truncated: _Rule = "penalise"
    """Its last message was cut by max_tokens and earned nothing."""
    malformed_call: _Rule = "penalise"
    """It ended with a tool call that cannot be read and earned nothing."""
    tampering: _Rule = "penalise"
    """It reached for the sandbox or the verifier; never a "retry"."""
    agent_failed: _Rule = "penalise"
    """The task service reports a failure of the agent of another kind."""

    @model_validator(mode="before")
    @classmethod
    def _reasons_without_rule(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data.keys() & {r.value for r in FailureReason if not r.has_rule}:
                check_rule(FailureReason(name), Rule.EXCLUDE)
        return data

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        for reason, rule in self.rules.rules.items():
            check_rule(reason, rule)
        if self.retries == 0 and Rule.RETRY in self.rules.rules.values():
            raise ValueError('retries is 0 and a rule says "retry"; make it 1 or more')
        return self

    @property
    def rules(self) -> FailureRules:
        """The table as the rollout side knows it."""
        rules = {r: Rule(getattr(self, r)) for r in FailureReason if r.has_rule}
        return FailureRules(rules, self.retries, self.penalty)


class TripwiresTable(Table):
    """Signs of reward hacking that pause the run; see docs/failures.md. `headrace run --resume RUN
    --acknowledge NAME` goes on after one."""

    action: Literal["pause", "warn"] = "pause"
    """What a tripwire does: the run pauses with exit code 3, or goes on with a message."""
    window: Annotated[int, Field(ge=32, le=65536)] = 512
    """Newest finished rollouts that are looked at."""
    tampering: Annotated[int, Field(ge=0)] = 1
    """So many rollouts in the window that reached for the verifier or the sandbox; 0 is off."""
    identical_output: Fraction = 0.6
    """Share of the window's problems that got a reward for one and the same output, beyond what
    their having one answer explains; 0 is off."""
    identical_in_group: Fraction = 0.0
    """Share of the window's groups in which every rollout gave the same output; 0 is off."""
    held_out_fall: Fraction = 0.1
    """Held-out success has fallen this much below its best in the stage, beyond chance, while the
    training reward has risen by reward_rise; 0 is off. Needs evaluations beside training."""
    reward_rise: Fraction = 0.1
    """See held_out_fall."""
    length_factor: Annotated[float, Field(ge=0.0)] = 0.0
    """Tokens per rollout have grown to this multiple of what they were in the stage's first
    window; 0 is off."""
    least_problems: Positive = 32
    """Different problems that must be in the window before outputs are compared."""

    @model_validator(mode="after")
    def _factor(self) -> Self:
        if 0.0 < self.length_factor <= 1.0:
            raise ValueError(
                f"length_factor {self.length_factor:g} is reached at once; use more than 1, or 0 "
                "for off"
            )
        return self

    @property
    def thresholds(self) -> Thresholds:
        """The table as the rollout side knows it."""
        return Thresholds(**self.model_dump(exclude={"action"}))
