"""Tokenizer training, loading, and the wall between plain text and special tokens."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.tokens.tokenizer import load_tokenizer
from headrace.tokens.training import SMALLEST_VOCABULARY, SPECIAL_TOKENS, train_tokenizer

CORPUS = ["count the lines of notes.txt and answer 1234"] * 20
TOKENIZER = train_tokenizer(CORPUS, 330)
TEXT = st.text() | st.lists(
    st.sampled_from([*SPECIAL_TOKENS, "a", " ", "\ufdd0", "7", "é"]), max_size=12
).map("".join)


@settings(deadline=None, derandomize=True)
@given(text=TEXT)
def test_plain_text_round_trips_and_never_becomes_special(text: str):
    ids = TOKENIZER.encode_text(text)
    assert not set(ids) & set(TOKENIZER.special_ids.values())
    assert TOKENIZER.decode(ids) == text


@settings(deadline=None, derandomize=True)
@given(before=TEXT, inside=TEXT)
def test_shielded_text_is_plain_inside_a_template(before: str, inside: str):
    user, end = TOKENIZER.special_ids["<|user|>"], TOKENIZER.special_ids["<|endoftext|>"]
    shield = TOKENIZER.shield
    ids = TOKENIZER.encode(f"{shield(before)}<|user|>{shield(inside)}<|endoftext|>")
    assert ids == [
        *TOKENIZER.encode_text(before),
        user,
        *TOKENIZER.encode_text(inside),
        end,
    ]


def test_template_text_reads_special_tokens():
    ids = TOKENIZER.encode("<sop><|user|>lines")
    assert ids[:2] == [TOKENIZER.special_ids["<sop>"], TOKENIZER.special_ids["<|user|>"]]
    assert TOKENIZER.tokens(ids[:2]) == ["<sop>", "<|user|>"]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "lines"


def test_digits_stand_alone_and_words_merge():
    assert TOKENIZER.tokens(TOKENIZER.encode_text("1234")) == ["1", "2", "3", "4"]
    assert len(TOKENIZER.encode_text(" lines")) < len(" lines")


def test_decoding_is_total():
    assert TOKENIZER.decode([10**6]) == ""
    lone_byte = next(i for i in TOKENIZER.encode_text("é"))
    assert TOKENIZER.decode([lone_byte]) in ("\ufffd", "é")


def test_training_is_reproducible_and_bounded():
    again = train_tokenizer(CORPUS, 330)
    assert again.encode_text(CORPUS[0]) == TOKENIZER.encode_text(CORPUS[0])
    assert TOKENIZER.vocab_size <= 330
    assert [TOKENIZER.token_id(token) for token in SPECIAL_TOKENS] == list(
        range(len(SPECIAL_TOKENS))
    )
    with pytest.raises(UserError, match="vocab_size 100 is too small"):
        train_tokenizer(CORPUS, 100)
    assert train_tokenizer([], SMALLEST_VOCABULARY).vocab_size == SMALLEST_VOCABULARY


def test_save_and_load(tmp_path: Path):
    TOKENIZER.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "<|user|>count 12 lines"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.eos_token_id == TOKENIZER.special_ids["<|endoftext|>"]
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded.config["headrace_renderer"] == "compact"


def test_bad_directories_are_user_errors(tmp_path: Path):
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)
    TOKENIZER.save(tmp_path)
    for content in ("[]", "{"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(UserError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)


def test_the_gateway_and_its_tokens_need_no_torch():
    code = (
        "import sys, headrace.gateway.server, headrace.tokens.library, headrace.tokens.training\n"
        "headrace.tokens.library.library_names()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_many_texts_at_once_and_who_encodes_alike(tmp_path: Path):
    texts = ["count 12 lines", "", "<|user|> ends \ufdd0", "é"]
    assert TOKENIZER.encode_texts(texts) == [TOKENIZER.encode_text(text) for text in texts]
    TOKENIZER.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == TOKENIZER.fingerprint
    assert train_tokenizer(CORPUS, 300).fingerprint != TOKENIZER.fingerprint
