"""Bits per byte against a computation in float64, window by window, byte by byte."""

import math

import pytest
import torch

from headrace.data.documents import Document
from headrace.errors import UserError
from headrace.measure.text import bits_per_byte
from headrace.model.decoder import Decoder
from headrace.tokens.tokenizer import TextTokenizer

TEXTS = (
    "the quick brown fox",
    "naïve façade, Ελληνικά, 漢字かな交じり文 🦊🦊 the end",
    "é",
    "x",
)


def documents(*texts: str) -> list[Document]:
    return [Document(str(i), text, "prose", "") for i, text in enumerate(texts)]


def surprise(model: Decoder, window: list[int], first: int) -> tuple[float, int]:
    """(nats, count) of a window's tokens from number `first` on, in float64."""
    with torch.no_grad():
        hidden = model(torch.tensor([window]))[0].double()
    logprobs = torch.log_softmax(hidden @ model.output_weight.detach().double().T, -1)
    return -sum(float(logprobs[t - 1, window[t]]) for t in range(first, len(window))), len(
        window
    ) - first


@pytest.mark.parametrize("context", [4, 7, 16, 300])
def test_with_a_prefix_every_token_counts(model, tokenizer, context):
    prefix = [tokenizer.token_id("[gMASK]"), tokenizer.token_id("<sop>")]
    nats, tokens = 0.0, 0
    for text in TEXTS:
        ids = tokenizer.encode_text(text)
        for start in range(0, len(ids), context - 2):
            found = surprise(model, [*prefix, *ids[start : start + context - 2]], 2)
            nats, tokens = nats + found[0], tokens + found[1]
    size = sum(len(text.encode()) for text in TEXTS)
    score = bits_per_byte(
        model, tokenizer, documents(*TEXTS), context=context, max_bytes=10_000, prefix=prefix
    )
    assert score.tokens == tokens == sum(len(tokenizer.encode_text(text)) for text in TEXTS)
    assert score.text_bytes == size
    assert score.nats_per_token == pytest.approx(nats / tokens, rel=1e-5)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize("context", [2, 5, 300])
def test_without_a_prefix_all_but_the_first_character_counts(model, tokenizer, context):
    nats, tokens, size = 0.0, 0, 0
    for text in TEXTS:
        ids = tokenizer.encode_text(text)
        first = next(
            n for n in range(1, len(ids) + 1) if text.startswith(tokenizer.decode(ids[:n]))
        )
        if first == len(ids):
            continue
        size += len(text.encode()) - len(tokenizer.decode(ids[:first]).encode())
        # Windows overlap by the token that the next one starts from.
        for start in range(first - 1, len(ids) - 1, context - 1):
            found = surprise(model, ids[start : start + context], 1)
            nats, tokens = nats + found[0], tokens + found[1]
    score = bits_per_byte(model, tokenizer, documents(*TEXTS), context=context, max_bytes=10_000)
    assert (score.tokens, score.text_bytes) == (tokens, size)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_an_unpredicted_character_of_several_tokens_is_left_out_whole(model, tokenizer):
    assert len(tokenizer.encode_text("漢")) == 3
    score = bits_per_byte(model, tokenizer, documents("漢x"), context=8, max_bytes=100)
    assert (score.tokens, score.text_bytes) == (1, 1)


def test_max_bytes_ends_between_characters_and_is_not_exceeded(model, tokenizer):
    text = "ab漢字" * 30
    for most in (1, 3, 4, 5, 50):
        score = bits_per_byte(
            model, tokenizer, documents(text, text), context=16, max_bytes=most, prefix=[2]
        )
        kept = text.encode()[:most].decode("utf-8", "ignore")
        # What the first text leaves over, less than a character, may go to the second.
        rest = text.encode()[: most - len(kept.encode())].decode("utf-8", "ignore")
        assert score.text_bytes == len(kept.encode()) + len(rest.encode()) <= most


def test_a_model_that_knows_nothing_spends_the_same_bits_whatever_the_windows(
    model: Decoder, tokenizer: TextTokenizer
):
    for parameter in model.parameters():
        parameter.data.zero_()
    for context in (3, 64):
        score = bits_per_byte(
            model, tokenizer, documents(TEXTS[1]), context=context, max_bytes=10_000, prefix=[2]
        )
        tokens, size = len(tokenizer.encode_text(TEXTS[1])), len(TEXTS[1].encode())
        expected = tokens * math.log2(tokenizer.vocab_size) / size
        assert score.bits_per_byte == pytest.approx(expected, rel=1e-6)


def test_nothing_to_predict_is_a_users_mistake(model, tokenizer):
    with pytest.raises(UserError, match="held_out"):
        bits_per_byte(model, tokenizer, [], context=8, max_bytes=100)
    with pytest.raises(UserError, match="make it at least 4"):
        bits_per_byte(model, tokenizer, documents("ab"), context=3, max_bytes=9, prefix=[2, 3])
