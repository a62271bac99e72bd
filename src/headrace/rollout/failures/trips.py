"""A run that waits at a tripwire: how the ledger says so, and what to tell a person."""

import msgspec

from headrace.errors import RunPaused
from headrace.rollout.failures.tripwires import Alarm
from headrace.rollout.record.reading import LedgerReader


class Trip(msgspec.Struct, frozen=True):
    """A tripped wire that nobody has acknowledged: stage, update, alarm."""

    stage: str
    step: int
    alarm: Alarm


def tripped(ledger: LedgerReader) -> Trip | None:
    """The wire that a run waits at; None when it waits at none."""
    for record in ledger.stages():
        kept = ledger.get_state(state_name(record.name)) or {}
        if record.finished_at is None and kept.get("tripped"):
            return msgspec.convert(kept["tripped"], Trip)
    return None


def paused(trip: Trip, run_dir: object) -> RunPaused:
    """What to tell a person about a tripped wire: what was seen, where to look, how to go on."""
    alarm = trip.alarm
    look = ""
    if alarm.sessions:
        first, *others = alarm.sessions
        also = f" (also {', '.join(others)})" if others else ""
        look = f"Look at: headrace show {run_dir} trajectory {first}{also}. "
    return RunPaused(
        f"paused by tripwire {alarm.wire} in stage {trip.stage} after update {trip.step}: "
        f"{alarm.words}. {look}The weights up to here are saved. If this is no reward hacking, go "
        f"on with: headrace run --resume {run_dir} --acknowledge {alarm.wire}"
    )


def state_name(stage: str) -> str:
    """Name under which the ledger keeps what a stage's tripwires remember; the trip is in it."""
    return f"tripwires:{stage}"
