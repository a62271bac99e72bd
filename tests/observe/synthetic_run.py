"""A synthetic but realistic run directory, written through the real ledger and writers."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from headrace.observe.metrics import MetricsWriter
from headrace.observe.statistics import wilson
from headrace.observe.summary import write_summary
from headrace.rollout.groups import ScoredRollout, advantages
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.record.rows import Batch, BatchMember
from headrace.rollout.types import (
    Call,
    DropReason,
    FinishReason,
    Outcome,
    ParseState,
    Span,
)

FAMILIES = ("count_lines", "find_name", "sort_unique", "rename", "permissions", "pipeline")
SYSTEM = "You work in a Linux shell. Use the bash tool, then answer with the result only."
START = 1_770_000_000.0
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]

RECIPE = {
    "name": "quickstart",
    "description": "A small model learns to work in a terminal, from random weights.",
    "seed": 7,
    "stages": [
        {"name": "sft", "kind": "sft", "seconds": 90.0, "start_from": None},
        {"name": "rl", "kind": "agentic_rl", "seconds": 210.0, "staleness": 4, "start_from": None},
        {"name": "sft-longer", "kind": "sft", "seconds": 210.0, "start_from": "sft"},
    ],
}


class RunMaker:
    """Writes run directories; see `make`."""

    def __init__(self, clock: Callable[[float], None]) -> None:
        self._set_clock = clock
        self._now = START
        self.tokenizer = _tokenizer()

    def make(
        self, path: Path, *, instances: int = 24, updates: int = 12, until: str = "end"
    ) -> Path:
        """A run of two stages and a control stage.

        Args:
            path: directory to make.
            instances: held-out instances.
            updates: RL updates.
            until: "end", or "sft" for a run that was killed after its first stage.
        """
        path.mkdir(parents=True)
        self._now = START
        rng = random.Random(3)
        (path / "recipe.json").write_text(json.dumps(RECIPE))
        home = path / "checkpoints" / "sft"
        home.mkdir(parents=True)
        self.tokenizer.save(str(home / "tokenizer.json"))
        ledger = Ledger.create(path / "ledger.sqlite", clock=lambda: self._now)
        with MetricsWriter(path) as rows:
            evaluations = [self._evaluate(ledger, rng, "start", instances, 0.01)]
            self._supervised(rows, rng, "sft", 60, 90.0, 3.2, 0.55)
            if until == "sft":
                ledger.close()
                return path
            evaluations.append(self._evaluate(ledger, rng, "sft", instances, 0.52))
            self._reinforce(ledger, rows, rng, updates)
            evaluations.append(self._evaluate(ledger, rng, "rl", instances, 0.92))
            self._supervised(rows, rng, "sft-longer", 120, 210.0, 0.55, 0.41)
            evaluations.append(self._evaluate(ledger, rng, "sft-longer", instances, 0.61))
        ledger.close()
        write_summary(
            path,
            {
                "recipe": "quickstart",
                "seed": 7,
                "status": "finished",
                "ended": "2026-02-02T10:51:40",
                "wall_s": self._now - START + 9.0,
                "stages": [
                    {"name": "sft", "wall_s": 91.2},
                    {"name": "rl", "wall_s": 211.0},
                    {"name": "sft-longer", "wall_s": 210.4},
                ],
                "evaluations": evaluations,
                "laws": {"L2": "held", "L4": "held", "L7": "held", "L9": "broken: one batch twice"},
                "machine": {"processor": "Example CPU @ 2.1 GHz", "cores": 2, "memory": "8 GiB"},
            },
        )
        return path

    def _tick(self, seconds: float) -> None:
        self._now += seconds
        self._set_clock(self._now)

    def _supervised(
        self,
        rows: MetricsWriter,
        rng: random.Random,
        stage: str,
        steps: int,
        seconds: float,
        first: float,
        last: float,
    ) -> None:
        for step in range(1, steps + 1):
            self._tick(seconds / steps)
            loss = last + (first - last) * math.exp(-4 * step / steps) + rng.gauss(0, 0.02)
            rows.log(stage, step, {"loss": loss, "tokens_per_s": rng.gauss(3100, 60)})

    def _reinforce(
        self, ledger: Ledger, rows: MetricsWriter, rng: random.Random, updates: int
    ) -> None:
        ledger.stage_started("rl")
        trained = 0
        for step in range(1, updates + 1):
            version = step - 1
            skill = 0.92 - 0.4 * math.exp(-3 * step / updates)
            members: list[BatchMember] = []
            stale: list[tuple[str, DropReason]] = []
            for group in range(3):
                name = f"rl-g{step:03d}-{group}"
                ids = [f"{name}-{i}-{rng.getrandbits(16):04x}" for i in range(4)]
                instance = _instance(10_000 + 3 * step + group)
                ledger.dispatch("rl", "train", name, "terminal", instance, ids)
                scored: list[ScoredRollout] = []
                sampled = max(version - rng.choice((0, 0, 1, 1, 1, 2, 3)), 0)
                for session in ids:
                    broken = rng.random() < 0.02
                    ok = rng.random() < skill
                    self._rollout(ledger, rng, session, instance, ok, sampled)
                    outcome = Outcome.ENV_FAILED if broken else Outcome.OK
                    rewards = {} if broken else {"reward": float(ok)}
                    ledger.finish(session, outcome, rewards, "sandbox died" if broken else "")
                    scored.append(ScoredRollout(session, outcome, None if broken else float(ok)))
                decision = advantages(scored)
                ledger.decide_group(name, decision)
                members += [
                    BatchMember(m.session_id, m.advantage, m.multiplicity) for m in decision.members
                ]
            if members and rng.random() < 0.2:
                stale = [(members.pop().session_id, DropReason.STALE)]
            self._tick(210.0 / updates)
            if members:
                index = len(ledger.batches("rl"))
                ledger.cut_batch(Batch("rl", index, version, 4, tuple(members)), stale)
                ledger.commit_batch("rl", index, step)
                trained = step
            ledger.publish("rl", step, step, f"checkpoints/rl/v{step}")
            rows.log("rl", step, _rl_metrics(rng, step, skill, len(members), version))
        ledger.checkpointed("rl", trained, "checkpoints/rl")
        ledger.stage_finished("rl", 211.0, {})

    def _evaluate(
        self, ledger: Ledger, rng: random.Random, label: str, instances: int, skill: float
    ) -> dict[str, Any]:
        solved: dict[str, int] = {}
        families: dict[str, list[int]] = {}
        several = [0, 0]
        for seed in range(instances):
            instance = _instance(seed)
            # Each instance has its own difficulty, so that evaluations are correlated.
            ok = random.Random(seed).random() * 0.7 + rng.random() * 0.3 < skill
            session = f"eval-{label}-{seed}"
            ledger.dispatch("evaluation", f"eval:{label}", session, "terminal", instance, [session])
            self._rollout(ledger, rng, session, instance, ok, 0 if label == "start" else 3)
            ledger.finish(session, Outcome.OK, {"reward": float(ok)})
            solved[str(seed)] = int(ok)
            for counter in [
                families.setdefault(str(instance["family"]), [0, 0]),
                *([several] if int(instance["min_turns"]) >= 3 else []),
            ]:
                counter[0] += ok
                counter[1] += 1
        self._tick(11.0)
        total = sum(solved.values())
        low, high = wilson(total, instances)
        return {
            "after": label,
            "task": "terminal",
            "n": instances,
            "success": total / instances,
            "low": low,
            "high": high,
            "temperature": 1.0,
            "families": families,
            "multi_turn": several,
            "wall_s": 11.0,
            "instances": solved,
        }

    def _rollout(
        self,
        ledger: Ledger,
        rng: random.Random,
        session: str,
        instance: dict[str, Any],
        ok: bool,
        version: int,
    ) -> None:
        """Two calls: a command, then the answer."""
        family = str(instance["family"])
        command = f"ls -1 {'data' if ok else 'dat'} | sort | uniq | wc -l  # {family}"
        result = "4" if ok else "ls: cannot access 'dat': No such file or directory\n0"
        question = f"How many distinct files are in data? ({family}, <level {instance['level']}>)"
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ]
        wanted = json.dumps({"command": command})
        asked = {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "bash", "arguments": wanted},
                }
            ],
        }
        prompt = f"<|system|>{SYSTEM}<|user|>{question}<|assistant|>"
        first = self._call(
            rng,
            session,
            0,
            None,
            messages,
            prompt,
            f"bash {command}<|observation|>",
            asked,
            version,
        )
        ledger.record_call(first)
        answered = [*messages, asked, {"role": "tool", "tool_call_id": "call_0", "content": result}]
        final = {"role": "assistant", "content": "4" if ok else "0 ☃"}
        second = self._call(
            rng,
            session,
            1,
            first.id,
            answered,
            f"{result}<|assistant|>",
            f"{final['content']}<|endoftext|>",
            final,
            version,
        )
        ledger.record_call(second)

    def _call(
        self,
        rng: random.Random,
        session: str,
        index: int,
        parent: str | None,
        messages: list[dict[str, Any]],
        prompt: str,
        output: str,
        response: dict[str, Any],
        version: int,
    ) -> Call:
        ids = self.tokenizer.encode(output).ids
        cut = max(len(ids) // 2, 1)
        spans = [
            Span(tuple(part), tuple(-rng.expovariate(3) for _ in part), version + i, "engine-0")
            for i, part in enumerate((ids[:cut], ids[cut:]))
            if part
        ]
        return Call(
            id=f"{session}/{index}",
            session_id=session,
            index=index,
            parent_id=parent,
            fork_reason=None,
            idempotency_key=None,
            messages=messages,
            tools=[],
            renderer_id="compact",
            prompt_delta=tuple(self.tokenizer.encode(prompt).ids),
            spans=tuple(spans),
            finish_reason=FinishReason.STOP,
            parse_state=ParseState.OK,
            response=response,
            started_at=self._now,
            finished_at=self._now + 0.1,
        )


def _instance(seed: int) -> dict[str, Any]:
    return {
        "task": "terminal",
        "seed": seed,
        "family": FAMILIES[seed % len(FAMILIES)],
        "level": 1 + seed % 3,
        "min_turns": 2 + seed % 2,
    }


def _rl_metrics(
    rng: random.Random, step: int, skill: float, members: int, version: int
) -> dict[str, float]:
    def noisy(mean: float, share: float = 0.06) -> float:
        return mean * (1 + rng.gauss(0, share))

    return {
        "reward_mean": min(noisy(skill, 0.05), 1.0),
        "success_rate": min(noisy(skill, 0.02), 1.0),
        "loss": rng.gauss(0, 0.01),
        "grad_norm": noisy(0.8, 0.2),
        "masked_low": noisy(0.011, 0.2),
        "masked_high": noisy(0.006, 0.2),
        "ratio_mean": noisy(1.0, 0.004),
        "ratio_p99": noisy(1.3, 0.03),
        "mismatch_mean_abs": noisy(2.1e-6, 0.2),
        "mismatch_max_abs": noisy(3.4e-5, 0.3),
        "entropy": noisy(0.5 - 0.3 * skill, 0.08),
        "kl_rollout": noisy(0.004, 0.2),
        "lag_mean": noisy(1.2, 0.1),
        "lag_max": float(rng.choice((2, 3, 3, 4))),
        "trained_tokens": float(50 * members),
        "trained_trajectories": float(members),
        "dropped_stale": float(rng.random() < 0.2),
        "dropped_no_signal": float(rng.randint(0, 6)),
        "env_failed": float(rng.random() < 0.05),
        "signal_share": 0.6,
        "difficulty.terminal.level1.pass_rate": 0.3 + 0.6 * skill,
        "difficulty.terminal.level2.pass_rate": 0.1 + 0.4 * skill,
        "version": float(version + 1),
        "trainer_busy": min(noisy(0.66), 1.0),
        "engine_busy": min(noisy(0.93, 0.03), 1.0),
        "gen_tokens_per_s": noisy(2900),
        "train_tokens_per_s": noisy(2200),
        "queue_groups": float(rng.randint(0, 6)),
        "rollouts_in_flight": float(rng.randint(58, 64)),
        "turns_mean": noisy(2.6, 0.04),
        "step_s": noisy(1.9),
        "wait_s": noisy(0.8, 0.3),
        "held_s": 0.4,
        "held.ready_s": 0.4,
        "held.batch_s": 0.0,
        "held.concurrency_s": 0.9,
    }


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [SYSTEM, "ls -1 data | sort | uniq | wc -l", "No such file or directory"] * 4
    tokenizer.train_from_iterator([*text, *FAMILIES], trainer)
    return tokenizer
