"""An engine, a trainer and tasks whose work is waiting, for benchmarks of what runs between them.

A decoding slot is held for as long as a call's tokens take at the stated rate, an update takes its
tokens at the trainer's, a tool its drawn time. So the capacities of both sides are known exactly
and cost no cores. What is between them is the product: runner, orchestrator, ledger, loop, stage.
"""

import asyncio
import itertools
import math
import random
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from headrace.cluster.types import Cluster, OnPart, WorkerSpec
from headrace.engines import Placement
from headrace.rollout.record.ledger import Ledger
from headrace.rollout.runner import RolloutRunner
from headrace.rollout.types import Call, FinishReason, Outcome, ParseState, SessionLimits, Span
from headrace.system import System
from headrace.tasks.types import Endpoint, RolloutResult, TaskInstance

TASK = "simulated"
LONGEST_TURNS = 40
"""A rollout is never longer, as agents have a limit, too."""
ROLLOUT_TIMEOUT_S = 600.0


class Rates(NamedTuple):
    """What both sides can do, and what the tasks ask of them. Seconds.

    Attributes:
        slots: calls that the engine decodes at once; more wait, first come first served.
        token_s: of one token in one slot, however many slots are taken.
        update_tokens_per_s: of the trainer.
        save_s: that the trainer needs to hand out its weights; it does nothing else meanwhile.
        load_s: that the engine needs to take weights; it decodes nothing meanwhile.
        latency_s: mean of a tool's time, whatever sigma is.
        sigma: of the logarithm of a tool's time; 0 makes all of them equal.
        turns: median of a rollout's turns.
        turns_sigma: of the logarithm of a rollout's turns.
        tokens: mean of a call's tokens.
    """

    slots: int
    token_s: float
    update_tokens_per_s: float
    save_s: float
    load_s: float
    latency_s: float
    sigma: float
    turns: float
    turns_sigma: float
    tokens: int

    def generation_s(self, tokens: float) -> float:
        """Of so many tokens with every slot taken all the time."""
        return tokens * self.token_s / self.slots

    def training_s(self, tokens: float) -> float:
        """Of the updates over so many tokens."""
        return tokens / self.update_tokens_per_s


class Turn(NamedTuple):
    """One turn of a rollout: tokens to sample, then seconds of its tool."""

    tokens: int
    latency_s: float


def draw_rollout(rates: Rates, seed: int, attempt: int) -> list[Turn]:
    """The turns of one rollout, a function of the arguments; the last one's tool is not run.

    A tool's time is log-normal with mean `latency_s`. Turns and tokens are drawn before any time,
    so rates that differ in sigma alone give rollouts that differ in their times alone.
    """
    rng = random.Random(f"{seed} {attempt}")
    drawn = rng.lognormvariate(math.log(rates.turns), rates.turns_sigma)
    count = max(1, min(LONGEST_TURNS, round(drawn)))
    tokens = [rng.randint(max(1, rates.tokens // 2), 3 * rates.tokens // 2) for _ in range(count)]
    location = math.log(rates.latency_s) - rates.sigma**2 / 2
    return [Turn(n, math.exp(location + rates.sigma * rng.gauss(0.0, 1.0))) for n in tokens]


class SimulatedEngine:
    """Slots that decode at a fixed rate; everything stops while weights are loaded.

    `busy_s` is the work done so far, in seconds of the whole engine: what its slots have decoded,
    divided by their number.
    """

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.weight_version = 0
        self.max_context = 1 << 20
        self.busy_s = 0.0
        self.tokens_sampled = 0
        self._slots = asyncio.Semaphore(rates.slots)
        self._paused_s = 0.0
        self._loading = asyncio.Lock()

    async def sample(self, tokens: int) -> Span:
        """So many tokens, stamped with the version that their first one was sampled from."""
        async with self._slots:
            async with self._loading:
                version, paused = self.weight_version, self._paused_s
            work = tokens * self.rates.token_s
            await asyncio.sleep(work)
            # What was loaded meanwhile has held this call up by as much.
            while True:
                async with self._loading:
                    held_up = self._paused_s - paused
                if held_up <= 0.0:
                    break
                paused += held_up
                await asyncio.sleep(held_up)
            self.busy_s += work / self.rates.slots
            self.tokens_sampled += tokens
        return Span((1,) * tokens, (-1.0,) * tokens, version, "simulated")

    async def load_weights(
        self, path: str, version: int, policy: str = "continue", *, checkpoint: str | None = None
    ) -> None:
        """Pause, then go on with the new version."""
        del path, policy, checkpoint
        async with self._loading:
            if self.weight_version:  # the first weights are there when the stage begins
                await asyncio.sleep(self.rates.load_s)
                self._paused_s += self.rates.load_s
            self.weight_version = version

    async def stats(self) -> dict[str, Any]:
        """See `EngineClient.stats`."""
        return {"tokens_sampled": float(self.tokens_sampled), "busy_s": self.busy_s}


class SimulatedTrainer:
    """A trainer's process as its parent sees it. `updates` holds (begin, end, tokens) of each."""

    name = "trainer"
    pid = 0
    alive = True

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.busy_s = 0.0
        self.updates: list[tuple[float, float, int]] = []
        self._one_at_a_time = asyncio.Lock()

    async def request(
        self,
        method: str,
        payload: dict[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        on_part: OnPart | None = None,
    ) -> Any:
        """What a stage asks of a `TrainerWorker`."""
        del timeout_s, on_part
        payload = payload or {}
        async with self._one_at_a_time:
            if method == "rl":
                return await self._update(payload)
            if method == "save":
                await asyncio.sleep(self.rates.save_s)
                # Not in a thread: that would wait for this one, of which a trainer needs nothing.
                Path(payload["path"]).mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
            return {}

    async def _update(self, payload: dict[str, Any]) -> dict[str, float]:
        weights = [memoryview(s["weights"]).cast("f") for s in payload["samples"]]
        tokens = sum(sum(1 for w in row if w > 0.0) for row in weights)
        versions = [
            payload["version"] - min(v for v in memoryview(s["versions"]).cast("i") if v >= 0)
            for s in payload["samples"]
        ]
        begin = asyncio.get_running_loop().time()
        await asyncio.sleep(self.rates.training_s(tokens))
        self.busy_s += self.rates.training_s(tokens)
        self.updates.append((begin, asyncio.get_running_loop().time(), tokens))
        lag = sum(versions) / len(versions)
        return {
            "trained_tokens": float(tokens),
            "oldest_lag_mean": lag,
            "loss": 0.0,
            "busy_s": self.busy_s,
        }

    async def wait_dead(self) -> None:
        """Never: it has no process."""
        await asyncio.Event().wait()

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Nothing to stop."""
        del grace_s


class SimulatedCluster:
    """Starts the one trainer."""

    def __init__(self, trainer: SimulatedTrainer) -> None:
        self.trainer = trainer

    async def start(self, spec: WorkerSpec) -> SimulatedTrainer:
        """See `Cluster.start`."""
        del spec
        return self.trainer

    async def close(self) -> None:
        """Nothing to close."""


class SimulatedGate:
    """Stands where the gateway does: opens sessions and records their calls in the ledger."""

    def __init__(self, engine: SimulatedEngine, ledger: Ledger) -> None:
        self._engine = engine
        self._ledger = ledger
        self._calls: dict[str, list[Call]] = {}

    def open_session(
        self, session_id: str, *, limits: SessionLimits | None = None, seed: int | None = None
    ) -> str:
        """See `SessionGate`; the key is the id."""
        del limits, seed
        self._calls[session_id] = []
        return session_id

    def exceeded(self, session_id: str) -> str | None:
        """Nothing has limits here."""
        del session_id
        return None

    def refused(self, session_id: str) -> str | None:
        """Nothing is refused here."""
        del session_id
        return None

    async def close_session(self, session_id: str) -> tuple[Call, ...]:
        """See `SessionGate`."""
        return tuple(self._calls.pop(session_id, ()))

    async def complete(self, key: str, tokens: int) -> None:
        """One call of a session, recorded before this returns."""
        begun = asyncio.get_running_loop().time()
        span = await self._engine.sample(tokens)
        calls = self._calls[key]
        messages = [*calls[-1].messages, calls[-1].response] if calls else []
        call = Call(
            id=f"{key}/{len(calls)}",
            session_id=key,
            index=len(calls),
            parent_id=calls[-1].id if calls else None,
            fork_reason=None,
            idempotency_key=None,
            messages=[*messages, {"role": "user", "content": "result"}],
            tools=[],
            renderer_id="simulated",
            prompt_delta=(2, 3, 4),
            spans=(span,),
            finish_reason=FinishReason.STOP,
            parse_state=ParseState.OK,
            response={"role": "assistant", "content": "command"},
            started_at=begun,
            finished_at=asyncio.get_running_loop().time(),
        )
        self._ledger.record_call(call)
        calls.append(call)


class SimulatedTask:
    """Rollouts of `draw_rollout`; half of each group succeeds, so that every group has signal."""

    name = TASK

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.gate: SimulatedGate | None = None
        self._attempts: dict[int, itertools.count[int]] = {}

    def instance(self, seed: int) -> TaskInstance:
        """See `TaskService`."""
        return TaskInstance(self.name, seed, "simulated", 1, 1)

    def train_seed(self, index: int) -> int:
        """Even numbers."""
        return 2 * index

    def evaluation_seed(self, index: int) -> int:
        """Odd numbers."""
        return 2 * index + 1

    def content_id(self, instance: TaskInstance) -> str:
        """Every seed is another problem."""
        return str(instance.seed)

    async def rollout(self, instance: TaskInstance, endpoint: Endpoint) -> RolloutResult:
        """Sample and wait in turns."""
        assert self.gate is not None
        attempt = next(self._attempts.setdefault(instance.seed, itertools.count()))
        turns = draw_rollout(self.rates, instance.seed, attempt)
        for number, turn in enumerate(turns, 1):
            await self.gate.complete(endpoint.api_key, turn.tokens)
            if number < len(turns):
                await asyncio.sleep(turn.latency_s)
        return RolloutResult(Outcome.OK, {"reward": float(attempt % 2)})


class Simulation(msgspec.Struct, frozen=True):
    """The parts of a simulated run."""

    engine: SimulatedEngine
    trainer: SimulatedTrainer
    task: SimulatedTask
    cluster: Cluster
    system: System


def simulate(rates: Rates, ledger: Ledger) -> Simulation:
    """Parts wired as `open_system` wires the real ones. Call it in a running event loop."""
    engine, trainer, task = SimulatedEngine(rates), SimulatedTrainer(rates), SimulatedTask(rates)
    gate = task.gate = SimulatedGate(engine, ledger)
    cluster = cast("Cluster", SimulatedCluster(trainer))
    runner = RolloutRunner(
        tasks={task.name: task},
        gate=gate,
        ledger=ledger,
        base_url="",
        model=TASK,
        timeout_s=ROLLOUT_TIMEOUT_S,
    )
    system = System(
        cluster=cluster,
        cores=Placement((0,), (0,), (0,)),
        engine=cast("Any", engine),
        models={},
        server=cast("Any", None),
        runner=runner,
        renderer=cast("Any", None),
    )
    return Simulation(engine, trainer, task, cluster, system)
