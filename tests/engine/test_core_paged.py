"""The core under memory pressure, priorities and long prompts: same tokens, bounded waits."""

import math
import random

import pytest
import torch
from engine_harness import (
    LATENT_KINDS,
    ask,
    drain,
    full_logits,
    greedy_reference,
    latent_model,
    logprobs,
    new_core,
    output,
    random_prompt,
    tiny_model,
)

from headrace.engine.core import EngineCore
from headrace.engine.types import EngineError
from headrace.model.decoder import Decoder

torch.set_num_threads(1)


def models() -> dict[str, Decoder]:
    return {"grouped": tiny_model(), **{kind: latent_model(kind) for kind in LATENT_KINDS}}


@pytest.mark.parametrize("kind", ["grouped", *LATENT_KINDS])
def test_a_cache_too_small_for_all_preempts_and_loses_nothing(kind: str) -> None:
    model = models()[kind]
    core = new_core(model, cache_tokens=104, prefill_tokens=24)
    prompts = {f"r{i}": random_prompt(i, 18 + i) for i in range(6)}
    for name, prompt in prompts.items():
        core.add(ask(name, prompt, max_tokens=30))
    results = drain(core)
    for name, prompt in prompts.items():
        assert output(results[name]) == greedy_reference(model, prompt, 30), name
    stats = core.stats()
    assert stats.preemptions > 0
    assert stats.blocks == 13
    assert stats.blocks_free + stats.blocks_cached == stats.blocks


def test_what_can_never_fit_is_refused_with_numbers_and_a_remedy() -> None:
    core = new_core(tiny_model(), cache_tokens=40)
    with pytest.raises(
        EngineError, match=r"prompt of 30 tokens and up to 20 new ones.*40"
    ) as caught:
        core.add(ask("r", random_prompt(0, 30), max_tokens=20))
    assert caught.value.code == EngineError.TOO_LONG
    core.add(ask("r", random_prompt(0, 30), max_tokens=10))
    assert len(output(drain(core)["r"])) == 10


@pytest.mark.parametrize("kind", ["grouped", "glm_moe_dsa"])
def test_a_session_of_many_turns_prefills_its_new_tokens_only(kind: str) -> None:
    model = models()[kind]
    core = new_core(model, max_context=256)
    history: tuple[int, ...] = ()
    new = 0
    for turn in range(8):
        said = random_prompt(turn, 20)
        new += len(said)
        core.add(ask(f"t{turn}", (*history, *said), max_tokens=9))
        # A neighbour that comes and goes must not cost the session its prefix.
        core.add(ask(f"n{turn}", random_prompt(100 + turn, 11), max_tokens=3))
        new += 11
        results = drain(core)
        answer = output(results[f"t{turn}"])
        assert answer == greedy_reference(model, (*history, *said), 9)
        history = (*history, *said, *answer)
    # The last token of an answer was never an input, so it is computed with the next turn.
    assert core.stats().tokens_prefilled == new + 7


def tokens_of(core: EngineCore, name: str) -> int:
    live = core._open.get(name)
    return 0 if live is None else len(live.ids)


def test_a_long_prompt_never_keeps_running_requests_waiting() -> None:
    model = tiny_model()
    core = new_core(model, max_context=256, prefill_tokens=8)
    for i in range(3):
        core.add(ask(f"r{i}", random_prompt(i, 5), max_tokens=60))
    while core.stats().running < 3 or any(tokens_of(core, f"r{i}") == 0 for i in range(3)):
        core.step()
    core.add(ask("long", random_prompt(9, 200), max_tokens=4))
    steps = 0
    while tokens_of(core, "long") == 0:
        before = [tokens_of(core, f"r{i}") for i in range(3)]
        core.step()
        assert [tokens_of(core, f"r{i}") for i in range(3)] == [n + 1 for n in before]
        steps += 1
    assert steps == 25
    results = drain(core)
    assert output(results["long"]) == greedy_reference(model, random_prompt(9, 200), 4)


def test_higher_priority_goes_first_and_a_busy_session_does_not_starve_another() -> None:
    core = new_core(tiny_model(), max_running=1)
    order: list[str] = []
    for i in range(4):
        core.add(ask(f"busy{i}", random_prompt(i, 12), max_tokens=3, session="busy"))
    core.step()
    core.add(ask("quiet", random_prompt(8, 12), max_tokens=3, session="quiet"))
    core.add(ask("urgent", random_prompt(9, 12), max_tokens=3, session="busy", priority=1))
    while core.has_work:
        order += [ended.id for ended in core.step()]
    assert order.index("urgent") < order.index("busy1")
    assert order.index("quiet") < order.index("busy1")


@pytest.mark.parametrize(
    ("dtype", "weights"), [("fp32", "same"), ("bf16", "same"), ("fp32", "int8")]
)
def test_deterministic_tokens_and_logprobs_are_the_same_to_the_bit_in_every_batch(
    dtype: str, weights: str
) -> None:
    def run(seed: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The same request among others that come, end, press for memory and share its prompt."""
        rng = random.Random(seed)
        model = tiny_model(hidden_size=64, head_dim=16)
        core = new_core(
            model.bfloat16() if dtype == "bf16" else model,
            deterministic=True,
            weights=weights,
            prefill_tokens=rng.choice([3, 17, 64]),
            cache_tokens=rng.choice([96, 160, 1024]),
            max_context=96,
        )
        prompt = random_prompt(1, 33)
        others = [
            ask(
                f"n{i}",
                (*prompt[: rng.choice([0, 20, 33])], *random_prompt(50 + i, rng.randint(1, 30))),
                temperature=1.0,
                seed=i,
                max_tokens=rng.randint(1, 25),
            )
            for i in range(rng.choice([0, 3, 9]))
        ]
        mine = ask("mine", prompt, temperature=1.0, seed=5, max_tokens=40)
        queue = [*others, mine]
        rng.shuffle(queue)
        while "mine" not in core._open:
            core.add(queue.pop())
        pending = list(queue)
        results = drain(core, between=lambda _: core.add(pending.pop()) if pending else None)
        return output(results["mine"]), logprobs(results["mine"])

    alone = run(0)
    assert len(alone[0]) == 40
    for seed in range(1, 8):
        assert run(seed) == alone, seed


def test_plain_batches_do_differ_in_their_bits() -> None:
    """What the test above would miss if its tokens were too few or its model too small."""
    rows, weight = torch.randn(9, 64), torch.randn(160, 64)
    assert not torch.equal((rows @ weight.T)[:1], rows[:1] @ weight.T)


def test_prompt_logprobs_and_alternatives_are_the_models_own() -> None:
    model = tiny_model()
    core = new_core(model, prefill_tokens=7)
    prompt = random_prompt(3, 30)
    core.add(ask("warm", prompt, max_tokens=2))
    drain(core)
    core.add(ask("r", prompt, max_tokens=6, temperature=0.5, seed=1, prompt_logprobs=2, logprobs=3))
    result = drain(core)["r"]
    ids = (*prompt, *output(result))
    log_probs = full_logits(model, ids).log_softmax(-1)
    want = [float(log_probs[i, token]) for i, token in enumerate(ids[1:])]
    assert math.isnan(result.prompt_logprobs[0])
    assert result.prompt_logprobs[1:] == pytest.approx(want[:29], abs=1e-4)
    assert result.raw_logprobs == pytest.approx(want[29:], abs=1e-4)
    assert result.reused_tokens == 0
    assert [len(a) for a in result.prompt_alternatives] == [0] + [2] * 29
    assert [[i for i, _ in a] for a in result.alternatives] == log_probs[29:-1].topk(
        3
    ).indices.tolist()
