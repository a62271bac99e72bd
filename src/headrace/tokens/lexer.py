"""Ids to text and tags, bit by bit: what parsers of completions read.

A tag is either one id, or a literal in the text (`<function_calls>` in a vocabulary that has no
such token). Text that may be the beginning of a literal tag, and bytes that may be the beginning of
a character, are held back, so the lexemes do not depend on how ids are cut into feeds.
"""

import re
from collections.abc import Mapping, Sequence

from headrace.tokens.calls import Lexeme
from headrace.tokens.detokenise import Detokeniser, TokenBytes


class Tags:
    """The tags of one format over one tokenizer.

    Args:
        token_bytes: of the tokenizer.
        atoms: literal of each id that is a tag.
        literals: tags that stand in the text; each begins with the only "<" in it.
    """

    def __init__(
        self, token_bytes: TokenBytes, atoms: Mapping[int, str], literals: Sequence[str] = ()
    ) -> None:
        self.token_bytes = token_bytes
        self.atoms = dict(atoms)
        self.pattern = re.compile("|".join(map(re.escape, literals)) or r"(?!)")
        self.beginnings = frozenset(tag[:end] for tag in literals for end in range(1, len(tag)))
        self.longest = max(map(len, literals), default=0)


class Lexer:
    """Lexemes of one completion. Texts between two tags may come in several pieces."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._detokeniser = Detokeniser(tags.token_bytes)
        self._held = ""
        self._read = 0

    def feed(self, ids: Sequence[int]) -> list[Lexeme]:
        """What is certain after these ids."""
        lexemes: list[Lexeme] = []
        atoms, run = self._tags.atoms, []
        for at, token in enumerate(ids, start=self._read):
            if token in atoms:
                self._add(self._detokeniser.feed(run) + self._detokeniser.flush(), lexemes)
                self._release(lexemes)
                lexemes.append(Lexeme(atoms[token], True, at))
                run = []
            else:
                run.append(token)
        self._read += len(ids)
        self._add(self._detokeniser.feed(run), lexemes)
        return lexemes

    def finish(self) -> list[Lexeme]:
        """What was held back."""
        lexemes: list[Lexeme] = []
        self._add(self._detokeniser.flush(), lexemes)
        self._release(lexemes)
        return lexemes

    def _add(self, text: str, lexemes: list[Lexeme]) -> None:
        text = self._held + text
        self._held = ""
        at = 0
        for tag in self._tags.pattern.finditer(text):
            if tag.start() > at:
                lexemes.append(Lexeme(text[at : tag.start()], False))
            lexemes.append(Lexeme(tag.group(), True))
            at = tag.end()
        start = text.rfind("<", max(at, len(text) - self._tags.longest + 1))
        if start >= 0 and text[start:] in self._tags.beginnings:
            self._held, text = text[start:], text[:start]
        if len(text) > at:
            lexemes.append(Lexeme(text[at:], False))

    def _release(self, lexemes: list[Lexeme]) -> None:
        if self._held:
            lexemes.append(Lexeme(self._held, False))
            self._held = ""
