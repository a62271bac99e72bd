"""The short cut that sees the end of thinking without reading agrees with the reader."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.tokens.library import LibraryRenderer
from headrace.tokens.reader import TaggedReader
from headrace.tokens.training import SMALLEST_VOCABULARY, train_tokenizer

RENDERER = LibraryRenderer("glm-5", train_tokenizer([], SMALLEST_VOCABULARY, "glm-5"))
READING = RENDERER._reading
IDS = [RENDERER.tokenizer.special_ids[tag] for tag in ("<think>", "</think>")] * 3
IDS += [*RENDERER.tokenizer.special_ids.values(), *RENDERER.tokenizer.encode_text("a</think>b")]
OPEN, BARE = (RENDERER.tokenizer.encode(text) for text in ("<|assistant|><think>", "<|assistant|>"))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(IDS), max_size=12), st.sampled_from([OPEN, BARE]))
def test_where_it_says_so_thinking_has_ended(completion: list[int], prompt: list[int]) -> None:
    reader = RENDERER.reader(prompt, ())
    assert isinstance(reader, TaggedReader)
    reader.feed(completion)
    assert not (READING.has_ended_thinking(completion) and reader.thinks)


def test_it_says_so_of_an_ordinary_answer() -> None:
    encode = RENDERER.tokenizer.encode
    assert READING.has_ended_thinking(encode("so</think>12<|user|>"))
    assert not READING.has_ended_thinking(encode("so"))
    assert not READING.has_ended_thinking(encode("so</think>12<think>but"))
