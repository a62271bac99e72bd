"""Chunks of prompts follow the clock, and prompts always get on."""

import pytest

from headrace.engine.pacing import Pacer


def paced(factor: float, alone: float, each: float, passes: int = 60) -> Pacer:
    """A pacer that has met a machine on which passes take `alone` + `each` per prompt token."""
    pacer = Pacer(factor, least=16, most=512)
    for i in range(passes):
        tokens = 0 if i % 3 == 0 else pacer.tokens
        pacer.passed(alone + each * tokens, decoding=8, prompt_tokens=tokens)
    return pacer


@pytest.mark.parametrize(("each", "tokens"), [(0.0003, 100), (0.00001, 512), (0.1, 16)])
def test_a_pass_takes_no_more_than_the_factor(each: float, tokens: int) -> None:
    assert paced(4.0, 0.010, each).tokens == pytest.approx(tokens, abs=1)


def test_it_follows_a_context_that_grows() -> None:
    pacer = paced(4.0, 0.010, 0.0001)
    for i in range(60):
        each = 0.0001 + 0.00001 * i
        pacer.passed(0.010 + each * pacer.tokens, decoding=8, prompt_tokens=pacer.tokens)
    assert pacer.tokens * 0.0007 <= 1.2 * 3 * 0.010


def test_nothing_is_learned_without_decoding_and_little_is_tried_before() -> None:
    pacer = Pacer(4.0, least=16, most=512)
    pacer.passed(9.0, decoding=0, prompt_tokens=512)
    assert pacer.tokens == 16
    pacer.passed(0.010, decoding=1, prompt_tokens=0)
    assert pacer.tokens == 16
    pacer.passed(0.009, decoding=1, prompt_tokens=16)
    assert pacer.tokens == 512, "as good as free"


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"factor 1\.0"):
        Pacer(1.0, least=1, most=2)
    with pytest.raises(ValueError, match="least 3"):
        Pacer(2.0, least=3, most=2)
