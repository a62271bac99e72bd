"""Which token sequences the cache blocks hold: a radix tree over token ids, one block per node.

It finds the longest held prefix of a new prompt, to the token, and forgets the least recently used
blocks when room is needed. All of it belongs to one weight version (law L8). Sequences hold their
own references; the tree keeps one on every block it knows.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.engine.cache.blocks import BlockPool

_ID_BYTES = 4


class Match(NamedTuple):
    """What the tree holds of a prompt. The caller owns one reference on every block named.

    Attributes:
        blocks: whole blocks, in order.
        partial: one more block that begins with the next tokens of the prompt but goes on
            differently: to be copied, then released. None if there is none.
        partial_tokens: tokens of `partial` that match, fewer than a block has.
        tokens: len(blocks) * block_tokens + partial_tokens.
    """

    blocks: list[int]
    partial: int | None
    partial_tokens: int
    tokens: int


class _Node:
    """One block's tokens behind those of its ancestors.

    `keys` are the children's tokens as bytes, sorted, none a prefix of another: whoever shares most
    with a given key is then a neighbour of the place where the key would be inserted.
    """

    __slots__ = ("block", "children", "key", "keys", "parent")

    def __init__(self, parent: "_Node | None", key: bytes, block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[bytes, _Node] = {}
        self.keys: list[bytes] = []


class PrefixTree:
    """The held prefixes under one weight version.

    Attributes:
        version: of the weights that computed every block.
        evicted: blocks forgotten for want of room, since the start.

    Args:
        pool: whose blocks are meant.
        version: see above.
    """

    def __init__(self, pool: BlockPool, version: int = 0) -> None:
        self.version = version
        self.evicted = 0
        self._pool = pool
        self._width = pool.block_tokens * _ID_BYTES
        self._root = _Node(None, b"", -1)
        self._by_block: dict[int, _Node] = {}

    @property
    def held(self) -> int:
        """Blocks the tree references."""
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def match(self, ids: npt.NDArray[np.int32], limit: int) -> Match:
        """The longest held prefix of ids[:limit], with a reference on its blocks for the caller."""
        blocks, partial, tokens = self._find(ids, limit)
        found = blocks if partial is None else [*blocks, partial]
        self._pool.share(found)
        return Match(blocks, partial, tokens - len(blocks) * self._pool.block_tokens, tokens)

    def peek(self, ids: npt.NDArray[np.int32], limit: int) -> int:
        """Length of the longest held prefix of ids[:limit]; nothing is referenced or refreshed."""
        return self._find(ids, limit)[2]

    def _find(self, ids: npt.NDArray[np.int32], limit: int) -> tuple[list[int], int | None, int]:
        """(whole blocks, partly matching block, tokens matched)."""
        data, width = _as_bytes(ids[:limit]), self._width
        node, blocks, at = self._root, [], 0
        while at + width <= len(data):
            child = node.children.get(data[at : at + width])
            if child is None:
                break
            blocks.append(child.block)
            node, at = child, at + width
        key = data[at : at + width]
        tokens = len(blocks) * self._pool.block_tokens
        near = bisect_left(node.keys, key)
        best, shared = None, 0
        for neighbour in node.keys[max(near - 1, 0) : near + 1]:
            common = _common_ids(key, neighbour)
            if common > shared:
                best, shared = node.children[neighbour].block, common
        return blocks, best, tokens + shared

    def insert(
        self, ids: npt.NDArray[np.int32], blocks: Sequence[int], *, in_use: bool = False
    ) -> None:
        """Keep a sequence's computed tokens; blocks not held yet get a reference of the tree's.

        Args:
            ids: [n] tokens whose keys and values are in the blocks.
            blocks: ceil(n / block_tokens) of them, held by the caller, who never again writes
                into them.
            in_use: the caller goes on holding its blocks. Where the tree has another copy of one,
                nothing behind is kept: what stands before a held block must be held too, or
                idle blocks could not be evicted.

        Raises:
            ValueError: the number of blocks does not fit the number of tokens.
        """
        if len(blocks) != -(-len(ids) // self._pool.block_tokens):
            raise ValueError(
                f"{len(ids)} tokens do not fill {len(blocks)} blocks of {self._pool.block_tokens}"
            )
        data, width = _as_bytes(ids), self._width
        node, copies = self._root, []
        for i, block in enumerate(blocks):
            key = data[i * width : (i + 1) * width]
            child = node.children.get(key)
            if child is None:
                if copies and self._pool.references(block) > 1:
                    # Another sequence holds it, and not what would stand before it here.
                    break
                child = self._add(node, key, block)
            if child.block != block:
                if in_use:
                    break
                copies.append(child.block)
            node = child
        for block in reversed(copies):
            self._pool.touch(block)

    def _add(self, parent: _Node, key: bytes, block: int) -> _Node:
        """The child of that key, or the longer one that covers it."""
        at = bisect_left(parent.keys, key)
        if at < len(parent.keys) and parent.keys[at].startswith(key):
            return parent.children[parent.keys[at]]
        if at and key.startswith(parent.keys[at - 1]):
            # A partly filled block that this one continues: of no more use.
            self._remove(parent.children[parent.keys[at - 1]])
        self._pool.keep(block)
        child = _Node(parent, key, block)
        parent.children[key] = child
        insort(parent.keys, key)
        self._by_block[block] = child
        return child

    def _remove(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        del parent.keys[bisect_left(parent.keys, leaf.key)]
        del self._by_block[leaf.block]
        self._pool.drop(leaf.block)

    def evict(self, n: int) -> int:
        """Forget the least recently used blocks nobody else holds until `n` became free.

        Returns:
            How many became free.
        """
        freed = passed = 0
        while freed < n and (block := self._pool.oldest_idle()) is not None:
            node = self._by_block[block]
            if not node.children:
                self._remove(node)
                freed, passed = freed + 1, 0
                continue
            # A sequence that computed the same tokens itself was added behind this block, so it
            # became idle before its children: put it behind them.
            self._pool.touch(block)
            passed += 1
            if passed > self._pool.idle:
                break
        self.evicted += freed
        return freed

    def forget(self, ids: npt.NDArray[np.int32], start: int) -> None:
        """Drop the blocks along `ids` from the one that position `start` lies in, and all behind.

        For keys and values that turned out to be worthless (not finite).
        """
        data, width = _as_bytes(ids), self._width
        node, first = self._root, start // self._pool.block_tokens
        for i in range(first + 1):
            child = node.children.get(data[i * width : (i + 1) * width])
            if child is None:
                return
            node = child
        branch = [node]
        for node in branch:
            branch.extend(node.children.values())
        for node in reversed(branch):
            self._remove(node)

    def reset(self, version: int) -> None:
        """Forget everything: from here on the blocks are computed by weights `version`."""
        for block in self._by_block:
            self._pool.drop(block)
        self._by_block = {}
        self._root = _Node(None, b"", -1)
        self.version = version


def _as_bytes(ids: npt.NDArray[np.int32]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


def _common_ids(a: bytes, b: bytes) -> int:
    """Leading token ids that both have."""
    end = min(len(a), len(b))
    for at in range(0, end, _ID_BYTES):
        if a[at : at + _ID_BYTES] != b[at : at + _ID_BYTES]:
            return at // _ID_BYTES
    return end // _ID_BYTES
