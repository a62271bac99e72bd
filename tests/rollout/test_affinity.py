"""Which earlier prompt a prompt continues, and that the memory of it is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.replicas.affinity import BLOCK, PromptAffinity


def blocks(letters: str, more: int = 0) -> list[int]:
    """A prompt of one block per letter, and a few tokens."""
    return [ord(letter) for letter in letters for _ in range(BLOCK)] + [0] * more


def remember(most: int = 100) -> tuple[PromptAffinity, list[str]]:
    forgotten: list[str] = []
    return PromptAffinity(most, forgotten.append), forgotten


def test_the_longest_earlier_prompt_wins_and_a_common_start_is_not_enough():
    affinity, _ = remember()
    first = affinity.conversation(blocks("sa"))
    other = affinity.conversation(blocks("sb"))
    assert other != first, "a system prompt in common does not make one conversation"
    assert affinity.conversation(blocks("sacd", 5)) == first
    assert affinity.conversation(blocks("sbcd")) == other
    assert affinity.conversation(blocks("sacde")) == first
    assert affinity.conversation(blocks("sa")) not in (first, other), "it ends before the last one"
    assert len(affinity) == 3


def test_short_prompts_are_each_their_own():
    affinity, _ = remember()
    assert len({affinity.conversation([1, 2, 3]) for _ in range(3)}) == 3


def test_what_is_not_continued_is_forgotten_first():
    affinity, forgotten = remember(2)
    kept, lost = affinity.conversation(blocks("a")), affinity.conversation(blocks("b"))
    assert affinity.conversation(blocks("ax")) == kept
    affinity.conversation(blocks("c"))
    assert forgotten == [lost]
    assert affinity.conversation(blocks("axy")) == kept
    with pytest.raises(ValueError, match="at least 1"):
        PromptAffinity(0, forgotten.append)


@given(st.lists(st.text("ab", max_size=5), max_size=40), st.integers(1, 6))
def test_names_are_remembered_or_were_told_to_be_forgotten(prompts: list[str], most: int):
    affinity, forgotten = remember(most)
    live: set[str] = set()
    for prompt in prompts:
        name = affinity.conversation(blocks(prompt))
        live.add(name)
        live -= set(forgotten)
        assert name in live
        assert len(affinity) == len(live) <= most
    assert len(set(forgotten)) == len(forgotten), "each once"
