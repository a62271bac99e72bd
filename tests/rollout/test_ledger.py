"""The ledger's promises one at a time: evidence is equal, tokens add up, misuse fails."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_writer import batch, make_call, play

from headrace.rollout.groups import advantages
from headrace.rollout.record.audit import audit
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.reading import LedgerReader
from headrace.rollout.record.rows import Conservation, Evaluation
from headrace.rollout.segments import segments
from headrace.rollout.types import DropReason, Outcome

# --- evidence ---------------------------------------------------------------------------------


def test_a_session_comes_back_equal(ledger):
    ledger.dispatch("rl", "train", "g", "terminal", {"seed": 2**70, "family": "wc"}, ["s"])
    calls = [
        make_call("s", 0, (3,)),
        make_call("s", 1, (3, 4), parent="s/0", idempotency_key="k\ud800"),
        make_call("s", 2, (), parent="s/1", tokens=0),
        make_call("s", 3, (5,), fork_reason="history_rewritten", text="other"),
    ]
    for call in calls:
        ledger.record_call(call)
    ledger.finish("s", Outcome.OK, {"reward": 1.0, "speed": 0.25}, "fine", {"commands": ["ls"]})
    session = ledger.session("s")
    assert list(session.calls) == calls
    assert session.instance == {"seed": 2**70, "family": "wc"}
    assert (session.outcome, session.rewards) == (Outcome.OK, {"reward": 1.0, "speed": 0.25})
    assert ledger.trainable("s") == session
    (summary,) = ledger.sessions()
    assert (summary.tokens, summary.calls, summary.oldest_version) == (12, 4, 3)
    assert summary.detail == {"commands": ["ls"]}
    assert ledger.fork_counts() == {"history_rewritten": 1}


def test_equal_in_python_is_not_equal_in_evidence(ledger):
    ledger.dispatch("rl", "train", "g", "toy", {}, ["s"])
    first, second = [{"role": "user", "content": 1}], [{"role": "user", "content": True}]
    ledger.record_call(make_call("s", 0, messages=first))
    ledger.record_call(make_call("s", 1, parent="s/0", messages=[*second, *first]))
    assert repr(ledger.session("s").calls[1].messages) == repr([*second, *first])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), JSON), max_size=3)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(MESSAGES, st.booleans(), MESSAGES), min_size=1, max_size=4))
def test_any_json_comes_back_equal(ledger, turns):
    serial = ledger.get_state("serial", 0)
    ledger.put_state("serial", serial + 1)
    name = f"s{serial}"
    ledger.dispatch("rl", "train", f"g{serial}", "toy", {}, [name])
    calls = []
    for index, (messages, extends, tools) in enumerate(turns):
        parent = calls[-1] if calls and extends else None
        call = make_call(
            name,
            index,
            parent=parent and parent.id,
            messages=[*(parent.messages if parent else []), *messages],
            tools=tools,
            response={"content": messages},
        )
        ledger.record_call(call)
        calls.append(call)
    assert repr(list(ledger.session(name).calls)) == repr(calls)


def test_messages_are_stored_once(ledger, tmp_path):
    ledger.dispatch("rl", "train", "g", "toy", {}, ["s"])
    history, parent = [], None
    for index in range(40):
        history = [*history, {"role": "tool", "content": f"{index:05d}" * 400}]
        ledger.record_call(make_call("s", index, parent=parent, messages=history))
        parent = f"s/{index}"
    assert ledger.session("s").calls[-1].messages == history
    ledger.close()
    # 40 messages of 2 kB; their repetition in every later call would be 1.6 MB.
    assert (tmp_path / "ledger.sqlite").stat().st_size < 400_000


def test_a_late_call_is_kept_and_counted_but_never_trained(ledger):
    names = play(ledger, "g", [0.0, 1.0])
    ledger.record_call(make_call(names[1], 1, parent=f"{names[1]}/0", tokens=5))
    assert len(ledger.session(names[1]).calls) == 2
    assert len(ledger.trainable(names[1]).calls) == 1
    ledger.cut_batch(batch(0, names))
    ledger.commit_batch("rl", 0, 1)
    assert ledger.conservation() == Conservation(11, 6, {DropReason.CANCELLED: 5}, 0)
    (trained,) = ledger.batches("rl")
    assert trained.members[1].excluded == {f"{names[1]}/1": DropReason.CANCELLED}


def test_what_another_model_said_is_kept_and_counted_but_never_trained_nor_stale(ledger):
    ledger.dispatch("rl", "train", "g", "toy", {}, ["g.0", "g.1"])
    for name in ("g.0", "g.1"):
        ledger.record_call(make_call(name, 0, versions=(4,)))
        ledger.record_call(make_call(name, 1, versions=(0,), tokens=5, model="judge"))
        ledger.finish(name, Outcome.OK, {"reward": float(name == "g.1")})
    assert [c.model for c in ledger.session("g.0").calls] == [None, "judge"]
    assert [s.oldest_version for s in ledger.sessions()] == [4, 4], "a judge's version is its own"
    ledger.decide_group("g", advantages(ledger.rollouts("g")))
    ledger.cut_batch(batch(0, ["g.0", "g.1"], version=4, tau=0))
    ledger.commit_batch("rl", 0, 1)
    assert ledger.conservation() == Conservation(16, 6, {DropReason.OTHER_MODEL: 10}, 0)
    assert all(finding.held for finding in audit(ledger, derive=segments).values())


# --- the account ------------------------------------------------------------------------------


def test_every_token_has_one_place(ledger):
    """One stage with every kind of ending; three tokens a session."""
    trained = play(ledger, "trained", [0.0, 1.0, None])
    stale = play(ledger, "stale", [0.0, 1.0])
    play(ledger, "flat", [1.0, 1.0])
    play(ledger, "invalid", [1.0, None])
    waiting = play(ledger, "waiting", [0.0, 1.0])
    play(ledger, "undecided", [0.0, 1.0], decide=False)
    ledger.dispatch("rl", "train", "open", "toy", {}, ["open"])
    ledger.record_call(make_call("open", 0))
    ledger.dispatch("rl", "eval:before", "e", "toy", {}, ["e"])
    ledger.record_call(make_call("e", 0))
    ledger.finish("e", Outcome.OK, {"reward": 1.0})

    ledger.cut_batch(
        batch(0, trained[:1], tau=1), [(stale[0], DropReason.STALE), (stale[1], DropReason.STALE)]
    )
    ledger.cut_batch(batch(1, trained[1:2], excluded={f"{trained[1]}/0": DropReason.TOO_LONG}))
    dropped = {
        DropReason.ENV_FAILED: 6,
        DropReason.STALE: 6,
        DropReason.NO_SIGNAL: 6,
        DropReason.GROUP_INVALID: 3,
        DropReason.EVALUATION: 3,
        DropReason.TOO_LONG: 3,
    }
    assert ledger.conservation("rl") == Conservation(45, 0, dropped, 18)
    ledger.commit_batch("rl", 0, 1)
    assert ledger.conservation("rl") == Conservation(45, 3, dropped, 15)
    ledger.commit_batch("rl", 1, 2)
    assert ledger.conservation("other") == Conservation(0, 0, {}, 0)
    assert ledger.conservation("rl") == Conservation(45, 3, dropped, 15)
    ledger.checkpointed("rl", 2, "c")
    ledger.stage_finished("rl", 1.0)
    dropped |= {DropReason.STAGE_ENDED: 12, DropReason.CANCELLED: 3}
    assert ledger.conservation("rl") == Conservation(45, 3, dropped, 0)
    assert ledger.outcome_counts("rl", "train") == {"cancelled": 1, "env_failed": 2, "ok": 11}
    assert ledger.drop_counts("rl")[DropReason.STAGE_ENDED] == 4
    assert all(finding.held for finding in audit(ledger).values()), audit(ledger)
    assert next(s for s in ledger.sessions() if s.id == waiting[0]).drop_reason == "stage_ended"


def test_giving_up_a_group_ends_its_open_members(ledger):
    ledger.dispatch("rl", "train", "g", "toy", {}, ["a", "b"])
    ledger.record_call(make_call("a", 0))
    ledger.record_call(make_call("b", 0))
    ledger.finish("a", Outcome.OK, {"reward": 1.0})
    ledger.drop_group("g", DropReason.STAGE_ENDED)
    assert ledger.outcome_counts() == {"cancelled": 1, "ok": 1}
    assert ledger.conservation().dropped == {DropReason.STAGE_ENDED: 6}
    with pytest.raises(ValueError, match="dropped"):
        ledger.drop_group("g", DropReason.STALE)


def test_staleness_is_counted_per_trained_token(ledger):
    names = play(ledger, "g", [0.0, 1.0], versions=(2, 3), tokens=4)
    late = play(ledger, "h", [0.0, 1.0], versions=(5,), tokens=1)
    ledger.cut_batch(batch(0, [*names, *late], version=4, tau=2))
    assert ledger.staleness_histogram("rl") == {}
    ledger.commit_batch("rl", 0, 1)
    assert ledger.staleness_histogram("rl") == {0: 2, 1: 8, 2: 8}


# --- reading ----------------------------------------------------------------------------------


def test_sessions_are_found_by_what_they_are(ledger):
    for i in range(300):  # more than one page
        ledger.dispatch("rl", "train", f"g{i}", "toy", {}, [f"s{i}"])
        ledger.finish(f"s{i}", Outcome.OK, {"reward": i / 300})
    ledger.dispatch("sft", "eval:x", "e", "other", {}, ["e"])

    def ids(**conditions):
        return [s.id for s in ledger.sessions(**conditions)]

    assert ids(stage="rl") == [f"s{i}" for i in range(300)]
    assert ids(newest_first=True, limit=2) == ["e", "s299"]
    assert ids(min_reward=0.99) == ["s297", "s298", "s299"]
    assert ids(max_reward=0.0) == ["s0"]
    assert ids(stage="rl", limit=290)[-1] == "s289"
    assert ids(task="other") == ids(purpose="eval:x") == ["e"]
    assert ids(outcome=Outcome.TIMEOUT) == []
    points = ledger.reward_series("rl")
    assert [p.session_id for p in points] == ids(stage="rl")
    assert points[-1].reward == 299 / 300
    with pytest.raises(KeyError, match="nobody"):
        ledger.session("nobody")


def test_a_reader_sees_a_run_in_progress(ledger, tmp_path):
    with LedgerReader.open(tmp_path) as reader:
        play(ledger, "g", [0.0, 1.0])
        assert reader.conservation().pending == 6
        with reader.snapshot():
            assert reader.outcome_counts() == {"ok": 2}
            play(ledger, "h", [0.0, 1.0])
            assert reader.outcome_counts() == {"ok": 2}
        assert reader.outcome_counts() == {"ok": 4}
        assert reader.session("h.1") == ledger.session("h.1")


def test_state_stages_and_evaluations(ledger, tmp_path):
    assert ledger.get_state("cursor", 7) == 7
    ledger.put_state("cursor", {"rl": [1, None]})
    ledger.put_state("cursor", {"rl": [2, None]})
    ledger.put_evaluation(Evaluation("start", "toy", "rl", 10, 0.1, 0.0, 0.4))
    better = Evaluation("end", "toy", "rl", 300, 0.9, 0.87, 0.93, {"wc": 0.5})
    ledger.put_evaluation(Evaluation("end", "toy", "rl", 1, 0.0, 0.0, 1.0))
    ledger.put_evaluation(better)
    ledger.publish("rl", 0, 0, "w0")
    ledger.publish("rl", 1, 4, tmp_path / "w1")
    ledger.stage_finished("rl", 12.5, {"steps": 3})
    ledger.close()
    with Ledger.resume(tmp_path) as again:
        assert again.get_state("cursor") == {"rl": [2, None]}
        assert [e.label for e in again.evaluations()] == ["start", "end"]
        assert again.evaluations()[1] == better
        assert [(p.version, p.step) for p in again.publications("rl")] == [(0, 0), (1, 4)]
        (stage,) = again.stages()
        assert (stage.started_at, stage.seconds, stage.result) == (101.0, 12.5, {"steps": 3})


# --- transactions -----------------------------------------------------------------------------


def test_a_transaction_happens_whole_or_not_at_all(ledger):
    def fail_in_the_middle():
        with ledger.transaction():
            ledger.dispatch("rl", "train", "g", "toy", {}, ["s"], state={"cursor": 1})
            ledger.record_call(make_call("s", 0))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_in_the_middle()
    assert ledger.get_state("cursor") is None
    assert ledger.outcome_counts() == {}
    ledger.dispatch("rl", "train", "g", "toy", {}, ["s"], state={"cursor": 1})
    ledger.record_call(make_call("s", 0))
    assert ledger.get_state("cursor") == 1
    assert ledger.session("s").calls == (make_call("s", 0),)


def test_a_refused_call_leaves_the_rest_of_its_transaction(ledger):
    with ledger.transaction():
        ledger.dispatch("rl", "train", "g", "toy", {}, ["s"])
        with pytest.raises(ValueError, match="before"):
            ledger.dispatch("rl", "train", "h", "toy", {}, ["t", "s"])
    assert [s.id for s in ledger.sessions()] == ["s"]


# --- misuse -----------------------------------------------------------------------------------


def _two(ledger):
    return play(ledger, "g", [0.0, 1.0])


def _one(ledger, *names, seed=1):
    ledger.dispatch("rl", "train", "g", "toy", {"seed": seed}, names)


def _cut(ledger, **options):
    names = _two(ledger)
    ledger.cut_batch(batch(0, names, **options))
    return names


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda led: _one(led), "without sessions"),
        (lambda led: led.dispatch("rl", "test", "g", "toy", {}, ["s"]), "purpose 'test'"),
        (
            lambda led: _one(led, "s", "s"),
            "dispatched before",
        ),
        (
            lambda led: (
                _two(led),
                led.dispatch("rl", "train", "g", "toy", {"seed": 1}, ["s"]),
            ),
            "cannot",
        ),
        (
            lambda led: (
                _two(led),
                led.dispatch("rl", "train", "g", "toy", {"seed": 2}, ["s"]),
            ),
            "content",
        ),
        (lambda led: led.record_call(make_call("s", 0)), "unknown session s"),
        (
            lambda led: (_two(led), led.record_call(make_call("g.0", 0))),
            "already recorded",
        ),
        (
            lambda led: (_two(led), led.record_call(make_call("g.0", 0, id="x"))),
            "already recorded",
        ),
        (
            lambda led: (_two(led), led.record_call(make_call("g.0", 1, parent="g.1/0"))),
            "parent",
        ),
        (lambda led: led.finish("s", Outcome.CANCELLED), "unknown"),
        (lambda led: (_two(led), led.finish("g.0", Outcome.CANCELLED)), "already ok"),
        (lambda led: led.finish("s", Outcome.OK), "reward None"),
        (
            lambda led: led.finish("s", Outcome.TIMEOUT, {"reward": float("nan")}),
            "reward nan",
        ),
        (lambda led: led.decide_group("g", advantages(())), "at least one"),
        (
            lambda led: (_two(led), led.drop([("g.0", DropReason.STALE)] * 2)),
            "not pending",
        ),
        (lambda led: (_cut(led), led.drop([("g.0", DropReason.STALE)])), "in batch 0"),
        (lambda led: led.drop([("s", DropReason.STALE)]), "unknown session s"),
        (lambda led: led.cut_batch(batch(0, [])), "no members"),
        (lambda led: led.cut_batch(batch(1, _two(led))), "next one is 0"),
        (lambda led: led.cut_batch(batch(1, _cut(led))), "in batch 0"),
        (lambda led: led.cut_batch(batch(0, _two(led) * 2)), "in batch 0"),
        (
            lambda led: led.cut_batch(batch(0, _two(led), excluded={"x": DropReason.STALE})),
            "no call",
        ),
        (lambda led: led.cut_batch(batch(0, _two(led), stage="sft")), "state"),
        (
            lambda led: led.cut_batch(batch(0, play(led, "g", [0.0, 1.0], decide=False))),
            "state",
        ),
        (
            lambda led: (_cut(led), led.commit_batch("rl", 1, 1)),
            "next uncommitted batch 0",
        ),
        (lambda led: (_cut(led), led.commit_batch("rl", 0, 0)), "last step 0"),
        (lambda led: (_cut(led), led.checkpointed("rl", 1, "c")), "committed batch"),
        (
            lambda led: (_cut(led), led.stage_finished("rl", 1.0)),
            "batch 0 is not committed",
        ),
        (
            lambda led: (
                _cut(led),
                led.commit_batch("rl", 0, 1),
                led.stage_finished("rl", 1.0),
            ),
            "last checkpoint is 0",
        ),
        (lambda led: led.stage_finished("sft", 1.0), "has not started"),
        (
            lambda led: (led.stage_finished("rl", 1.0), led.stage_started("rl")),
            "cannot start again",
        ),
        (
            lambda led: (
                led.stage_finished("rl", 1.0),
                led.dispatch("rl", "train", "g", "t", {}, ["s"]),
            ),
            "finished",
        ),
        (
            lambda led: (led.publish("rl", 1, 1, "w"), led.publish("rl", 1, 2, "w")),
            "not newer",
        ),
        (
            lambda led: (led.checkpointed("rl", 1, "c"), led.checkpointed("rl", 1, "d")),
            "not newer",
        ),
    ],
)
def test_misuse_is_refused(ledger, misuse, message):
    with pytest.raises(ValueError, match=message):
        misuse(ledger)


def test_a_decision_must_fit_its_group(ledger):
    names = play(ledger, "g", [0.0, 1.0, None], decide=False)
    rollouts = ledger.rollouts("g")
    with pytest.raises(ValueError, match="does not fit"):
        ledger.decide_group("g", advantages(rollouts[:2]))
    ledger.dispatch("rl", "train", "h", "toy", {}, ["h1", "h2"])
    ledger.finish("h1", Outcome.OK, {"reward": 1.0})
    with pytest.raises(ValueError, match="1 of 2 members"):
        ledger.decide_group("h", advantages(ledger.rollouts("h")))
    ledger.decide_group("g", advantages(rollouts))
    with pytest.raises(ValueError, match="ready"):
        ledger.decide_group("g", advantages(rollouts))
    with pytest.raises(ValueError, match="not pending"):
        ledger.cut_batch(batch(0, names))
    assert ledger.batches("rl") == []
