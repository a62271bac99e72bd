"""One optimizer step at a time: a model, its optimizers and the objectives, in this process.

The trainer knows token sequences, weights and advantages. It does not know where they came from,
nor when to stop. Whatever the micro-batching, packing or number of ranks, a step's loss and
gradient are the whole batch's (law L14): every rank is given the same global batch and works on
its share.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.model.decoder import Decoder
from headrace.model.moe import Router
from headrace.model.shared_weights import publish
from headrace.objectives.balance import updated_router_bias
from headrace.objectives.language_model import weighted_nll
from headrace.objectives.mtp import mtp_loss
from headrace.optim.groups import Algorithm, OptimizerGroups, build_optimizers
from headrace.training.batch import Sample, plan_micro_batches
from headrace.training.batch_invariant import BatchInvariant
from headrace.training.forward import LossConfig, Losses, Pass, PassOutput, freeze
from headrace.training.guards import GuardConfig, GuardState, TrainingStopped, Verdict, judge
from headrace.training.parallel import (
    ALONE,
    Ranks,
    shard,
    synchronise_gradients,
    unsharded,
    whole,
)
from headrace.training.precision import HalfWeights
from headrace.training.reinforced import (
    Policies,
    ReinforcedBatch,
    RlConfig,
    deal_steps,
)
from headrace.training.rl_record import RlRecord
from headrace.training.rows import Rows, Totals, batch_totals, pack
from headrace.training.scoring import OtherPolicies, look_ahead

OPTIMIZER_FILE = "trainer.pt"
_NEXT_TOKEN = LossConfig()


class OptimizerConfig(NamedTuple):
    """Optimizer and step limits; see the stage tables of `headrace.recipe` for meanings.

    Attributes:
        learning_rate: of matrices; a step may give its own.
        weight_decay, beta1, beta2: as in `optim.groups.OptimizerGroups`.
        grad_clip: largest global gradient norm.
        micro_tokens: most tokens in one forward pass; bounds memory, not the loss.
        bfloat16: matrix products in bfloat16; weights and optimizer state stay float32.
        batch_invariant: a forward pass with the bits of a deterministic float32 engine, on one
            rank; see `BatchInvariant`.
        algorithm: of matrices inside layers.
        embedding: learning-rate multiple of embeddings and output projection.
        router_bias_rate: step of the routers' selection bias after each update; 0 leaves it.
    """

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    micro_tokens: int = 8192
    bfloat16: bool = False
    algorithm: Algorithm = "adamw"
    embedding: float = 1.0
    router_bias_rate: float = 0.0
    batch_invariant: bool = False


class NonFiniteLossError(Exception):
    """A loss or gradient norm is not finite; the weights were left as they were."""


Objective = Callable[[Rows, PassOutput, Sequence[int]], Tensor]
"""Language or RL loss of a micro-batch, already divided by the whole batch's weight.

Takes the packed samples, what the model made of them, and which of the batch's samples they are.
"""


class Trainer:
    """Holds the weights that are being trained.

    Args:
        model: trained in place; sharded in place when there are several ranks.
        config: optimizer and limits.
        losses: what a step minimises.
        trainable: which parameters have gradients.
        guard: judges steps; None raises NonFiniteLossError for bad numbers and sees no spikes.
        ranks: the processes that train together.

    Raises:
        UserError: losses or trainable set that the model has no parts for, or a batch-invariant
            forward of what has none.
    """

    def __init__(
        self,
        model: Decoder,
        config: OptimizerConfig,
        *,
        losses: LossConfig = _NEXT_TOKEN,
        trainable: Literal["all", "indexer", "all_but_indexer"] = "all",
        guard: GuardConfig | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = model
        self.config = config
        self.losses = losses
        self.guard = guard
        self.guard_state = GuardState()
        self.ranks = ranks
        self.steps = 0
        self._others = OtherPolicies()
        model.train()
        freeze(model, trainable)
        self._invariant: BatchInvariant | None = None
        if config.batch_invariant:
            self._invariant = BatchInvariant(model, bfloat16=config.bfloat16, ranks=ranks.size)
        self._pass = Pass(model, losses, bfloat16=config.bfloat16, invariant=self._invariant)
        if ranks.size > 1:
            shard(self._pass, list(model.layers), ranks, keep_whole=trainable == "indexer")
        # Sharded weights are gathered anew for every pass; copies of them would go stale.
        halve = config.bfloat16 and ranks.size == 1
        self._half = HalfWeights(model) if halve else None
        self.optimizers = build_optimizers(
            model,
            OptimizerGroups(
                config.learning_rate,
                config.algorithm,
                config.weight_decay,
                config.beta1,
                config.beta2,
                embedding=config.embedding,
            ),
        )

    # -- steps ------------------------------------------------------------------------------

    def supervised_step(
        self, samples: Sequence[Sample], learning_rate: float | None = None
    ) -> dict[str, float]:
        """One step of weighted next-token loss and whatever else `losses` asks for.

        Returns:
            loss (weighted mean, nats per token, plus weighted auxiliary losses), each part when
            there is more than one, grad_norm, tokens (all tokens read), skipped (0 or 1).

        Raises:
            ValueError: nothing in the batch has a loss weight.
            NonFiniteLossError, TrainingStopped: see `apply`.
        """
        losses = self.loss_and_gradients(samples)
        norm, applied = self.apply(losses.total, learning_rate)
        return {
            **losses.metrics(self.losses),
            "grad_norm": norm,
            "tokens": float(sum(len(s) for s in samples)),
            "skipped": 0.0 if applied else 1.0,
        }

    def rl_step(
        self,
        samples: Sequence[Sample],
        rl: RlConfig,
        *,
        version: int,
        fresh: bool,
        learning_rate: float | None = None,
    ) -> dict[str, float]:
        """One update of an RL objective: `rl.minibatches` optimizer steps, each token in one.

        Args:
            samples: rollout samples (see `rollout_sample`).
            rl: the objective.
            version: newest published version; lag of a token = version - its version.
            fresh: whether the weights still are exactly that version, so that tokens sampled from
                it measure the mismatch between trainer and engine (law L11).

        Returns:
            loss and grad_norm (means over steps), skipped (steps), and what `RlRecord` finds out
            about all trained tokens.

        Raises:
            UserError: the objective needs a policy that was not given.
            ValueError: nothing in the batch has a loss weight.
            NonFiniteLossError, TrainingStopped: see `apply`.
        """
        self._others.check(rl)
        steps = [list(range(len(samples)))]
        if rl.minibatches > 1:
            # A batch of nothing stays a batch, for the error that it deserves.
            steps = deal_steps(samples, rl.minibatches) or steps
        parts = [[samples[i] for i in step] for step in steps]
        # All of them before the first step: it changes the policy that the update begins with.
        asked = [self.ask_policies(part, rl) for part in parts]
        record = RlRecord(version)
        found = []
        for number, (part, policies) in enumerate(zip(parts, asked, strict=True)):
            losses = self.loss_and_gradients(
                part, rl=rl, record=record, policies=policies, fresh=fresh and number == 0
            )
            norm, applied = self.apply(losses.total, learning_rate)
            skipped = 0.0 if applied else float(len(parts))
            found.append({**losses.metrics(self.losses), "grad_norm": norm, "skipped": skipped})
        means = {name: sum(row[name] for row in found) / len(found) for name in found[0]}
        return {**means, **record.metrics(self.ranks)}

    def keep_policies(
        self, *, reference: Decoder | None = None, teachers: Sequence[Decoder] = ()
    ) -> None:
        """Hold models that RL objectives ask and that never change; every rank holds them whole.

        Raises:
            UserError: one of them has another vocabulary than the model that trains.
        """
        size = self.model.config.vocab_size
        for other in (reference, *teachers):
            if other is not None and other.config.vocab_size != size:
                raise UserError(
                    f"a teacher's vocabulary has {other.config.vocab_size} entries, the student's "
                    f"{size}; only models of one tokenizer can judge each other's tokens"
                )
        self._others = OtherPolicies(
            reference, teachers, bfloat16=self.config.bfloat16, device=self.ranks.device
        )

    def ask_policies(self, samples: Sequence[Sample], rl: RlConfig) -> Policies:
        """What the objective needs of other policies about the batch of one optimizer step.

        The old policy is the trainer's, with the weights as they are now. All ranks must call.
        """
        with self._weights_in_place():
            return self._others.ask(samples, self._plan(samples)[self.ranks.rank], rl, self._pass)

    def loss_and_gradients(
        self,
        samples: Sequence[Sample],
        *,
        rl: RlConfig | None = None,
        record: RlRecord | None = None,
        policies: Policies | None = None,
        fresh: bool = True,
    ) -> Losses:
        """Losses of a whole batch; its gradients are added to the parameters' `.grad`.

        Args:
            samples: the global batch, the same on every rank.
            rl: use this RL objective instead of the next-token loss.
            record: collects what `rl_step` reports.
            policies: what others say about the samples; None asks them now.
            fresh: as in `rl_step`, for the record.

        Raises:
            ValueError: a sample is longer than the model's positions, or nothing is trained.
        """
        totals = self._totals(samples)
        plan = self._plan(samples)
        temperature = 1.0
        if rl is None:
            objective = _supervised(totals)
        else:
            temperature = rl.temperature
            reinforced = ReinforcedBatch(
                samples, rl, self.ask_policies(samples, rl) if policies is None else policies
            )
            if rl.needs_trajectory_ratios:
                with self._weights_in_place():
                    look_ahead(reinforced, samples, plan, self._pass, self.ranks)
            objective = partial(reinforced.loss, record=record, fresh=fresh)
        self._pass.loads.clear()
        sums = torch.zeros(5, dtype=torch.float64)
        with self._weights_in_place():
            for number, indices in enumerate(plan[self.ranks.rank]):
                rows = pack([samples[i] for i in indices]).to(self.ranks.device)
                synchronise_gradients(self._pass, number == len(plan[0]) - 1)
                output = self._pass(rows, temperature)
                terms = self._terms(rows, output, objective, totals, indices)
                if terms[0].requires_grad:
                    terms[0].backward()
                sums += terms.detach().double().cpu()
        return Losses(*self.ranks.sum(sums).tolist())

    def apply(self, loss: float, learning_rate: float | None = None) -> tuple[float, bool]:
        """Clip the gradients, step the optimizers, move the routers' biases, clear the gradients.

        Args:
            loss: of the step, for the guard.
            learning_rate: None keeps the last one.

        Returns:
            The gradient norm before clipping, and whether the guard let the step through.

        Raises:
            NonFiniteLossError: loss or norm is not finite and there is no guard.
            TrainingStopped: the guard ended training. Weights are unchanged in both cases.
        """
        trained = [p for p in self.model.parameters() if p.grad is not None]
        total_norm = whole(get_total_norm([p.grad for p in trained if p.grad is not None]))
        norm = float(total_norm)
        if not self._let_through(loss, norm):
            self.model.zero_grad(set_to_none=True)
            return norm, False
        if norm > self.config.grad_clip:
            clip_grads_with_norm_(trained, self.config.grad_clip, total_norm)
        self.optimizers.step(learning_rate)
        self.model.zero_grad(set_to_none=True)
        self._balance_routers()
        self.steps += 1
        return norm, True

    # -- state ------------------------------------------------------------------------------

    def reset_optimizer(self) -> None:
        """Forget all optimizer state (paper section 4.1.1: after each publication)."""
        self.optimizers.reset()

    def reset_guard(self) -> None:
        """Forget recent losses, when the data changes so much that they say nothing any more."""
        self.guard_state = GuardState(skipped=self.guard_state.skipped)

    def save(self, path: Path, *, tokenizer_from: Path | None, optimizer: bool) -> None:
        """Write a Hugging Face checkpoint directory, whole or not at all; all ranks must call.

        `optimizer` adds the optimizer's state beside, of a single rank only: see `checkpointing`
        for a state that may be sharded.
        """
        model = unsharded(self.model, self.ranks)
        if model is not None:
            save_checkpoint(model, path, tokenizer_from=tokenizer_from)
        if optimizer and self.ranks.size == 1:
            temporary = path / f"{OPTIMIZER_FILE}.tmp"
            state = {"optimizer": self.optimizers.named_state(), "steps": self.steps}
            torch.save(state, temporary)
            temporary.replace(path / OPTIMIZER_FILE)
        self.ranks.barrier()

    def publish(
        self, folder: Path, version: int, *, dtype: torch.dtype | None = None
    ) -> Path | None:
        """Put the weights where engines of this machine find them; all ranks must call.

        Args:
            folder, version: see `shared_weights.publish`.
            dtype: of the engines; None keeps the trainer's.

        Returns:
            What to hand to the engines, on rank 0; None on the others.

        Raises:
            UserError: the folder cannot be written.
        """
        model = unsharded(self.model, self.ranks)
        path = None
        if model is not None:
            config = model.config.to_hf()
            path = publish(model.hf_tensors(), folder, version, dtype=dtype, config=config)
        self.ranks.barrier()
        return path

    def restore_optimizer(self, path: Path) -> bool:
        """Load optimizer state saved by `save`; False when the checkpoint has none."""
        file = path / OPTIMIZER_FILE
        if not file.is_file():
            return False
        state = torch.load(file, weights_only=True)
        if "optimizer" not in state:
            return False
        self.optimizers.load_named_state(state["optimizer"])
        self.steps = int(state["steps"])
        return True

    # -- parts ------------------------------------------------------------------------------

    def _totals(self, samples: Sequence[Sample]) -> Totals:
        longest = max((len(s) for s in samples), default=0)
        limit = self.model.config.max_positions
        if longest > limit:
            raise ValueError(f"a sample has {longest} tokens; the model has {limit} positions")
        totals = batch_totals(samples, self._pass.mtp_depth)
        if totals.weight <= 0 and self.losses.language:
            raise ValueError("no token of the batch has a loss weight")
        return totals

    def _plan(self, samples: Sequence[Sample]) -> list[list[list[int]]]:
        """Sample indices as [rank][micro-batch]."""
        lengths = [len(sample) for sample in samples]
        return plan_micro_batches(lengths, self.config.micro_tokens, self.ranks.size)

    def _weights_in_place(self) -> AbstractContextManager[None]:
        """Whatever stands in for the weights during forward and backward passes."""
        if self._invariant is not None:
            self._invariant.repack()
        return nullcontext() if self._half is None else self._half.swapped_in()

    def _terms(
        self,
        rows: Rows,
        output: PassOutput,
        objective: Objective,
        totals: Totals,
        indices: Sequence[int],
    ) -> Tensor:
        """[5]: total with gradient, then language, mtp, balance and index loss of a micro-batch."""
        zero = torch.zeros((), device=rows.ids.device)
        language = objective(rows, output, indices) if self.losses.language else zero
        mtp = zero
        if output.mtp_logprobs:
            mtp = mtp_loss(output.mtp_logprobs, output.mtp_weights, totals.mtp)
        balance, index = (
            torch.stack(terms).sum() / (totals.tokens * len(terms)) if terms else zero
            for terms in (output.balance, output.index)
        )
        total = (
            language
            + self.losses.mtp_weight * mtp
            + self.losses.balance_weight * balance
            + self.losses.index_weight * index
        )
        return torch.stack((total, language, mtp, balance, index)) * float(rows.counts)

    def _let_through(self, loss: float, norm: float) -> bool:
        if self.guard is None:
            if math.isfinite(loss) and math.isfinite(norm):
                return True
            self.model.zero_grad(set_to_none=True)
            raise NonFiniteLossError(
                f"step {self.steps}: loss {loss}, gradient norm {norm}; weights unchanged"
            )
        judgement = judge(self.guard, self.guard_state, loss, norm)
        self.guard_state = judgement.state
        if judgement.verdict is Verdict.STOP:
            self.model.zero_grad(set_to_none=True)
            raise TrainingStopped(f"training stopped at step {self.steps}: {judgement.reason}")
        return judgement.verdict is Verdict.APPLY

    def _balance_routers(self) -> None:
        """Move each router's selection bias towards balance, by the whole batch's loads."""
        if self.config.router_bias_rate <= 0:
            return
        for bias, load in self._router_loads():
            bias.copy_(updated_router_bias(bias, load, self.config.router_bias_rate))

    def _router_loads(self) -> list[tuple[Tensor, Tensor]]:
        """(selection bias, load [E] over the whole batch) of every router of the model."""
        found = []
        for module in self.model.modules():
            if isinstance(module, Router):
                nothing = torch.zeros_like(module.bias, dtype=torch.int64)
                load = self._pass.loads.get(module, nothing)
                found.append((module.bias, self.ranks.sum(load)))
        return found


def _supervised(totals: Totals) -> Objective:
    def objective(rows: Rows, output: PassOutput, indices: Sequence[int]) -> Tensor:
        return weighted_nll(output.logprobs, rows.weights, totals.weight)

    return objective
