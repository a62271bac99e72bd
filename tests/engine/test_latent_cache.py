"""The latent cache against attention written out per sequence, with tensors of no model."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from headrace.engine.cache import latent as latent_cache
from headrace.engine.cache import paged as paged_cache
from headrace.engine.cache.latent import LatentCache
from headrace.engine.cache.paged import PagedBatch
from headrace.model.attention import IndexQuery, LatentQuery
from headrace.ops import Layout

torch.set_num_threads(1)

HEADS, NOPE, ROPE, LATENT, VALUE = 3, 4, 2, 6, 5
INDEX_HEADS, INDEX_DIM, TOPK = 2, 4, 5
LAYERS, SHARED, LENGTH = 3, 1, 24
BLOCK = 4
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
    """The query of one layer from the parts [T, ...] of each sequence."""
    part = {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}
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

    def __init__(self, *, count: int, indexed: bool) -> None:
        self.indexed = indexed
        each = -(-LENGTH // BLOCK)
        self.cache = LatentCache(
            layers=LAYERS,
            latent_dim=LATENT,
            rope_dim=ROPE,
            index_dim=INDEX_DIM if indexed else 0,
            index_layers=[layer for layer in range(LAYERS) if layer != SHARED] if indexed else [],
            blocks=count * each,
            block_tokens=BLOCK,
            dtype=torch.float32,
        )
        # What no sequence has written must never matter.
        self.cache.rows.fill_(torch.nan)
        self.cache.index_keys.fill_(torch.nan)
        scattered = torch.randperm(count * each, generator=torch.Generator().manual_seed(count))
        self.tables = scattered.view(count, each).to(torch.int32)
        self.tokens = [Tokens(seed) for seed in range(count)]
        self.held = [0] * count

    def feed(self, counts: dict[int, int]) -> None:
        """So many tokens of each of these sequences, in one pass."""
        which = list(counts)
        starts = [self.held[i] for i in which]
        longest = max(self.held[i] + n for i, n in counts.items())
        tables = self.tables[which, : -(-longest // BLOCK)].clone()
        for row, i in zip(tables, which, strict=True):
            row[-(-(self.held[i] + counts[i]) // BLOCK) :] = -1
        self.cache.begin(PagedBatch.of(starts, list(counts.values()), tables, BLOCK))
        for layer in range(LAYERS):
            rows = [
                {n: p[layer, start : start + counts[i]] for n, p in self.tokens[i].parts.items()}
                for i, start in zip(which, starts, strict=True)
            ]
            got = self.cache.attend_latent(layer, query(layer, rows, indexed=self.indexed))[0]
            places = [(i, self.held[i] + j) for i in which for j in range(counts[i])]
            assert len(got) == len(places)
            for out, (i, at) in zip(got, places, strict=True):
                want = expected(self.tokens[i], layer, at, indexed=self.indexed)
                assert torch.allclose(out, want, atol=1e-5), (layer, i, at)
        for i, n in counts.items():
            self.held[i] += n

    def copy(self, source: int, target: int, length: int) -> None:
        """Sequence `target` goes on from the first `length` tokens of `source` on its own."""
        whole = length // BLOCK
        # Whole blocks are shared, the last one is copied.
        self.tables[target, :whole] = self.tables[source, :whole]
        if length % BLOCK:
            of, to = (int(self.tables[i, whole]) for i in (source, target))
            self.cache.copy(of, to, length % BLOCK)
        for name, own in self.tokens[target].parts.items():
            own[:, :length] = self.tokens[source].parts[name][:, :length]
        self.held[target] = length


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("expanding", [True, False])
@pytest.mark.parametrize("few", [1, 3])
def test_chunks_decoding_and_copies_equal_brute_force(
    indexed: bool, expanding: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_cache, "_expanding_pays", lambda *_: expanding)
    monkeypatch.setattr(paged_cache, "_FEW_ROWS", few)
    run = Sequences(count=4, indexed=indexed)
    run.feed({0: 3, 1: 1, 2: 4})
    run.feed({0: 1, 1: 1, 2: 1})
    run.feed({2: 1, 0: 4, 1: 2})
    run.feed({1: 1, 2: 1})
    run.copy(2, 3, 6)
    run.feed({3: 1, 0: 7, 1: 9})
    run.feed({0: 1, 3: 3, 2: 5})
    run.feed({i: LENGTH - run.held[i] for i in range(4)})


@pytest.mark.parametrize("indexed", [True, False])
def test_a_pass_of_real_weights_chooses_either_form(indexed: bool) -> None:
    """Without the patch above: a fresh prompt expands, a piece behind a long prefix absorbs."""
    run = Sequences(count=2, indexed=indexed)
    run.feed({0: 12, 1: 9})
    run.feed({0: 2, 1: 1})


def test_the_cheaper_form_depends_on_how_much_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    pays = []
    original = latent_cache._expanding_pays

    def spy(query: LatentQuery, layout: Layout) -> bool:
        pays.append(original(query, layout))
        return pays[-1]

    monkeypatch.setattr(latent_cache, "_expanding_pays", spy)
    monkeypatch.setattr(paged_cache, "_FEW_ROWS", 1)
    run = Sequences(count=1, indexed=False)
    run.feed({0: 20})
    run.feed({0: 2})
    assert pays == [True] * LAYERS + [False] * LAYERS
    monkeypatch.setattr(latent_cache, "_EXPANDED_ELEMENTS", 10)
    other = Sequences(count=1, indexed=False)
    other.feed({0: 20})
    assert pays[2 * LAYERS :] == [False] * LAYERS


def test_selection_does_not_depend_on_neighbours_or_chunks() -> None:
    """Bit for bit, with scores that tie."""

    def selections(count: int, mine: int, chunk: int) -> list[list[int]]:
        """Per token of sequence `mine`, while it is fed in chunks beside others."""
        run = Sequences(count=count, indexed=True)
        run.tokens[mine] = Tokens(99)
        place = {
            int(block) * BLOCK + row: i * BLOCK + row
            for i, block in enumerate(run.tables[mine])
            for row in range(BLOCK)
        }
        collected: list[list[int]] = []
        for start in range(0, LENGTH, chunk):
            n = min(chunk, LENGTH - start)
            run.feed(dict.fromkeys(range(count), n))
            if run.cache.selection is None:
                collected += [list(range(at + 1)) for at in range(start, start + n)]
            else:
                rows = run.cache.selection[mine * n : (mine + 1) * n].tolist()
                collected += [[place[slot] for slot in row if slot >= 0] for row in rows]
        return collected

    want = [chosen(Tokens(99), LAYERS - 1, at) for at in range(LENGTH)]
    assert len({tuple(row) for row in want}) > 2 * TOPK
    for count, mine, chunk in [(1, 0, LENGTH), (1, 0, 1), (6, 0, 3), (6, 2, 7), (2, 1, 11)]:
        assert selections(count, mine, chunk) == want, (count, mine, chunk)


def test_layers_that_share_need_a_selection_of_the_same_pass() -> None:
    run = Sequences(count=1, indexed=True)
    at = TOPK + 2
    run.feed({0: at})
    assert run.cache.selection is not None
    run.cache.begin(PagedBatch.of([at], [1], run.tables, BLOCK))
    assert run.cache.selection is None
    row = {name: part[SHARED, at : at + 1] for name, part in run.tokens[0].parts.items()}
    with pytest.raises(ValueError, match="layer 1 shares"):
        run.cache.attend_latent(SHARED, query(SHARED, [row], indexed=True))
