"""Which earlier prompt a prompt continues: what routes requests that name no session.

A client of a plain model server sends its whole conversation every time and says nothing of it. Its
next prompt begins with the one before, so whoever remembers the ends of recent prompts knows which
replica holds its keys and values. Pure bookkeeping over token ids; collisions cost a prefill, never
a wrong token.
"""

import array
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

BLOCK = 32
"""Tokens between two places where a prompt may be found to continue another one."""


class PromptAffinity:
    """The conversations that recent prompts belong to.

    Args:
        most: prompts remembered; those not continued for longest are forgotten first.
        on_forget: told the name of a conversation that was forgotten.

    Raises:
        ValueError: `most` is below 1.
    """

    def __init__(self, most: int, on_forget: Callable[[str], None]) -> None:
        if most < 1:
            raise ValueError(f"PromptAffinity: most is {most}; it must be at least 1")
        self._most = most
        self._on_forget = on_forget
        # By the hash of a prompt's whole blocks; each conversation is here once.
        self._names: OrderedDict[bytes, str] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._names)

    def conversation(self, prompt_ids: Sequence[int]) -> str:
        """The conversation whose last prompt this one begins with (its whole blocks), or a new one.

        | prompts, in blocks | conversation |
        |--------------------|--------------|
        | A B                | 0            |
        | A B C D            | 0            |
        | A E                | 1            |
        | A B C D            | 0            |

        Prompts of less than a block share too little to be kept together: each is a new one.
        """
        ends = list(_hashes(prompt_ids))
        name = None
        for end in reversed(ends):
            name = self._names.pop(end, None)
            if name is not None:
                break
        if name is None:
            name = f"conversation-{next(self._numbers)}"
        # A prompt of no whole block is remembered under a key that no other can have.
        self._names[ends[-1] if ends else name.encode()] = name
        while len(self._names) > self._most:
            self._on_forget(self._names.popitem(last=False)[1])
        return name


def _hashes(ids: Sequence[int]) -> Iterator[bytes]:
    """Of the first block, the first two, and so on."""
    sofar = hashlib.blake2b(digest_size=16)
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        try:
            sofar.update(array.array("q", ids[end - BLOCK : end]).tobytes())
        except OverflowError:
            return  # no id of any vocabulary: the engine will say so
        yield sofar.digest()
