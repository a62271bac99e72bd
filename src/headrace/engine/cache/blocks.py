"""Numbers of cache blocks and how many hold each of them; no memory, no tokens.

A block is room for `block_tokens` consecutive tokens of one sequence in all layers. Sequences hold
the blocks of their tables, a prefix tree keeps those worth finding again. A block that only the
tree keeps is idle: it can be had at any time by making the tree forget it.
"""

from collections.abc import Sequence


class BlockPool:
    """Reference counts of `blocks` blocks.

    Attributes:
        blocks: how many there are, numbered from 0.
        block_tokens: tokens in one.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(
                f"a pool of {blocks} blocks of {block_tokens} tokens holds nothing; "
                "both must be >= 1"
            )
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        self._kept = bytearray(blocks)
        # In the order in which they became idle: a dict keeps it and forgets any entry at once.
        self._idle: dict[int, None] = {}

    @property
    def free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Blocks held by the prefix tree alone."""
        return len(self._idle)

    def references(self, block: int) -> int:
        """How many hold the block, the prefix tree included."""
        return self._references[block]

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` free blocks, one reference each; None, and nothing taken, if there are fewer."""
        if n > len(self._free):
            return None
        first = len(self._free) - n
        # Those that lie side by side, in order: neighbours can be read as one piece.
        taken = sorted(self._free[first:])
        del self._free[first:]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference on each.

        Raises:
            ValueError: one of them is free; those before it keep their new reference.
        """
        references = self._references
        for block in blocks:
            if block < 0 or not references[block]:
                raise ValueError(f"block {block} is free; only a held block can be shared")
            references[block] += 1
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each; a block without any is free.

        Blocks of one sequence are given in its order: the later ones become idle first, so that a
        prefix always outlives what follows it.

        Raises:
            ValueError: one of them has no reference left to give up; those behind it were released.
        """
        references = self._references
        for block in reversed(blocks):
            # The tree's own reference is given up by `drop` alone.
            if block < 0 or references[block] <= self._kept[block]:
                raise ValueError(f"block {block} is released more often than it was taken")
            references[block] -= 1
            if not references[block]:
                self._free.append(block)
            elif references[block] == 1 and self._kept[block]:
                self._idle[block] = None

    # -- the prefix tree's side -----------------------------------------------------------------

    def keep(self, block: int) -> None:
        """The prefix tree's reference on a block that a sequence holds.

        Raises:
            ValueError: the block is free or kept already.
        """
        if self._kept[block]:
            raise ValueError(f"block {block} is kept already")
        self.share((block,))
        self._kept[block] = 1

    def drop(self, block: int) -> None:
        """Give up the prefix tree's reference.

        Raises:
            ValueError: the block is not kept.
        """
        if not self._kept[block]:
            raise ValueError(f"block {block} is not kept")
        self._kept[block] = 0
        self._idle.pop(block, None)
        self.release((block,))

    def touch(self, block: int) -> None:
        """An idle block was useful just now; it becomes the last to give way."""
        if block in self._idle:
            del self._idle[block]
            self._idle[block] = None

    def oldest_idle(self) -> int | None:
        """The block that has been idle longest."""
        return next(iter(self._idle), None)
