"""The scheduler's rules, one by one; random histories are in test_scheduler_machine.py."""

import numpy as np
import pytest

from headrace.engine.cache.blocks import BlockPool
from headrace.engine.cache.prefix import PrefixTree
from headrace.engine.scheduler import FairShare, Scheduler
from headrace.engine.sequence import Chunk, Plan, Sequence
from headrace.engine.types import EngineError

SAMPLED = 7


class Engine:
    """A scheduler whose passes cost nothing and always sample the same token."""

    def __init__(self, *, blocks: int = 64, block_tokens: int = 4, **sizes: int) -> None:
        self.pool = BlockPool(blocks, block_tokens)
        self.tree = PrefixTree(self.pool)
        defaults = {
            "max_running": 8,
            "max_waiting": 64,
            "max_context": 512,
            "step_tokens": 64,
            "prefill_tokens": 32,
        }
        self.scheduler = Scheduler(self.pool, self.tree, **(defaults | sizes))
        self.ended: list[str] = []

    def ask(self, id: str, prompt: object, limit: int = 1, **fields: object) -> Sequence:
        if isinstance(prompt, int):
            prompt = np.arange(prompt)
        sequence = Sequence(id, prompt, limit=limit, **fields)  # type: ignore[arg-type]  # test data
        self.scheduler.add(sequence)
        return sequence

    def compute(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            self.scheduler.advance(chunk, *([SAMPLED] if chunk.samples else []))
            sequence = chunk.sequence
            if sequence.length - sequence.prompt_length == sequence.limit:
                self.scheduler.finish(sequence)
                self.ended.append(sequence.id)

    def step(self) -> list[tuple[str, int, int]]:
        plan = self.scheduler.plan()
        self.compute(plan)
        return shape(plan.chunks)

    def drain(self, most: int = 500) -> int:
        """Steps until nothing is left."""
        for steps in range(most):
            if not self.scheduler.waiting + self.scheduler.running:
                return steps
            assert self.step()
        raise AssertionError(f"not done after {most} steps")


def shape(chunks: list[Chunk]) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.id, chunk.start, chunk.count) for chunk in chunks]


def test_a_prompt_is_computed_in_chunks_then_decoded() -> None:
    engine = Engine(step_tokens=8, max_running=2)
    sequence = engine.ask("a", 10, limit=3)
    assert sequence.state == "waiting"
    first = engine.scheduler.plan()
    assert shape(first.chunks) == [("a", 0, 8)]
    assert not first.chunks[0].samples
    assert sequence.state == "running"
    engine.compute(first)
    second = engine.scheduler.plan()
    assert shape(second.chunks) == [("a", 8, 2)]
    assert second.chunks[0].samples
    engine.compute(second)
    assert engine.step() == [("a", 10, 1)]
    assert engine.step() == [("a", 11, 1)]
    assert sequence.state == "done"
    assert sequence.tokens.tolist() == [*range(10), SAMPLED, SAMPLED, SAMPLED]
    assert engine.scheduler.plan() == Plan([], [])
    # The last sampled token was never computed.
    assert engine.tree.peek(sequence.tokens, 13) == 12
    assert engine.scheduler.prefilled_tokens == 10


def test_a_long_prompt_delays_decodes_by_a_bounded_time() -> None:
    engine = Engine(step_tokens=64, prefill_tokens=6, blocks=128)
    decoding = engine.ask("a", 4, limit=20)
    engine.step()
    engine.ask("b", np.arange(100, 130))
    engine.ask("c", np.arange(200, 230))
    for start in range(0, 30, 6):
        assert engine.step() == [("a", 4 + start // 6, 1), ("b", start, 6)]
    assert engine.step() == [("a", 9, 1), ("c", 0, 6)]
    engine.scheduler.finish(decoding)
    # Nobody is delayed any more.
    assert engine.step() == [("c", 6, 24)]


def test_a_retry_of_the_same_plan_takes_no_more_blocks() -> None:
    engine = Engine()
    engine.ask("a", 4, limit=4)
    engine.step()
    assert engine.scheduler.plan().chunks == engine.scheduler.plan().chunks
    assert engine.pool.free == 62


def test_samples_of_one_prompt_compute_it_once() -> None:
    engine = Engine(prefill_tokens=16, blocks=64)
    for i in range(8):
        engine.ask(f"s{i}", 50, limit=9)
    engine.ask("other", np.arange(100, 110))
    # There is room for 14 more tokens in the pass, and none to waste.
    assert engine.step() == [("s0", 0, 50)]
    engine.drain()
    # The full blocks are shared; each sample computes the rest of the prompt itself.
    assert engine.scheduler.prefilled_tokens == 50 + 7 * 2 + 10
    assert engine.scheduler.reused_tokens == 7 * 48
    assert engine.scheduler.preempted == 0


def test_a_neighbour_of_low_priority_is_not_awaited() -> None:
    engine = Engine(step_tokens=8)
    engine.ask("low", 50)
    engine.step()
    engine.ask("high", 50, priority=1)
    assert engine.step() == [("high", 8, 8)]


def test_the_next_turn_computes_only_what_is_new() -> None:
    engine = Engine()
    first = engine.ask("turn-1", 10, limit=4)
    engine.drain()
    second = engine.ask("turn-2", [*first.tokens, 90, 91])
    plan = engine.scheduler.plan()
    # 13 computed tokens are held: three blocks, and one token of a fourth that is copied.
    assert shape(plan.chunks) == [("turn-2", 13, 3)]
    assert [copy.tokens for copy in plan.copies] == [1]
    assert second.blocks[3] == plan.copies[0].target != plan.copies[0].source
    assert second.reused == 13
    engine.compute(plan)
    assert engine.pool.free + engine.pool.idle == engine.pool.blocks


def test_a_held_prompt_still_computes_its_last_token() -> None:
    engine = Engine()
    engine.ask("a", 8)
    engine.drain()
    engine.ask("b", 8)
    plan = engine.scheduler.plan()
    assert shape(plan.chunks) == [("b", 7, 1)]
    assert plan.chunks[0].samples
    assert [copy.tokens for copy in plan.copies] == [3]


def test_an_exact_fit_gets_on_without_the_copy() -> None:
    engine = Engine(blocks=2)
    engine.ask("a", 8)
    engine.drain()
    assert engine.pool.free == 0
    # A copy of the second block would need a third one.
    engine.ask("b", [0, 1, 2, 3, 4, 9, 9, 9])
    plan = engine.scheduler.plan()
    assert (shape(plan.chunks), plan.copies) == ([("b", 4, 4)], [])


def test_priority_goes_first_and_takes_a_place_if_need_be() -> None:
    engine = Engine(max_running=2)
    engine.ask("low-1", 5, limit=9)
    engine.ask("low-2", [9, 9], limit=9)
    engine.step()
    engine.ask("low-3", [8, 8], limit=9)
    high = engine.ask("high", [7, 7], limit=2, priority=1)
    assert engine.step() == [("low-1", 5, 1), ("high", 0, 2)]
    assert high.state == "running"
    engine.step()
    assert engine.ended == ["high"]
    # The preempted one is ahead of the one that never ran, and nothing it sampled is lost.
    assert engine.step() == [("low-1", 7, 1), ("low-2", 2, 1)]
    engine.drain()
    assert engine.scheduler.preempted == 1


def test_the_last_to_run_gives_its_blocks_back_and_resumes() -> None:
    engine = Engine(blocks=10, prefill_tokens=64)
    sequences = [engine.ask(f"r{i}", [i] * 4, limit=24) for i in range(3)]
    engine.drain()
    assert engine.scheduler.preempted > 0
    assert sequences[0].preemptions == 0
    assert engine.ended[0] == "r0"
    for i, sequence in enumerate(sequences):
        assert sequence.tokens.tolist() == [i] * 4 + [SAMPLED] * 24


def test_a_prefill_preempted_after_it_was_planned_is_taken_out() -> None:
    engine = Engine(blocks=14, prefill_tokens=2)
    for i in range(2):
        engine.ask(f"d{i}", [i] * 4, limit=24)
    engine.step()
    # The decodes outgrow what was left; then `b`, whose turn it is, takes the last block.
    first = engine.ask("a", np.arange(100, 113), session="a")
    second = engine.ask("b", np.arange(200, 211), session="b")
    chunks = []
    while not second.preemptions:
        chunks = engine.step()
    assert [id for id, _, _ in chunks] == ["d0", "d1", "a"]
    assert first.preemptions == 0
    assert second.state == "waiting"
    engine.drain()


def test_the_line_is_shared_not_only_its_head() -> None:
    engine = Engine(max_running=2)
    for i in range(4):
        engine.ask(f"hog-{i}", [i] * 5, limit=2, session="hog")
    engine.ask("light", [9] * 5, limit=2, session="light")
    assert engine.step() == [("hog-0", 0, 5), ("light", 0, 5)]


def test_nobody_is_admitted_into_room_that_running_sequences_need() -> None:
    engine = Engine(blocks=8, prefill_tokens=4)
    engine.ask("d", [7], limit=12, session="d")
    engine.step()
    engine.ask("a", 16, limit=4, session="a")
    engine.step()
    engine.step()
    assert engine.pool.free == 5
    late = engine.ask("b", np.arange(100, 108), session="b")
    # It is next in line and needs two blocks. But two are to come for the rest of a prompt, and
    # two sequences run that will begin a block each.
    assert engine.step() == [("d", 3, 1), ("a", 8, 4)]
    assert late.state == "waiting"
    engine.drain()
    assert engine.scheduler.preempted == 0


def test_one_request_is_not_starved_by_a_session_of_many() -> None:
    engine = Engine(max_running=4, blocks=400, max_waiting=200)
    for i in range(100):
        engine.ask(f"hog-{i}", np.arange(20) + 20 * i, limit=8, session="hog")
    for _ in range(20):
        engine.step()
    late = engine.ask("late", np.arange(5000, 5020), limit=8, session="late")
    waited = 0
    while late.state == "waiting":
        engine.step()
        waited += 1
    # As soon as one of the four is done.
    assert waited <= 9
    engine.drain(2000)


def test_prompt_tokens_are_shared_between_sessions() -> None:
    engine = Engine(step_tokens=10, blocks=400, max_context=2000)
    engine.ask("long", 1000, session="a")
    for _ in range(3):
        assert engine.step()[0][0] == "long"
    engine.ask("short", [9] * 15, session="b")
    steps = 0
    while not engine.ended:
        engine.step()
        steps += 1
    # Turn by turn: 15 tokens of one are computed beside 15 to 25 of the other.
    assert steps <= 4
    assert engine.ended == ["short"]


def test_newcomers_do_not_starve_who_was_served_much() -> None:
    shares = FairShare()
    shares.join("old")
    shares.charge("old", 1000)
    shares.join("new-0")
    for i in range(100):
        shares.charge(f"new-{i}", 50)
        shares.pass_time(50)
        shares.join(f"new-{i + 1}")
        shares.leave(f"new-{i}")
    assert shares.served("old") < shares.served("new-100")
    # And a pause saves up nothing.
    shares.leave("old")
    shares.pass_time(10_000)
    shares.join("old")
    assert shares.served("old") >= shares.served("new-100")


def test_what_can_never_fit_is_refused_with_a_remedy() -> None:
    engine = Engine(blocks=4, max_context=512)
    engine.ask("fits", 10, limit=7)
    with pytest.raises(
        EngineError, match=r"10 tokens.* 8 new.* 4 blocks of 4 .*at most 7 "
    ) as caught:
        engine.ask("a", 10, limit=8)
    assert caught.value.code == EngineError.TOO_LONG
    with pytest.raises(EngineError, match="shorten the prompt to at most 16"):
        engine.ask("b", 20)
    with pytest.raises(EngineError, match="the context holds 12"):
        Engine(max_context=12).ask("c", 10, limit=3)
    engine.drain()
    assert engine.ended == ["fits"]


def test_overload_is_refused_and_recovers() -> None:
    engine = Engine(max_running=2, max_waiting=1)
    for i in range(3):
        engine.ask(f"r{i}", [i], limit=2)
    with pytest.raises(EngineError) as caught:
        engine.ask("r3", [3])
    assert caught.value.code == EngineError.OVERLOADED
    engine.step()
    with pytest.raises(EngineError):
        engine.ask("r3", [3])
    engine.step()
    engine.ask("r3", [3])
    engine.drain()
    assert sorted(engine.ended) == ["r0", "r1", "r2", "r3"]


def test_new_weights_make_running_sequences_start_again_ahead_of_waiting_ones() -> None:
    engine = Engine(max_running=2)
    running = [engine.ask(f"r{i}", [i] * 5, limit=4) for i in range(2)]
    engine.step()
    engine.step()
    waiting = engine.ask("w", [9])
    engine.scheduler.drop_computed(3)
    assert engine.tree.version == 3
    assert engine.pool.free == engine.pool.blocks
    assert [sequence.computed for sequence in running] == [0, 0]
    assert engine.step() == [("r0", 0, 7), ("r1", 0, 7)]
    assert waiting.state == "waiting"
    engine.drain()
    assert [len(sequence.tokens) for sequence in running] == [9, 9]
    assert engine.scheduler.dropped_tokens == 12
    assert engine.scheduler.preempted == 0


def test_worthless_blocks_are_not_left_for_others() -> None:
    engine = Engine(step_tokens=8)
    engine.ask("good", 6)
    engine.drain()
    bad = engine.ask("bad", 40)
    engine.step()
    engine.step()
    engine.scheduler.finish(bad, keep=False)
    assert engine.tree.peek(np.arange(40, dtype=np.int32), 40) == 4
    assert engine.pool.free + engine.pool.idle == engine.pool.blocks


def test_finish_ends_once() -> None:
    engine = Engine()
    sequence = engine.ask("a", 3)
    engine.scheduler.finish(sequence)
    with pytest.raises(ValueError, match="not in this scheduler"):
        engine.scheduler.finish(sequence)
    with pytest.raises(ValueError, match="not in this scheduler"):
        engine.scheduler.finish(Sequence("b", [1], limit=1))


def test_advance_refuses_what_was_not_planned() -> None:
    engine = Engine(step_tokens=8)
    engine.ask("a", 10)
    (chunk,) = engine.scheduler.plan().chunks
    with pytest.raises(ValueError, match="got the token"):
        engine.scheduler.advance(chunk, 1)
    engine.scheduler.advance(chunk)
    with pytest.raises(ValueError, match="has moved"):
        engine.scheduler.advance(chunk)
    (chunk,) = engine.scheduler.plan().chunks
    with pytest.raises(ValueError, match="got the token"):
        engine.scheduler.advance(chunk)


def test_sizes_must_make_sense() -> None:
    with pytest.raises(ValueError, match="step_tokens 4"):
        Engine(step_tokens=4)
    with pytest.raises(ValueError, match=">= 1"):
        Engine(prefill_tokens=0)
    with pytest.raises(ValueError, match="at least one token"):
        Sequence("a", [], limit=1)
