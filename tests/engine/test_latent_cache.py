"""The latent cache against attention written out per sequence, with tensors of no model."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from headrace.engine import latent_cache
from headrace.engine.latent_cache import LatentCache
from headrace.model.attention import IndexQuery, LatentQuery

torch.set_num_threads(1)

HEADS, NOPE, ROPE, LATENT, VALUE = 3, 4, 2, 6, 5
INDEX_HEADS, INDEX_DIM, TOPK = 2, 4, 5
LAYERS, SHARED, LENGTH = 3, 1, 24
SCALE = 0.4
W_UK = torch.randn(HEADS, NOPE, LATENT, generator=torch.Generator().manual_seed(1))
W_UV = torch.randn(HEADS, VALUE, LATENT, generator=torch.Generator().manual_seed(2))


@dataclass
class Tokens:
    """Random attention inputs of `count` tokens of one sequence in every layer."""

    seed: int
    count: int = LENGTH
    parts: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        widths = {
            "q_nope": (HEADS, NOPE),
            "q_rope": (HEADS, ROPE),
            "latent": (LATENT,),
            "k_rope": (ROPE,),
            "index_q": (INDEX_HEADS, INDEX_DIM),
            "index_k": (INDEX_DIM,),
            "index_weights": (INDEX_HEADS,),
        }
        self.parts = {
            name: torch.randn(LAYERS, self.count, *width, generator=generator)
            for name, width in widths.items()
        }
        # Few distinct values, so that scores tie and plateau at zero.
        for name in ("index_q", "index_k", "index_weights"):
            self.parts[name] = self.parts[name].round()


def query(layer: int, rows: list[dict[str, Tensor]], *, indexed: bool) -> LatentQuery:
    """The query of one layer from the parts [T, ...] of each row."""
    part = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    own = indexed and layer != SHARED
    return LatentQuery(
        q_nope=part["q_nope"],
        q_rope=part["q_rope"],
        latent=part["latent"],
        k_rope=part["k_rope"],
        w_uk=W_UK,
        w_uv=W_UV,
        scale=SCALE,
        index=IndexQuery(part["index_q"], part["index_k"], part["index_weights"]) if own else None,
        shares=indexed and not own,
        topk=TOPK if indexed else None,
    )


def chosen(tokens: Tokens, layer: int, at: int) -> list[int]:
    """The positions that token `at` attends to, by sorting (score, position) pairs."""
    layer = 0 if layer == SHARED else layer
    q = tokens.parts["index_q"][layer, at]
    scores = [
        float((tokens.parts["index_weights"][layer, at] * (q @ key).relu()).sum())
        for key in tokens.parts["index_k"][layer, : at + 1]
    ]
    return sorted(sorted(range(at + 1), key=lambda j: (-scores[j], j))[:TOPK])


def expected(tokens: Tokens, layer: int, at: int, *, indexed: bool) -> Tensor:
    """[H, dv] for one token, keys and values written out per head."""
    seen = chosen(tokens, layer, at) if indexed else list(range(at + 1))
    latent = tokens.parts["latent"][layer, seen]
    keys = torch.cat(
        (
            torch.einsum("tr,hdr->htd", latent, W_UK),
            tokens.parts["k_rope"][layer, seen].expand(HEADS, -1, -1),
        ),
        -1,
    )
    q = torch.cat((tokens.parts["q_nope"][layer, at], tokens.parts["q_rope"][layer, at]), -1)
    weights = (torch.einsum("hd,htd->ht", q, keys) * SCALE).softmax(-1)
    return torch.einsum("ht,tr,hdr->hd", weights, latent, W_UV)


class Sequences:
    """Drives a cache as the engine does and checks every output against `expected`."""

    def __init__(self, *, slots: int, indexed: bool) -> None:
        self.indexed = indexed
        self.cache = LatentCache(
            layers=LAYERS,
            latent_dim=LATENT,
            rope_dim=ROPE,
            index_dim=INDEX_DIM if indexed else 0,
            index_layers=[layer for layer in range(LAYERS) if layer != SHARED] if indexed else [],
            slots=slots,
            length=LENGTH,
            dtype=torch.float32,
        )
        self.tokens = [Tokens(seed) for seed in range(slots)]
        self.held = [0] * slots

    def extend(self, first: int, counts: list[int], *, width: int | None = None) -> None:
        width = width or max(counts)
        slots = range(first, first + len(counts))
        starts = torch.tensor([self.held[slot] for slot in slots])
        positions = starts[:, None] + torch.arange(width)
        self.cache.begin_extend(first, positions, counts, fresh=not starts.any())
        self._pass(slots, counts, width)

    def decode(self, count: int) -> None:
        positions = torch.tensor(self.held[:count])[:, None]
        self.cache.begin_decode(positions, max(self.held[:count]) + 1)
        self._pass(range(count), [1] * count, 1)

    def _pass(self, slots: range, counts: list[int], width: int) -> None:
        for layer in range(LAYERS):
            rows = []
            for slot, count in zip(slots, counts, strict=True):
                start = self.held[slot]
                window = slice(start, start + count)
                parts = {n: p[layer, window] for n, p in self.tokens[slot].parts.items()}
                # Padding holds numbers that must never matter.
                rows.append(
                    {
                        n: torch.cat((p, p.new_full((width - count, *p.shape[1:]), 1e3)))
                        for n, p in parts.items()
                    }
                )
            got = self.cache.attend_latent(layer, query(layer, rows, indexed=self.indexed))
            for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                for i in range(count):
                    at = self.held[slot] + i
                    want = expected(self.tokens[slot], layer, at, indexed=self.indexed)
                    assert torch.allclose(got[row, i], want, atol=1e-5), (layer, slot, at)
        for slot, count in zip(slots, counts, strict=True):
            self.held[slot] += count

    def swap(self, a: int, b: int) -> None:
        self.cache.swap(a, b, self.held[a], self.held[b])
        self.tokens[a], self.tokens[b] = self.tokens[b], self.tokens[a]
        self.held[a], self.held[b] = self.held[b], self.held[a]

    def copy(self, source: int, target: int, length: int) -> None:
        """Slot `target` goes on from the first `length` tokens of `source` on its own."""
        self.cache.copy(source, target, length)
        for name, own in self.tokens[target].parts.items():
            own[:, :length] = self.tokens[source].parts[name][:, :length]
        self.held[target] = length


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("expanding", [True, False])
def test_chunks_decoding_copies_and_swaps_equal_brute_force(
    indexed: bool, expanding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentCache, "_expanding_pays", lambda *_: expanding)
    run = Sequences(slots=4, indexed=indexed)
    run.extend(0, [3, 1, 4])
    run.decode(3)
    run.extend(1, [4, 2], width=6)
    run.decode(2)
    run.swap(0, 2)
    run.decode(3)
    run.copy(1, 3, 4)
    run.extend(2, [7, 9])
    run.swap(0, 3)
    run.decode(4)
    # Padding of the longest slot runs past its last position.
    run.extend(3, [LENGTH - run.held[3]], width=30)
    run.extend(0, [LENGTH - run.held[0]])


@pytest.mark.parametrize("indexed", [True, False])
def test_a_pass_of_real_weights_chooses_either_form(indexed: bool) -> None:
    """Without the patch above: a fresh prefill expands, a chunk behind a long prefix absorbs."""
    run = Sequences(slots=2, indexed=indexed)
    run.extend(0, [12, 9])
    run.extend(0, [1, 1])


def test_the_cheaper_form_depends_on_how_much_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Sequences(slots=1, indexed=False)
    pays = []
    original = LatentCache._expanding_pays

    def spy(cache: LatentCache, query: LatentQuery) -> bool:
        pays.append(original(cache, query))
        return pays[-1]

    monkeypatch.setattr(LatentCache, "_expanding_pays", spy)
    run.extend(0, [20])
    run.extend(0, [1])
    assert pays == [True] * LAYERS + [False] * LAYERS
    monkeypatch.setattr(latent_cache, "_EXPANDED_ELEMENTS", 10)
    other = Sequences(slots=1, indexed=False)
    other.extend(0, [20])
    assert pays[2 * LAYERS :] == [False] * LAYERS


def test_selection_does_not_depend_on_neighbours_chunks_or_slots() -> None:
    """Bit for bit, with scores that tie."""

    def selections(first: int, neighbours: int, chunk: int) -> list[list[int]]:
        """Per token of slot `first`, while it is fed in chunks beside others."""
        run = Sequences(slots=6, indexed=True)
        run.tokens[first] = Tokens(99)
        collected: list[list[int]] = []
        for start in range(0, LENGTH, chunk):
            counts = [min(chunk, LENGTH - start)] * (1 + neighbours)
            run.extend(first, counts)
            if run.cache.selection is None:
                collected += [list(range(at + 1)) for at in range(start, start + counts[0])]
            else:
                mine = run.cache.selection[: counts[0]].tolist()
                collected += [[row for row in rows if row >= 0] for rows in mine]
        return collected

    want = [chosen(Tokens(99), LAYERS - 1, at) for at in range(LENGTH)]
    assert len({tuple(row) for row in want}) > 2 * TOPK
    for first, neighbours, chunk in [(0, 0, LENGTH), (0, 0, 1), (0, 5, 3), (2, 3, 7), (5, 0, 11)]:
        assert selections(first, neighbours, chunk) == want, (first, neighbours, chunk)


def test_layers_that_share_need_a_selection_of_the_same_pass() -> None:
    run = Sequences(slots=1, indexed=True)
    at = TOPK + 2
    run.extend(0, [at])
    assert run.cache.selection is not None
    run.cache.begin_decode(torch.tensor([[at]]), at + 1)
    assert run.cache.selection is None
    row = {name: part[SHARED, at : at + 1] for name, part in run.tokens[0].parts.items()}
    with pytest.raises(ValueError, match="layer 1 shares"):
        run.cache.attend_latent(SHARED, query(SHARED, [row], indexed=True))


def test_cleared_slots_hold_zeros() -> None:
    run = Sequences(slots=2, indexed=True)
    run.extend(0, [4, 4])
    run.cache.clear(0)
    assert not run.cache.rows[:, 0].any()
    assert not run.cache.index_keys[:, 0].any()
    assert run.cache.rows[:, 1].any()
    assert run.cache.index_keys[:, 1].any()
