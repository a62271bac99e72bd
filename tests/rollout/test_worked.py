"""Seconds of work of a run over processes that ended in any way."""

import pytest
from ledger_writer import play

from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.worked import WorkedSeconds, newest_record


class Clocks:
    """Both clocks of one machine; a process that waits lets both go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def unix(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now - 900.0

    def begin(self, ledger: Ledger, logged_at: float | None = None) -> WorkedSeconds:
        """A process begins."""
        return WorkedSeconds(
            ledger,
            logged_at=logged_at,
            started=self.monotonic(),
            clock=self.monotonic,
            unix_clock=self.unix,
        )


def test_what_a_killed_process_did_after_its_last_summary_counts(tmp_path) -> None:
    clocks = Clocks()
    with Ledger.create(tmp_path, clock=clocks.unix) as ledger:
        first = clocks.begin(ledger)
        clocks.now += 10.0
        ledger.stage_started("rl")
        assert first.keep() == pytest.approx(10.0)
        clocks.now += 30.0
        play(ledger, "g", [0.0, 1.0])  # a rollout ends, then the process is killed
    clocks.now += 5000.0  # nobody works
    with Ledger.resume(tmp_path, clock=clocks.unix) as ledger:
        assert newest_record(ledger) == 1040.0
        second = clocks.begin(ledger)
        ledger.recover("rl")
        clocks.now += 2.0
        assert second.keep() == pytest.approx(10.0 + 30.0 + 2.0)
        logged_at = clocks.now + 4.0
    clocks.now += 700.0
    with Ledger.resume(tmp_path, clock=clocks.unix) as ledger:
        third = clocks.begin(ledger, logged_at)
        assert third.keep() == pytest.approx(42.0 + 4.0), "metrics have times, too"
        clocks.now += 1.0
        assert third.keep() == pytest.approx(47.0), "counted once"
    clocks.now += 60.0
    with Ledger.resume(tmp_path, clock=clocks.unix) as ledger:
        assert clocks.begin(ledger, logged_at).keep() == pytest.approx(47.0), "nothing was lost"


def test_a_ledger_without_the_time_of_the_sum_keeps_the_sum(tmp_path) -> None:
    clocks = Clocks()
    with Ledger.create(tmp_path, clock=clocks.unix) as ledger:
        assert newest_record(ledger) is None
        ledger.put_state("seconds:run", 12.5)
        ledger.stage_started("rl")
        assert clocks.begin(ledger, 2000.0).keep() == pytest.approx(12.5)
