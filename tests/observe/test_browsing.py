"""Pages, search and counts over a ledger: bounded, in order, and the same as a plain scan."""

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hostile_run import FORKED

from headrace.errors import UserError
from headrace.observe.statistics import mean_interval, wilson
from headrace.rollout.failures.reasons import FailureReason
from headrace.rollout.failures.rules import reasons_of
from headrace.rollout.record.browsing import BrowsingReader, SessionFilter
from headrace.rollout.types import DropReason


def ids(reader: BrowsingReader, limit: int = 200, **conditions: Any) -> list[str]:
    wanted = SessionFilter(**conditions)
    found: list[str] = []
    before: int | None = None
    while True:
        page = reader.page(wanted, before=before, limit=limit, budget_s=60)
        assert len(page.sessions) <= limit
        found += [session.id for session in page.sessions]
        before = page.next
        if before is None:
            return found


def test_pages_of_any_size_give_every_session_once(hostile_run: Path) -> None:
    with BrowsingReader.open(hostile_run) as reader:
        everything = [session.id for session in reader.sessions(newest_first=True)]
        searched = ids(reader, text="sort")
        assert 0 < len(searched) < len(everything)
        for limit in (1, 7, 50):
            assert ids(reader, limit) == everything
            assert ids(reader, limit, text="sort") == searched


@pytest.mark.parametrize(
    "conditions",
    [
        {"stage": "rl"},
        {"purpose": "eval:sft"},
        {"task": "maze"},
        {"outcome": "env_failed"},
        {"outcome": "open"},
        {"fate": "trained"},
        {"fate": "pending"},
        {"fate": "no_signal"},
        {"failure": "no_signal"},
        {"failure": "env_failed"},
        {"failure": "session_time", "task": "maze"},
        {"min_reward": 0.4, "max_reward": 0.9},
        {"group": "maze-group"},
        {"stage": "rl", "outcome": "ok", "max_reward": 0.0},
    ],
)
def test_conditions_are_those_of_a_plain_scan(
    hostile_run: Path, conditions: dict[str, Any]
) -> None:
    with BrowsingReader.open(hostile_run) as reader:
        expected: list[str] = []
        for s in reader.sessions(newest_first=True):
            fate = s.drop_reason.value if s.drop_reason else "trained" if s.step else "pending"
            facts = {
                "stage": s.stage,
                "purpose": s.purpose,
                "task": s.task,
                "group": s.group_id,
                "outcome": s.outcome.value if s.outcome else "open",
                "fate": fate,
            }
            reasons = reasons_of(s.outcome, s.failure, s.drop_reason)
            low, high = conditions.get("min_reward"), conditions.get("max_reward")
            scored = s.reward is not None
            if (
                all(facts[k] == v for k, v in conditions.items() if k in facts)
                and conditions.get("failure") in (None, *reasons)
                and (low is None or (scored and s.reward >= low))
                and (high is None or (scored and s.reward <= high))
            ):
                expected.append(s.id)
        reason = conditions.get("failure")
        wanted = {**conditions, **({"failure": FailureReason(reason)} if reason else {})}
        assert ids(reader, **wanted) == expected
        assert expected, "the run holds such a session"


def test_search_finds_what_was_said_in_any_case(hostile_run: Path) -> None:
    with BrowsingReader.open(hostile_run) as reader:
        assert ids(reader, text=" STEP 4 ") == [FORKED], "also on branches that were left"
        assert set(ids(reader, text="NÄIVE ☃")) == {FORKED, *(f"maze-{i}" for i in range(5))}
        assert ids(reader, text='onerror="window') == ids(reader, task="maze")
        assert ids(reader, text="60 s were") == ["maze-3"], "in reasons, too"
        assert ids(reader, text="session_t", task="maze") == ["maze-3"], "and names of failures"
        assert ids(reader, text="ls -1 dat | sort"), "in the arguments of tools"
        assert len(ids(reader, text="distinct files", limit=3)) > 100
        # Names of fields and roles are no text.
        for name in ("tool_calls", "assistant", "arguments"):
            assert ids(reader, text=name) == []


def test_a_search_that_takes_long_says_where_to_go_on(hostile_run: Path) -> None:
    with BrowsingReader.open(hostile_run) as reader:
        wanted = SessionFilter(text="nowhere to be found")
        page = reader.page(wanted, budget_s=0.0)
        assert page.sessions == []
        total = sum(reader.outcome_counts().values())
        if total > 256:
            assert page.next is not None
            assert not page.complete
        assert ids(reader, text="nowhere to be found") == []


def test_only_sessions_with_forks(hostile_run: Path) -> None:
    with BrowsingReader.open(hostile_run) as reader:
        assert ids(reader, forked=True) == [FORKED]


def test_choices_count_every_session(hostile_run: Path) -> None:
    with BrowsingReader.open(hostile_run) as reader:
        choices = reader.choices()
        total = sum(reader.outcome_counts().values())
        failures = choices.pop("failure")
        assert {sum(values.values()) for values in choices.values()} == {total}
        assert choices["task"]["maze"] == 6
        assert choices["outcome"]["open"] == 1
        for name in ("stage", "purpose", "outcome", "task", "fate"):
            for value, number in choices[name].items():
                conditions: dict[str, Any] = {name: value}
                assert len(ids(reader, **conditions)) == number
        assert set(failures) >= {"no_signal", "session_time", "env_failed"}
        assert "evaluation" not in failures
        for value, number in failures.items():
            assert len(ids(reader, failure=FailureReason(value))) == number


def test_a_session_that_lacks_some_calls_is_found_by_their_reason(hostile_run: Path) -> None:
    with contextlib.closing(sqlite3.connect(hostile_run / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE calls SET drop_reason = 'too_long' WHERE id = ?", (f"{FORKED}/4",))
    with BrowsingReader.open(hostile_run) as reader:
        assert reader.choices()["failure"]["too_long"] == 1
        assert ids(reader, failure=FailureReason.TOO_LONG) == [FORKED]


def test_reward_buckets_hold_every_scored_training_rollout(hostile_run: Path) -> None:
    with BrowsingReader.open(hostile_run) as reader:
        expected = Counter[tuple[str, str]]()
        total = 0.0
        for s in reader.sessions(purpose="train"):
            if s.reward is not None:
                expected[s.stage, s.task] += 1
                total += s.reward
        for buckets in (1, 7, 60):
            found = reader.reward_buckets(buckets)
            counted = Counter[tuple[str, str]]()
            for b in found:
                counted[b.stage, b.task] += b.n
            assert counted == expected
            assert sum(b.total for b in found) == pytest.approx(total)
            assert max(Counter((b.stage, b.task) for b in found).values()) <= buckets


def test_failures_are_counted_by_reason(hostile_run: Path) -> None:
    with BrowsingReader.open(hostile_run) as reader:
        failures = {(f.task, f.outcome, f.reason[:12]): f for f in reader.failures()}
        assert failures["maze", "env_failed", "sandbox died"].count == 3
        assert failures["maze", "env_failed", "sandbox died"].newest_id == "maze-2"
        assert all(f.outcome != "ok" for f in reader.failures())
        assert [f.newest_id for f in reader.verdicts()] == [FORKED]


def test_fates_of_calls(hostile_run: Path) -> None:
    with BrowsingReader.open(hostile_run) as reader:
        (session,) = ids(reader, purpose="eval:sft", limit=1)[:1]
        assert all(
            f.drop_reason is None and not f.late for f in reader.call_fates(session).values()
        )
        assert reader.find(session) is not None
        assert reader.find("nobody") is None
        dropped = reader.find(session)
        assert dropped is not None
        assert dropped.drop_reason is DropReason.EVALUATION


def test_damaged_evidence_is_named(hostile_run: Path) -> None:
    import sqlite3

    with sqlite3.connect(hostile_run / "ledger.sqlite") as connection:
        connection.execute("UPDATE calls SET body = x'00ff' WHERE id = 'maze-1/0'")
    connection.close()
    with (
        BrowsingReader.open(hostile_run) as reader,
        pytest.raises(UserError, match="maze-1/0"),
    ):
        reader.page(SessionFilter(text="naïve"))


def test_the_interval_of_a_mean() -> None:
    assert mean_interval(0, 0.0, 0.0) is None
    assert mean_interval(10, 7.0, 7.0) == wilson(7, 10)
    assert mean_interval(1, 0.5, 0.25) is None
    interval = mean_interval(4, 2.0, 1.5)  # 0.25, 0.25, 0.5, 1.0 has squares 1.375; any will do
    assert interval is not None
    low, high = interval
    assert low < 0.5 < high
    assert (low + high) / 2 == pytest.approx(0.5)
