"""The same rollouts trained from their exact tokens and from re-tokenised text.

1. Rollouts of several turns with tools, sampled at temperature 1 with recorded logprobs, are read
   as messages, rendered and encoded again (`retokenising`), and a trainer with the same weights
   scores both sequences. Two models: SmolLM2-135M-Instruct, if it is installed, shown how tools are
   called by examples in its prompt, and the quickstart's model with its own small BPE after a short
   warm start. Tool results are canned: no command is run.
2. A small RL problem whose answers have many spellings in tokens (`respelling`) is trained from the
   same seeds with the same number of rollouts: from the sampled tokens; from re-tokenised text with
   the trainer's own logprobs in place of the recorded ones, which fit no longer; from re-tokenised
   text with the recorded logprobs laid over it by position.

`_smollm2` and `_quickstart` name the model; without either it is that of SmolLM2 if it is there,
else of the quickstart.

`differ_share`: trajectories with a turn whose tokens are others after the detour. By cause, not
excluding each other: `remerged_share` the same text in other tokens, `reserialised_share` another
text after reading and rendering (JSON spelt anew, spaces, another stop token), `bytes_lost_share`
bytes that are no UTF-8, `specials_spelt_share` special tokens out of place, which come back as the
characters of their names, since text must not forge tokens of the template. `turns_*` the same of
turns, `calls_*` of turns that call tools; `turns_with_calls` is their share.
`logprob_error_tokens`: mean |trainer - recorded logprob| of sampled tokens, nats. `_text`: of those
tokens of the re-tokenised sequence that a longest common subsequence of their turn finds among the
sampled ones; `unaligned_share` is the share of its trained tokens without such a partner.
`logprob_error_text_differing`: in trajectories that differ only. `_by_position`: recorded logprobs
laid over a turn's new tokens one by one. `trajectory_error_*`: |difference| of sums over a
trajectory, which needs no alignment.
`reward_VARIANT`: final reward on fresh prompts, mean over seeds, `_low` and `_high` its 95%
interval (Student's t); `progress_VARIANT` the mean of all measurements on the way;
`reward_difference_V`, `progress_difference_V` of tokens minus V, seed by seed, with intervals;
`respelt_VARIANT` the share of sampled answers that were not spelt as text would be, over the whole
training; `masked_VARIANT` the share of trained tokens without a gradient. Rollouts are of the
weights they train; with `_lag8` after a variant's name, of those eight updates older.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from report import fill_sizes, new_parser, print_report
from respelling import LAGS, VARIANTS, Job, Outcomes, run
from retokenising import (
    Errors,
    Rollout,
    Turn,
    errors,
    exact,
    from_text,
    look_at,
    score,
)
from tool_rollouts import Source, quickstart, roll_out, smollm2
from worker_pool import worker_pool

CAUSES = ("remerged", "reserialised", "bytes_lost", "specials_spelt")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t, two-sided 95%, by number of values."""


def compare(source: Source, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of one model, without a suffix."""
    turns: list[list[Turn]] = []
    of_tokens: list[Errors] = []
    of_text: list[Errors] = []
    for rollout in rollouts:
        # What came after the last answer is in no training sequence.
        last = max(i for i, m in enumerate(rollout.messages) if m["role"] == "assistant")
        whole = rollout._replace(messages=rollout.messages[: last + 1])
        sampled, text = exact(whole), from_text(whole, source.renderer)
        turns.append(look_at(whole, text, source.renderer))
        of_tokens.append(errors(whole, sampled, score(source.model, sampled)))
        same = text.ids == sampled.ids
        of_text.append(of_tokens[-1] if same else errors(whole, text, score(source.model, text)))
    return summarise_detour(turns, of_tokens, of_text)


def summarise_detour(
    turns: Sequence[Sequence[Turn]], of_tokens: Sequence[Errors], of_text: Sequence[Errors]
) -> dict[str, float]:
    """Shares and errors over all trajectories."""
    every = [turn for of_one in turns for turn in of_one]
    calls = [turn for turn in every if turn.calls]
    metrics: dict[str, float] = {
        "trajectories": len(turns),
        "turns_with_calls": len(calls) / len(every),
    }
    causes = {"differ": "differs"} | {name: name for name in CAUSES}
    for name, cause in causes.items():
        hit = [[getattr(turn, cause) for turn in of_one] for of_one in turns]
        metrics[f"{name}_share"] = statistics.fmean(map(any, hit))
        metrics[f"turns_{name}_share"] = statistics.fmean(h for of_one in hit for h in of_one)
        metrics[f"calls_{name}_share"] = statistics.fmean(
            [float(getattr(turn, cause)) for turn in calls] or [0.0]
        )
    changed = [
        one
        for one, of_one in zip(of_text, turns, strict=True)
        if any(turn.differs for turn in of_one)
    ]
    for name, found in (("tokens", of_tokens), ("text", of_text), ("text_differing", changed)):
        metrics[f"logprob_error_{name}"] = _mean(e for one in found for e in one.aligned)
        metrics[f"trajectory_error_{name}"] = _mean(one.whole for one in found)
    metrics["logprob_error_by_position"] = _mean(e for one in of_text for e in one.by_position)
    trained = sum(one.trained for one in of_text)
    metrics["unaligned_share"] = 1 - sum(len(one.aligned) for one in of_text) / trained
    metrics["tokens_compared"] = sum(len(one.aligned) for one in of_tokens)
    return metrics


def _mean(values: Any) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% interval."""
    mean = statistics.fmean(values)
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def summarise_rewards(found: dict[tuple[str, int], list[Outcomes]]) -> dict[str, float]:
    """Metrics of the RL problem by (variant, lag); lists in the order of seeds."""
    metrics: dict[str, float] = {}

    def put(name: str, values: Sequence[float]) -> None:
        for suffix, value in zip(("", "_low", "_high"), interval(values), strict=True):
            metrics[name + suffix] = value

    for (variant, lag), outcomes in found.items():
        name = f"{variant}_lag{lag}" if lag else variant
        put(f"reward_{name}", [o.final for o in outcomes])
        put(f"progress_{name}", [o.progress for o in outcomes])
        metrics[f"respelt_{name}"] = statistics.fmean(o.respelt for o in outcomes)
        metrics[f"masked_{name}"] = statistics.fmean(o.masked for o in outcomes)
        if variant == "tokens":
            continue
        pairs = list(zip(found["tokens", lag], outcomes, strict=True))
        put(f"reward_difference_{name}", [a.final - b.final for a, b in pairs])
        put(f"progress_difference_{name}", [a.progress - b.progress for a, b in pairs])
    return metrics


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Flags, with sizes filled in."""
    parser = new_parser(__doc__)
    parser.add_argument("--conversations", type=int, help="of each model")
    parser.add_argument("--turns", type=int, default=3, help="of each conversation")
    parser.add_argument("--new", type=int, help="most tokens of a turn")
    parser.add_argument("--demonstrations", type=int, help="the quickstart's model learns from")
    parser.add_argument("--steps", type=int, help="of that, 16 demonstrations each")
    parser.add_argument("--seeds", type=int, help="of the RL problem, 2 to 10")
    parser.add_argument("--updates", type=int, help="of a run")
    parser.add_argument("--groups", type=int, default=8, help="groups per update")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts per group")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    sizes = (
        ("conversations", 4, 40),
        ("new", 32, 48),
        ("demonstrations", 320, 2000),
        ("steps", 20, 250),
        ("seeds", 2, 5),
        ("updates", 10, 150),
    )
    found = fill_sizes(parser.parse_args(arguments), sizes)
    if found.seeds not in T_95:
        parser.error(f"--seeds {found.seeds} has to be from {min(T_95)} to {max(T_95)}")
    return found


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """The RL problem; variants interleaved, seeds outermost."""
    return [
        Job(
            variant,
            lag,
            seed,
            arguments.updates,
            arguments.groups,
            arguments.group_size,
            arguments.learning_rate,
        )
        for seed in range(arguments.seeds)
        for lag in LAGS
        for variant in VARIANTS
    ]


def measure_detours(arguments: argparse.Namespace) -> dict[str, float]:
    """Metrics of both models."""
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        sources = {"smollm2": smollm2(arguments), "quickstart": quickstart(arguments, Path(folder))}
    for name, source in sources.items():
        if source is None:
            continue
        found = compare(source, roll_out(source, arguments))
        if "differ_share" not in metrics:
            metrics |= found
        metrics |= {f"{key}_{name}": value for key, value in found.items()}
    return metrics


def main() -> None:
    """Run the benchmark."""
    arguments = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    jobs = jobs_of(arguments)
    rewards: dict[tuple[str, int], list[Outcomes]] = {}
    with worker_pool(arguments.processes) as pool:
        trained = pool.map(run, jobs)  # beside what follows: nothing here is timed
        metrics = measure_detours(arguments)
        for job, outcomes in zip(jobs, trained, strict=True):
            rewards.setdefault((job.variant, job.lag), []).append(outcomes)
    metrics |= summarise_rewards(rewards) | {"wall_s": time.perf_counter() - started}
    missing = "" if "differ_share_smollm2" in metrics else "SmolLM2 is not there. "
    print_report(
        "tito_vs_text",
        arguments,
        metrics,
        missing + "Pieces of the template are encoded each on its own, so text never merges with "
        "the template around it; pipelines that encode a conversation as one string differ more.",
    )


if __name__ == "__main__":
    main()
