"""A tokenizer directory as an object: encode, decode, special tokens, load and save.

`TextTokenizer` adapts `tokenizers.Tokenizer` to what renderers need, without transformers. It keeps
two encoders apart: `encode_text` for text of unknown origin, in which `<|user|>` is eight ordinary
characters, and `encode` for template text, in which it is one token.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.errors import UserError

_SHIELD = "\ufdd0"
"""Unicode noncharacter that stands before a shielded special token; doubled, it is itself."""

_LARGEST_ID = 2**32
"""Ids are unsigned 32-bit numbers to tokenizers."""

_CACHED_TEXTS = 4096
_CACHED_CHARACTERS = 1000


class TextTokenizer:
    """A `tokenizers.Tokenizer` with the surface that chat renderers use.

    Satisfies the `renderers.Tokenizer` protocol.

    Attributes:
        name_or_path: where it came from, for messages.
        eos_token_id: end-of-text id, or None.
        unk_token_id: unknown-token id, or None (byte-level BPE has none).
        config: content of tokenizer_config.json, possibly empty.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, name_or_path: str = "", config: dict[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name_or_path
        self.config = config or {}
        self.special_ids: dict[str, int] = {
            token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()
        }
        """Every token that is matched as a whole in template text, by its literal."""
        self.eos_token_id = self._configured_id("eos_token")
        self.unk_token_id = self._configured_id("unk_token")
        literals = sorted(self.special_ids, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, literals)) or r"(?!)")

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the caches, which cannot be pickled."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_plain", "_encoded")}

    def _configured_id(self, field: str) -> int | None:
        token = self.config.get(field)
        if isinstance(token, dict):
            token = token.get("content")
        return self.token_id(token) if isinstance(token, str) else None

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same model without special tokens: no text can reach their ids through it."""
        spec = json.loads(self._tokenizer.to_str())
        spec["added_tokens"] = []
        spec["post_processor"] = None
        spec["truncation"] = None
        spec["padding"] = None
        return Tokenizer.from_str(json.dumps(spec))

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included: one more than the largest id."""
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        return largest + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the vocabulary, the merges and how text is split: equal ones encode alike."""
        spec = self._tokenizer.to_str().encode()
        return hashlib.blake2b(spec, digest_size=16).hexdigest()

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's own jinja chat template, if it has one."""
        template = self.config.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        return template if isinstance(template, str) else None

    @cached_property
    def decoder(self) -> dict[str, Any] | None:
        """What makes text of tokens, as tokenizer.json describes it."""
        return json.loads(self._tokenizer.to_str()).get("decoder")

    def vocabulary_entry(self, token: int) -> str | None:
        """The entry of an id as the vocabulary spells it, or None for ids outside of it."""
        if not 0 <= token < _LARGEST_ID:
            return None
        return self._tokenizer.id_to_token(token)

    def token_id(self, token: str) -> int | None:
        """Id of one vocabulary entry, or None."""
        return self._tokenizer.token_to_id(token)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Id of a token, or list of ids of a list; the unknown id where there is none."""
        if isinstance(tokens, str):
            found = self.token_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text` read as plain text: never a special token, whatever it contains."""
        if not text:
            return []
        if len(text) > _CACHED_CHARACTERS:
            return self._plain.encode(text, add_special_tokens=False).ids
        return list(self._encoded(text))

    @cached_property
    def _encoded(self) -> Callable[[str], tuple[int, ...]]:
        """Ids of short texts, kept: a conversation is rendered again at each of its turns."""
        plain = self._plain

        @lru_cache(maxsize=_CACHED_TEXTS)
        def encode(text: str) -> tuple[int, ...]:
            return tuple(plain.encode(text, add_special_tokens=False).ids)

        return encode

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_text` of many texts at once, on all cores that tokenizers may use."""
        encoded = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_with_ranges(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `encode_text` and the [start, end) characters of `text` each one stands for.

        Tokens that share one character's bytes all name that character.
        """
        if not text:
            return [], []
        encoding = self._plain.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Ids of template `text`: special tokens in it become their ids, shielded ones do not.

        Further arguments are accepted for the renderers protocol; no BOS or EOS is ever added.
        """
        ids: list[int] = []
        start = 0
        for match in self._special_pattern.finditer(text):
            before = text[start : match.start()]
            if (len(before) - len(before.rstrip(_SHIELD))) % 2:
                continue  # an odd shield belongs to this literal, pairs are ordinary text
            ids += self.encode_text(_unshield(before))
            ids.append(self.special_ids[match.group()])
            start = match.end()
        return ids + self.encode_text(_unshield(text[start:]))

    def shield(self, text: str) -> str:
        """Mark `text` so that `encode` reads the special tokens in it as plain characters."""
        if _SHIELD in text:
            text = text.replace(_SHIELD, _SHIELD * 2)
        return self._special_pattern.sub(lambda match: _SHIELD + match.group(), text)

    def decode(self, token_ids: Sequence[int] | int, *_: Any, **options: Any) -> str:
        """Text of ids, special tokens as their literals unless `skip_special_tokens=True`.

        Total: bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing.
        """
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        skip = bool(options.get("skip_special_tokens", False))
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=skip)
        except OverflowError:
            known = [i for i in ids if 0 <= i < _LARGEST_ID]
            return self._tokenizer.decode(known, skip_special_tokens=skip)

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id decoded on its own, for people."""
        return [self.decode([i]) for i in ids]

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja.

        transformers' AutoTokenizer loads the result.
        """
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(target / "tokenizer.json"))
        config = {key: value for key, value in self.config.items() if key != "chat_template"}
        (target / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        if self.chat_template is not None:
            (target / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


def _unshield(text: str) -> str:
    if _SHIELD not in text:
        return text
    return re.sub(f"{_SHIELD}(.)", r"\1", text, flags=re.DOTALL)


def load_tokenizer(directory: str | Path) -> TextTokenizer:
    """Load the tokenizer of a checkpoint directory (tokenizer.json and its companions).

    Raises:
        UserError: the directory or tokenizer.json is missing or unreadable.
    """
    path = Path(directory)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"tokenizer {str(path)!r}: no tokenizer.json there; give a checkpoint directory"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception for every malformed file
        raise UserError(
            f"tokenizer {str(file)!r}: cannot be read ({str(error).splitlines()[0]}); "
            "replace it with a valid tokenizer.json"
        ) from error
    config = _read_config(path / "tokenizer_config.json")
    template = path / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return TextTokenizer(tokenizer, name_or_path=str(path), config=config)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"tokenizer {str(path)!r}: not valid JSON ({error}); replace it") from error
    if not isinstance(config, dict):
        raise UserError(f"tokenizer {str(path)!r}: not a JSON object; replace it")
    return config
