"""The compiled step equals the decoder, to the bit where that is promised, and its absence changes
nothing but speed."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from engine_harness import (
    VOCAB,
    ask,
    drain,
    greedy_reference,
    latent_model,
    logprobs,
    new_core,
    output,
    random_prompt,
    tiny_model,
)
from torch import Tensor

from headrace import ops
from headrace.engine.cache.grouped import GroupedCache
from headrace.engine.cache.paged import PagedBatch, block_tables
from headrace.engine.compiled import CompiledStep, StepBatch, StepBuffers
from headrace.engine.core import EngineCore
from headrace.engine.packed_model import PackedProducts
from headrace.engine.plain_step import PlainStep
from headrace.engine.sequence import Chunk, Sequence
from headrace.model.decoder import Decoder
from headrace.ops.native import build
from headrace.ops.packed import KINDS, Kind

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(
    build.unavailable_reason() is not None, reason="no native library on this machine"
)

BLOCK, EACH = 8, 5
"""Tokens of a block, and blocks of a sequence."""

SHAPES = {
    "gqa": {},
    "mha, odd sizes": {"num_kv_heads": 4, "hidden_size": 44, "head_dim": 10, "vocab_size": 101},
    "common head": {"hidden_size": 96, "num_heads": 3, "num_kv_heads": 1, "head_dim": 32},
    "qk norm": {"qk_norm": True, "family": "qwen3"},
    "bias, untied": {"attention_bias": True, "tie_embeddings": False},
    "interleaved": {"rope_interleaved": True},
}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def varied_model(seed: int, dtype: torch.dtype, **shape: object) -> Decoder:
    """A model whose norms and biases are not the neutral ones of a new model."""
    torch.manual_seed(seed)
    model = tiny_model(seed, **shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.to(dtype).eval()


class Pair(NamedTuple):
    """A compiled step and its decoder, each with a cache of its own that holds the same."""

    model: Decoder
    products: PackedProducts | None
    step: CompiledStep
    mine: GroupedCache
    theirs: GroupedCache

    @classmethod
    def of(
        cls, model: Decoder, kind: Kind | None, sequences: int, block: int = BLOCK, each: int = EACH
    ) -> "Pair":
        shape = model.config
        mine, theirs = (
            GroupedCache(
                layers=shape.num_layers,
                kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                blocks=sequences * each,
                block_tokens=block,
                dtype=model.embed.weight.dtype,
            )
            for _ in range(2)
        )
        products = None if kind is None else PackedProducts(model, kind)
        step = CompiledStep.create(model, mine, block * each, products)
        assert step is not None
        theirs.keys.copy_(mine.keys.normal_())
        theirs.values.copy_(mine.values.normal_())
        return cls(model, products, step, mine, theirs)

    def logits(
        self, ids: Tensor, starts: list[int], tables: Tensor, counts: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of tokens of each sequence, one by default: compiled, and by the decoder."""
        counts = counts or [1] * len(starts)
        batch = PagedBatch.of(starts, counts, tables, self.mine.block_tokens)
        got = self.step(StepBatch.of(ids, starts, counts, tables))
        self.theirs.begin(batch)
        with ops.row_independent():
            hidden = self.model(ids[None], batch.positions[None], self.theirs)[0]
        products = self.products
        return got, self.model.logits(hidden) if products is None else products.logits(hidden)


def random_shape(rng: random.Random) -> dict[str, object]:
    kv_heads, qk_norm = rng.choice([1, 2, 3]), rng.random() < 0.4
    return {
        "hidden_size": rng.choice([40, 64, 100]),
        "intermediate_size": rng.choice([33, 80, 160]),
        "vocab_size": rng.choice([VOCAB, 64, 200]),
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * rng.choice([1, 2, 3, 5]),
        "head_dim": rng.choice([10, 16, 32, 48]),
        "qk_norm": qk_norm,
        "family": "qwen3" if qk_norm else "llama",
        "attention_bias": rng.random() < 0.5,
        "tie_embeddings": rng.random() < 0.5,
        "rope_interleaved": rng.random() < 0.5,
        "max_positions": 4400,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_bits_are_the_decoders_for_any_shape_batch_context_and_threads(
    kind: Kind, dtype: torch.dtype, seed: int
) -> None:
    rng = random.Random(f"{kind} {dtype} {seed}")
    shape = random_shape(rng)
    level = rng.choice(build.LEVELS) if seed == 0 else build.LEVELS[-1]
    with build.use_level(level), threads(1 + seed % 2):
        pair = Pair.of(varied_model(seed, dtype, **shape), kind, sequences=70)
        scattered = torch.randperm(70 * EACH).view(70, EACH).to(torch.int32)
        for n in (1, 70, rng.randint(2, 17), rng.randint(18, 69)):
            positions = [rng.randrange(BLOCK * EACH) for _ in range(n)]
            ids = torch.randint(0, pair.model.config.vocab_size, (n,))
            got, want = pair.logits(ids, positions, scattered[:n])
            assert torch.equal(got, want), (shape, level, n)
        # Prompts and pieces of them beside sequences that decode.
        counts = [rng.choice([1, 1, 1, 2, 7, BLOCK * EACH]) for _ in range(rng.randint(1, 9))]
        starts = [rng.randint(0, BLOCK * EACH - n) for n in counts]
        ids = torch.randint(0, pair.model.config.vocab_size, (sum(counts),))
        got, want = pair.logits(ids, starts, scattered[: len(counts)], counts)
        assert torch.equal(got, want), (shape, level, counts)
        assert torch.equal(pair.mine.keys, pair.theirs.keys), (shape, level)
        assert torch.equal(pair.mine.values, pair.theirs.values), (shape, level)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@torch.inference_mode()
def test_bits_are_the_decoders_in_contexts_of_several_spans(dtype: torch.dtype) -> None:
    model = varied_model(1, dtype, max_positions=4400)
    pair = Pair.of(model, "bfloat16", sequences=3, block=16, each=275)
    tables = torch.randperm(3 * 275).view(3, 275).to(torch.int32)
    for count in (1, 2):
        for positions in ([2047, 2048, 4399], [4096, 7, 2049]):
            with threads(count):
                got, want = pair.logits(torch.tensor([1, 2, 3]), positions, tables)
            assert torch.equal(got, want), (count, positions)


@torch.inference_mode()
def test_rows_of_several_blocks_of_a_product() -> None:
    """More rows than a product prepares at a time."""
    pair = Pair.of(varied_model(2, torch.bfloat16, intermediate_size=200), "bfloat16", 300)
    tables = torch.arange(300 * EACH, dtype=torch.int32).view(300, EACH)
    for count in (1, 2):
        with threads(count):
            got, want = pair.logits(torch.randint(0, VOCAB, (300,)), [5] * 300, tables)
        assert torch.equal(got, want)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@torch.inference_mode()
def test_without_packed_products_it_is_close_to_torch(shape: dict[str, object]) -> None:
    rows = 19
    model = varied_model(3, torch.float32, **shape)
    pair = Pair.of(model, None, rows)
    lengths = torch.arange(rows) % 17
    scattered = torch.randperm(rows * EACH).view(rows, EACH).to(torch.int32)
    for count in (rows, 16, 9, 8, 3, 2, 1):
        for _ in range(3):
            ids = torch.randint(0, model.config.vocab_size, (count,))
            got, want = pair.logits(ids, lengths[:count].tolist(), scattered[:count])
            assert torch.allclose(got.log_softmax(-1), want.log_softmax(-1), atol=1e-4)
            lengths[:count] += 1
    assert torch.allclose(pair.mine.keys, pair.theirs.keys, atol=1e-4)
    assert torch.allclose(pair.mine.values, pair.theirs.values, atol=1e-4)


@pytest.mark.parametrize("kind", [None, "float32"])
@torch.inference_mode()
def test_weights_changed_without_repacking_are_noticed_by_the_check(kind: Kind | None) -> None:
    model = varied_model(0, torch.float32, attention_bias=True)
    pair = Pair.of(model, kind, 2)
    most = 0.0 if kind else 1e-4

    def repack() -> None:
        pair.step.repack()
        if pair.products is not None:
            pair.products.repack()

    assert pair.step._error() <= most
    attention = model.layers[0].attention
    weight = attention.qkv.bias if kind else attention.output.weight  # type: ignore[union-attr]  # ModuleList is untyped
    weight.mul_(3.0)  # type: ignore[operator]  # likewise
    assert pair.step._error() > 1e-2
    repack()
    assert pair.step._error() <= most


@torch.inference_mode()
def test_what_does_not_exist_is_refused() -> None:
    pair = Pair.of(varied_model(0, torch.float32), None, 2)
    tables = torch.arange(2 * EACH, dtype=torch.int32).view(2, EACH)
    good = StepBatch.of(torch.tensor([1, 2, 3]), [3, 4], [1, 2], tables)
    for name, values in (
        *(("ids", (VOCAB, -1)), ("positions", (BLOCK * EACH, -1, 3)), ("owners", (0, 2, -1))),
        *(("starts", (BLOCK * EACH, -1, 2)), ("counts", (0, 1, 3)), ("tables", (2 * EACH, -1))),
        ("asked", (-1, 0, 3)),
    ):
        for value in values:
            bad = good._replace(**{name: getattr(good, name).clone()})
            getattr(bad, name)[1] = value
            with pytest.raises(IndexError):
                pair.step(bad)
    assert bool(pair.step(good).isfinite().all())


@torch.inference_mode()
def test_only_the_rows_asked_for_have_logits() -> None:
    pair = Pair.of(varied_model(0, torch.bfloat16), "bfloat16", 3)
    tables = torch.arange(3 * EACH, dtype=torch.int32).view(3, EACH)
    every = StepBatch.of(torch.randint(0, VOCAB, (12,)), [0, 2, 5], [7, 1, 4], tables)
    want = pair.step(every).clone()
    for rows in ([6, 7, 11], [0], [3, 11], []):
        for count in (1, 2):
            with threads(count):
                assert torch.equal(
                    pair.step(every._replace(asked=torch.tensor(rows).long())), want[rows]
                )


def test_no_compiler_leaves_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "unavailable_reason", lambda: "no C++ compiler found")
    model = tiny_model()
    core = new_core(model, deterministic=True)
    assert not core.compiled
    core.add(ask("r", random_prompt(0, 9)))
    assert output(drain(core)["r"]) == greedy_reference(model, random_prompt(0, 9), 8)


def test_other_models_and_other_ops_go_through_the_decoder() -> None:
    assert new_core(tiny_model()).compiled
    assert new_core(tiny_model().bfloat16()).compiled
    mixed = tiny_model()
    mixed.norm.bfloat16()
    assert not new_core(mixed).compiled
    assert not new_core(latent_model("deepseek_v3")).compiled
    with ops.use("reference"):
        assert not new_core(tiny_model(), deterministic=True).compiled


def test_one_thread_of_plain_float32_has_a_step_of_its_own() -> None:
    assert isinstance(new_core(tiny_model())._compiled, PlainStep)
    assert isinstance(new_core(tiny_model(), deterministic=True)._compiled, CompiledStep)
    with threads(2):
        assert isinstance(new_core(tiny_model())._compiled, CompiledStep)


@pytest.mark.parametrize(
    ("dtype", "weights"), [("fp32", "same"), ("bf16", "same"), ("fp32", "int8"), ("bf16", "int8")]
)
def test_a_core_gives_the_same_bits_with_and_without_it(dtype: str, weights: str) -> None:
    """Requests that come, end, share prompts and press for memory, on either path."""

    def run(seed: int, compiled: bool) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
        rng = random.Random(seed)
        model = varied_model(1, torch.float32, hidden_size=64, head_dim=16)
        core = new_core(
            model.bfloat16() if dtype == "bf16" else model,
            deterministic=True,
            weights=weights,
            compiled=compiled,
            prefill_tokens=rng.choice([3, 17, 64]),
            cache_tokens=rng.choice([96, 160, 1024]),
            max_context=96,
        )
        assert core.compiled is compiled
        queue = [
            ask(
                f"r{i}",
                random_prompt(rng.choice([0, i]), rng.randint(1, 40)),
                temperature=1.0,
                seed=i,
                max_tokens=rng.randint(1, 40),
            )
            for i in range(9)
        ]

        def more(_: int, core: EngineCore = core) -> None:
            if queue:
                core.add(queue.pop())

        more(0)
        with threads(1 + seed % 2):
            results = drain(core, between=more)
        assert len(results) == 9
        return {name: (output(r), logprobs(r)) for name, r in results.items()}

    for seed in range(3):
        assert run(seed, True) == run(seed, False), seed


def test_buffers_follow_sequences_that_come_go_and_move() -> None:
    rng = random.Random(0)
    buffers = StepBuffers(64, 4, 64, BLOCK)
    pool = iter(range(10_000))
    running: list[Sequence] = []
    for step in range(300):
        if len(running) < 4 and rng.random() < 0.5:
            new = Sequence(f"s{step}", [rng.randrange(VOCAB)], limit=60)
            new.blocks = [next(pool)]
            running.insert(rng.randint(0, len(running)), new)
        for sequence in running:
            sequence.append(rng.randrange(VOCAB))
            while len(sequence.blocks) * BLOCK < sequence.length:
                sequence.blocks.append(next(pool))
            if rng.random() < 0.1:
                # As after a preemption.
                sequence.blocks = [next(pool) for _ in sequence.blocks]
        running = [s for s in running if s.length < 60 and rng.random() < 0.95]
        if not running:
            continue
        chunks = []
        for sequence in running:
            count = rng.choice([1, 1, rng.randint(1, min(sequence.length, 16))])
            start = sequence.length - count
            last = rng.random() < 0.8
            chunks.append(
                Chunk(sequence, start, count, True) if last else Chunk(sequence, 0, count, False)
            )
        got = buffers.update(chunks)
        ids = [int(c.sequence.tokens[p]) for c in chunks for p in range(c.start, c.start + c.count)]
        tables = block_tables([s.blocks for s in running])
        want = StepBatch.of(
            torch.tensor(ids), [c.start for c in chunks], [c.count for c in chunks], tables
        )
        for name in ("ids", "positions", "owners", "starts", "counts"):
            assert getattr(got, name).tolist() == getattr(want, name).tolist(), name
        ends = torch.tensor([c.count for c in chunks]).cumsum(0) - 1
        asked = [int(end) for end, c in zip(ends, chunks, strict=True) if c.samples]
        assert got.asked.tolist() == asked
        for row, sequence in enumerate(running):
            held = len(sequence.blocks)
            assert got.tables[row, :held].tolist() == tables[row, :held].tolist()
