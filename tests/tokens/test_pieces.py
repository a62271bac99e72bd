"""What tokens spell, put together, is what decoding them gives."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.errors import UserError
from headrace.tokens.detokenise import TokenBytes
from headrace.tokens.pieces import token_pieces
from headrace.tokens.tokenizer import TextTokenizer, load_tokenizer
from headrace.tokens.training import train_tokenizer

TEXTS = [
    "the naïve café — 12 ☕ cups",
    "日本語 text\twith\nbreaks",
    "the cat and the hat " * 3,
] * 10


def byte_level() -> Tokenizer:
    """As GPT-2's, with tokens added in several ways."""
    tokenizer = train_tokenizer(TEXTS, 330)._tokenizer
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("ümlaut")])
    tokenizer.add_special_tokens(["<|tool ▁|>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2's and Gemma's: blanks as U+2581, unknown characters as tokens of single bytes."""
    trainer = trainers.BpeTrainer(
        vocab_size=400,  # type: ignore[call-arg]  # stubs lack the parameters
        special_tokens=["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator(TEXTS, trainer)
    spec = json.loads(tokenizer.to_str())
    # Byte tokens belong to the vocabulary alone, as in the models' files.
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path) -> list[bytes]:
    tokenizer.save(str(folder / "tokenizer.json"))
    return token_pieces(folder)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_pieces_of_any_text_are_its_bytes(make, tmp_path: Path) -> None:
    tokenizer = make()
    pieces = saved(tokenizer, tmp_path)
    assert len(pieces) == 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.text(max_size=40))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert b"".join(pieces[i] for i in ids).decode() == decoded

    check()


def test_pieces_of_any_ids_are_what_they_decode_to(tmp_path: Path) -> None:
    tokenizer = byte_level()
    pieces = saved(tokenizer, tmp_path)

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, len(pieces) - 1), max_size=30))
    def check(ids: list[int]) -> None:
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        # Bytes that are no text are replaced by whoever decodes.
        assert b"".join(pieces[i] for i in ids).decode(errors="replace") == decoded

    check()


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_readers_of_streams_see_the_same_bytes(make, tmp_path: Path) -> None:
    pieces = saved(make(), tmp_path)
    token_bytes = TokenBytes(load_tokenizer(tmp_path))
    assert [token_bytes.of(i) for i in range(len(pieces))] == pieces
    assert token_bytes.of(len(pieces)) == token_bytes.of(-1) == token_bytes.of(1 << 40) == b""


def test_readers_of_streams_take_any_decoder() -> None:
    tokenizer = sentencepiece()
    for decoder in (None, decoders.WordPiece(), decoders.Replace(Regex("a+"), "b")):
        tokenizer.decoder = decoder  # type: ignore[assignment]  # None takes it off
        token_bytes = TokenBytes(TextTokenizer(tokenizer))
        ids = tokenizer.encode("the na\u00efve \u2615", add_special_tokens=False).ids
        assert b"".join(map(token_bytes.of, ids)).decode() == "the na\u00efve \u2615"


def test_a_blank_that_only_begins_a_text_stays(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    for decoder in (
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),  # type: ignore[call-arg]  # stubs lack the parameters
            ]
        ),
        decoders.Metaspace(),
    ):
        tokenizer.decoder = decoder
        pieces = saved(tokenizer, tmp_path)
        ids = tokenizer.encode(" the cat", add_special_tokens=False).ids
        assert b"".join(pieces[i] for i in ids) == b" the cat"
        assert tokenizer.decode(ids) == "the cat"


def test_ids_without_a_token_spell_nothing(tmp_path: Path) -> None:
    spec = json.loads(byte_level().to_str())
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 1000, "content": "<far>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    pieces = token_pieces(tmp_path)
    assert (len(pieces), pieces[1000], pieces[999]) == (1001, b"<far>", b"")


def test_what_is_not_understood_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        token_pieces(tmp_path)
    spec = json.loads(byte_level().to_str())
    for changes, problem in (
        ({"decoder": {"type": "WordPiece", "prefix": "##"}}, "its decoder is WordPiece"),
        ({"decoder": None}, "its decoder is None"),
        ({"model": {"vocab": {"a": 1 << 40}}}, "token 'a' has the id"),
        ({"model": None}, "cannot be told"),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**spec, **changes}))
        with pytest.raises(UserError, match=problem):
            token_pieces(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[1")
    with pytest.raises(UserError, match="cannot be told"):
        token_pieces(tmp_path)
