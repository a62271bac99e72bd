"""Draft acceptance: three prediction steps that share one layer, against one step, both used for 4.

Two models that differ in training only: the same latent-attention decoder with one prediction
layer, the same initial weights per seed, the same batches of the builtin corpus, the same schedule
and number of steps. "shared" trains that layer as three steps in a row, "single" as the first step
alone; both then draft with it four steps deep. Many held-out prompts are continued greedily by the
engine, a few tokens each because small models soon repeat themselves, and rounds of speculative
decoding are counted over these texts: `accept_*` are tokens per pass of the main model, `rate_*_N`
how often step N is right where all before it were.

`accept_text_*` are the same counts over held-out text itself, where nothing repeats itself as
greedy texts of small models do (`repeated_*`: share of tokens that continue 8 seen before).
Losses are of the main model: what the additional training costs or gains it.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.data.corpora import open_corpus, sample_texts
from headrace.data.sources import Framing, SourceSpec, open_source
from headrace.data.stream import StreamSpec, TokenStream
from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.types import GenerationRequest, GenerationResult, SamplingParams
from headrace.measure.text import bits_per_byte
from headrace.model.config import MtpConfig
from headrace.model.decoder import Decoder
from headrace.model.drafting import DraftRounds, accepted_drafts, play_rounds
from headrace.model.presets import preset
from headrace.tokens.tokenizer import TextTokenizer
from headrace.tokens.training import train_tokenizer
from headrace.training.forward import LossConfig
from headrace.training.streams import TextStream
from headrace.training.supervised import Budget
from headrace.training.trainer import OptimizerConfig, Trainer
from report import fill_sizes, new_parser, print_report
from worker_pool import worker_pool

VARIANTS = {"shared": MtpConfig(depth=3, shared=True), "single": MtpConfig(depth=1, shared=True)}
DRAFT_STEPS = 4
PAPER_RATIO = 1.08
MTP_WEIGHT = 0.3
REPEATED = 8
"""Tokens that have to stand somewhere before for the next one to count as repeated."""
TRAIN, HELD_OUT = SourceSpec(), SourceSpec(split="held_out")


class Result(NamedTuple):
    """One trained model."""

    generated: DraftRounds
    text: DraftRounds
    repeated: float
    bits_per_byte: float
    loss: float
    train_s: float


def repeated_share(ids: Tensor, prompt: int) -> float:
    """Share of the tokens after the prompt that go on as the text went on before.

    Args:
        ids: [B, T].
    """
    found = 0
    for row in ids.tolist():
        seen: set[tuple[int, ...]] = set()
        for end in range(REPEATED + 1, len(row) + 1):
            piece = tuple(row[end - REPEATED - 1 : end])
            found += end > prompt and piece in seen
            seen.add(piece)
    return found / (ids.shape[0] * (ids.shape[1] - prompt))


def continue_greedily(model: Decoder, prompts: Tensor, new: int) -> Tensor:
    """Prompts [B, P] -> [B, P + new], by the engine. It takes the model over."""
    count, length = prompts.shape
    core = EngineCore(model, EngineConfig(max_running=count, max_context=length + new))
    for i, prompt in enumerate(prompts.tolist()):
        sampling = SamplingParams(new, temperature=0.0)
        core.add(GenerationRequest(str(i), tuple(prompt), sampling, timeout_s=600.0))
    written = prompts.new_zeros(count, new)
    while core.has_work:
        for result in core.step():
            if not isinstance(result, GenerationResult):
                raise RuntimeError(str(result))
            ids = [i for span in result.spans for i in span.ids]
            written[int(result.id)] = torch.tensor(ids)
    return torch.cat((prompts, written), dim=1)


def held_out_windows(
    arguments: argparse.Namespace, tokenizer: TextTokenizer, cache: Path
) -> Tensor:
    """[texts, tokens] whole rows of held-out documents, cut as training rows are."""
    spec = StreamSpec((HELD_OUT,))
    stream = TokenStream(spec, tokenizer, arguments.tokens, 16, seed=0, cache_dir=cache)
    windows: list[Tensor] = []
    for _ in range(1000):
        for row in stream.next_batch():
            windows += [torch.from_numpy(i).long() for i, _ in row if len(i) == arguments.tokens]
        if len(windows) >= arguments.texts:
            return torch.stack(windows[: arguments.texts])
    raise RuntimeError(f"found {len(windows)} held-out rows of {arguments.tokens} tokens")


def new_model(arguments: argparse.Namespace, vocabulary: int, mtp: MtpConfig) -> Decoder:
    """glm5-tiny with dense attention and feed-forward: what drafts depend on, and little else."""
    model = Decoder(
        preset(
            "glm5-tiny",
            vocabulary,
            hidden_size=arguments.hidden,
            intermediate_size=3 * arguments.hidden,
            num_layers=arguments.layers,
            max_positions=max(arguments.tokens, arguments.prompt + arguments.new),
            indexer=None,
            moe=None,
            mtp=mtp,
        )
    )
    return model


def train(
    arguments: argparse.Namespace,
    tokenizer: TextTokenizer,
    cache: Path,
    mtp: MtpConfig,
    seed: int,
) -> tuple[Decoder, float]:
    """A model trained on the builtin corpus, in eval mode, and the seconds that took."""
    model = new_model(arguments, tokenizer.vocab_size, mtp)
    model.init_weights(seed)
    trainer = Trainer(
        model,
        OptimizerConfig(
            arguments.learning_rate, weight_decay=0.1, algorithm="muon_split", bfloat16=True
        ),
        losses=LossConfig(mtp_weight=MTP_WEIGHT),
    )
    stream = TextStream(
        TokenStream(
            StreamSpec((TRAIN,)),
            tokenizer,
            arguments.tokens,
            arguments.rows,
            seed=seed,
            cache_dir=cache,
        )
    )
    budget = Budget(arguments.steps, None, arguments.learning_rate, arguments.steps // 20, 0.1)
    started = time.perf_counter()
    for step in range(arguments.steps):
        trainer.supervised_step(stream.next_batch(), budget.rate(step, 0.0))
    return model.eval(), time.perf_counter() - started


def prepare_tokens(vocabulary: int, cache: Path) -> TextTokenizer:
    """A tokenizer of the builtin corpus, whose two splits are encoded into `cache`."""
    texts = sample_texts(open_corpus("builtin"), max_bytes=1 << 20)
    tokenizer = train_tokenizer(texts, vocabulary)
    for source in (TRAIN, HELD_OUT):
        open_source(source, tokenizer, cache_dir=cache)
    return tokenizer


def run(
    arguments: argparse.Namespace, tokenizer: TextTokenizer, cache: Path, variant: str, seed: int
) -> Result:
    """Train one model and count what its drafts are worth."""
    model, train_s = train(arguments, tokenizer, cache, VARIANTS[variant], seed)
    windows = held_out_windows(arguments, tokenizer, cache)
    prefix = [tokenizer.token_id(token) for token in Framing().begin]
    score = bits_per_byte(
        model,
        tokenizer,
        open_corpus("builtin").documents("held_out"),
        context=arguments.tokens,
        max_bytes=arguments.held_out_bytes,
        prefix=[i for i in prefix if i is not None],
    )
    text = play_rounds(accepted_drafts(model, windows, arguments.prompt, DRAFT_STEPS), DRAFT_STEPS)
    # Last, because the engine lays the weights out for itself.
    ids = continue_greedily(model, windows[:, : arguments.prompt], arguments.new)
    accepted = accepted_drafts(model, ids, arguments.prompt, DRAFT_STEPS)
    return Result(
        play_rounds(accepted, DRAFT_STEPS),
        text,
        repeated_share(ids, arguments.prompt),
        score.bits_per_byte,
        score.nats_per_token,
        train_s,
    )


def pooled(rounds: list[DraftRounds]) -> DraftRounds:
    """All rounds of all seeds."""
    return DraftRounds(
        sum(r.rounds for r in rounds),
        tuple(sum(counts) for counts in zip(*(r.tried for r in rounds), strict=True)),
        tuple(sum(counts) for counts in zip(*(r.kept for r in rounds), strict=True)),
    )


def metrics_of(results: dict[str, list[Result]]) -> dict[str, float]:
    """Flat numbers; ratios are shared / single."""
    metrics: dict[str, float] = {}
    for name, done in results.items():
        generated, text = pooled([r.generated for r in done]), pooled([r.text for r in done])
        metrics[f"accept_{name}"] = generated.acceptance_length
        metrics[f"accept_text_{name}"] = text.acceptance_length
        for step, (rate, text_rate) in enumerate(zip(generated.rates, text.rates, strict=True), 1):
            metrics[f"rate_{name}_{step}"] = rate
            metrics[f"rate_text_{name}_{step}"] = text_rate
        metrics[f"rounds_{name}"] = generated.rounds
        metrics[f"repeated_{name}"] = statistics.fmean(r.repeated for r in done)
        metrics[f"loss_{name}"] = statistics.fmean(r.loss for r in done)
        metrics[f"bits_per_byte_{name}"] = statistics.fmean(r.bits_per_byte for r in done)
        metrics[f"train_s_{name}"] = statistics.fmean(r.train_s for r in done)
    pairs = list(zip(results["shared"], results["single"], strict=True))
    ratios = [a.generated.acceptance_length / b.generated.acceptance_length for a, b in pairs]
    metrics["ratio"] = metrics["accept_shared"] / metrics["accept_single"]
    metrics["ratio_lowest_seed"], metrics["ratio_highest_seed"] = min(ratios), max(ratios)
    metrics["ratio_text"] = metrics["accept_text_shared"] / metrics["accept_text_single"]
    return metrics


def start_worker() -> None:
    torch.set_num_threads(1)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of a row")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--texts", type=int, help="held-out texts")
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--new", type=int, default=12, help="tokens the engine writes per prompt")
    parser.add_argument("--held-out-bytes", type=int)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args(argv)
    return fill_sizes(
        arguments,
        (
            ("seeds", 1, 2),
            ("steps", 40, 280),
            ("hidden", 128, 192),
            ("layers", 2, 4),
            ("texts", 128, 768),
            ("held_out_bytes", 40_000, 400_000),
        ),
    )


def measure(arguments: argparse.Namespace) -> dict[str, list[Result]]:
    """All runs, one per core at a time."""
    results: dict[str, list[Result]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        tokenizer = prepare_tokens(arguments.vocabulary, cache)
        with worker_pool(arguments.workers, start_worker) as pool:
            futures = [
                (name, seed, pool.submit(run, arguments, tokenizer, cache, name, seed))
                for seed in range(arguments.seeds)
                for name in VARIANTS
            ]
            for name, seed, future in futures:
                result = future.result(timeout=3600)
                results[name].append(result)
                print(
                    f"{name} seed {seed}: accepts {result.generated.acceptance_length:.3f}, "
                    f"on text {result.text.acceptance_length:.3f}, "
                    f"{result.bits_per_byte:.3f} bits per byte, trained {result.train_s:.0f} s",
                    flush=True,
                )
    return results


def main() -> None:
    arguments = parse()
    started = time.perf_counter()
    metrics = metrics_of(measure(arguments))
    metrics["wall_s"] = time.perf_counter() - started
    notes = (
        f"Equal steps, not equal time: see train_s. The paper's ratio is {PAPER_RATIO} "
        "(2.76 / 2.55) for a model of another size, trained on other text for very much longer."
    )
    print_report(
        "mtp_sharing",
        arguments,
        metrics,
        notes,
        draft_steps=DRAFT_STEPS,
        mtp_weight=MTP_WEIGHT,
        threads_per_run=1,
    )


if __name__ == "__main__":
    main()
