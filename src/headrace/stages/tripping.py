"""Tripwires of an RL stage between its ledger and its loop: what they saw, what they stopped.

A tripped wire is in the ledger before anything else happens, so that no crash forgets it. Going on
needs somebody who says that the alarm was looked at.
"""

from collections.abc import Callable, Collection

import msgspec

from headrace.errors import UserError
from headrace.recipe import AgenticRlStage, Recipe
from headrace.rollout.failures.remembering import finished_rollouts
from headrace.rollout.failures.trips import Trip, paused, state_name, tripped
from headrace.rollout.failures.tripwires import Tripwire, Tripwires
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.runner import FinishedRollout


class StageTripwires:
    """The wires of one stage.

    Args:
        ledger: what they remember is kept there; rollouts that finished before are read from it.
        stage: its thresholds.
        message: tells a person something.
    """

    def __init__(
        self, ledger: Ledger, stage: AgenticRlStage, message: Callable[[str], None]
    ) -> None:
        self._ledger = ledger
        self._stage = stage
        self._message = message
        limits = stage.tripwires.thresholds
        self._wires = Tripwires(
            limits,
            ledger.get_state(state_name(stage.name)),
            finished_rollouts(ledger, stage.name, limits.window),
        )
        self._warned: set[Tripwire] = set()

    def see(self, finished: FinishedRollout) -> None:
        """A rollout finished."""
        self._wires.see(finished.session, finished.detail)

    def measures(self) -> dict[str, float]:
        """The statistics as metrics."""
        return self._wires.measures()

    def check(self, step: int) -> None:
        """Look after an update.

        Raises:
            Tripped: a wire tripped, and the recipe says to pause.
        """
        evaluations = [e for e in self._ledger.evaluations() if e.stage == self._stage.name]
        alarm = self._wires.check(evaluations)
        pauses = alarm is not None and self._stage.tripwires.action == "pause"
        if alarm is not None and not pauses and alarm.wire not in self._warned:
            self._warned.add(alarm.wire)
            self._message(f"tripwire {alarm.wire}: {alarm.words}")
        trip = Trip(self._stage.name, step, alarm) if alarm is not None and pauses else None
        self._ledger.put_state(
            state_name(self._stage.name),
            {**self._wires.state, "tripped": None if trip is None else msgspec.to_builtins(trip)},
        )
        if trip is not None:
            raise Tripped(trip)


class Tripped(Exception):
    """A wire tripped: `trip` says which."""

    def __init__(self, trip: Trip) -> None:
        super().__init__(f"{trip.alarm.wire}: {trip.alarm.words}")
        self.trip = trip


def require_acknowledged(
    ledger: Ledger, recipe: Recipe, acknowledged: Collection[str], run_dir: object
) -> None:
    """Let a run go on that waits at a tripwire, if somebody acknowledged it or the recipe that is
    kept in the run directory does not watch it any more.

    Raises:
        UserError: nobody did, or something else was acknowledged.
    """
    trip = tripped(ledger)
    wire = None if trip is None else trip.alarm.wire
    for name in acknowledged:
        if name != wire:
            waits = "is not paused by a tripwire" if wire is None else f"is paused by {wire}"
            raise UserError(f"--acknowledge {name}: run {run_dir} {waits}; leave it out")
    if trip is None:
        return
    if trip.alarm.wire not in acknowledged and _watches(recipe, trip):
        raise UserError(f"run {run_dir} is {paused(trip, run_dir)}")
    kept = ledger.get_state(state_name(trip.stage))
    if trip.alarm.wire is Tripwire.HELD_OUT_FALL:
        # Still known, so that they are not marked anew, but without rewards nothing follows.
        kept["marks"] = [{**mark, "rewards": 0} for mark in kept["marks"]]
    elif trip.alarm.wire is Tripwire.LENGTH:
        kept["first_tokens"] = None
    if kept.get("newest") is not None:
        # What somebody has looked at trips this wire no more; the others go on seeing it.
        kept["acknowledged"] = {**kept.get("acknowledged", {}), trip.alarm.wire: kept["newest"]}
    ledger.put_state(state_name(trip.stage), {**kept, "tripped": None})


def _watches(recipe: Recipe, trip: Trip) -> bool:
    for stage in recipe.stages:
        if isinstance(stage, AgenticRlStage) and stage.name == trip.stage:
            table = stage.tripwires
            return table.action == "pause" and table.thresholds.watches(trip.alarm.wire)
    return False
