"""The protocol between a run and a task service elsewhere: what goes over HTTP, as types.

docs/task-services.md describes the routes. Both sides read these types strictly; nothing here does
I/O or knows how a rollout is made.
"""

from typing import Annotated, Any, Literal

import msgspec

from headrace.tasks.types import Demonstration, Endpoint, RolloutResult, TaskInstance

PROTOCOL = 1
"""Version of everything here. A service of another version is refused before anything starts."""
VERSION_HEADER = "x-headrace-tasks"
"""Every request carries the protocol's version in it."""
MOST_SEEDS = 256
"""Seeds or instances of one request."""
LONGEST_ID = 128

Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
SeedList = Annotated[list[Seed], msgspec.Meta(min_length=1, max_length=MOST_SEEDS)]


class Description(msgspec.Struct, frozen=True):
    """What a service is: GET /v1/service.

    Attributes:
        protocol: PROTOCOL of whoever serves.
        name: of the task.
        options: values in effect, as JSON; a recipe that names some of them must agree.
        schema: JSON schema of the options.
        demonstrations: whether it can make demonstrations.
        rollouts: most in flight at once; one more is a 429.
        software: what serves, for people.
    """

    protocol: int
    name: str
    options: dict[str, Any] = {}
    schema: dict[str, Any] = {}
    demonstrations: bool = False
    rollouts: Annotated[int, msgspec.Meta(ge=1)] = 1
    software: str = ""


class Health(msgspec.Struct, frozen=True):
    """GET /v1/health, which needs no token. `rollouts` are in flight."""

    status: Literal["ok"]
    rollouts: int


class SeedsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/seeds: the seeds of positions start .. start + count - 1."""

    split: Literal["train", "evaluation"]
    start: Annotated[int, msgspec.Meta(ge=0)]
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_SEEDS)]


class SeedsAnswer(msgspec.Struct, frozen=True):
    """The seeds, in order."""

    seeds: list[Seed]


class InstancesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/instances: the instances of these seeds."""

    seeds: SeedList


class NamedInstance(msgspec.Struct, frozen=True):
    """An instance and the name of what it asks; see `TaskService.content_id`."""

    instance: TaskInstance
    content_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class InstancesAnswer(msgspec.Struct, frozen=True):
    """One instance per seed asked for, in the same order."""

    instances: list[NamedInstance]


class StartRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PUT /v1/rollouts/ID: attempt `instance` with the model at `endpoint`. The same request again
    starts nothing."""

    instance: TaskInstance
    endpoint: Endpoint


class RolloutState(msgspec.Struct, frozen=True):
    """How a rollout is doing: the answer to PUT, GET and DELETE of /v1/rollouts/ID.

    Attributes:
        id: the one asked for.
        status: "done" has a result.
        content_id: of the instance attempted; "" while it is not known yet.
        result: see RolloutResult.
    """

    id: str
    status: Literal["running", "done"]
    content_id: str = ""
    result: RolloutResult | None = None


class DemonstrationsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/demonstrations; the arguments of a service's `demonstrations`."""

    count: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    seed: int
    quality: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class DemonstrationsAnswer(msgspec.Struct, frozen=True):
    """Scripted conversations."""

    demonstrations: list[Demonstration]


class Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PUT /v1/services/ID at a run's register: a service says that it is there.

    Attributes:
        task: that is served.
        url: where the run reaches it.
        options: in effect, as in `Description`; a recipe that names some of them must agree.
        software: what serves, for people.
    """

    task: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    url: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    options: dict[str, Any] = {}
    software: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Standing(msgspec.Struct, frozen=True):
    """How a service stands with a run: the answer to an announcement.

    Attributes:
        run: name of the recipe.
        state: "looking" until the run has asked the service what it is; "serving" gets rollouts;
            "unreachable" does not, `why` says what was wrong.
        why: in words; "" unless the state is "unreachable".
        every_s: announce again after so many seconds; after several times that, it is left out.
    """

    run: str
    state: Literal["looking", "serving", "unreachable"]
    why: str = ""
    every_s: float = 2.0


class Farewell(msgspec.Struct, frozen=True):
    """The answer to DELETE /v1/services/ID; `known` says whether it was announced."""

    known: bool


class Problem(msgspec.Struct, frozen=True):
    """Why a request was refused: a code for programs, words for people."""

    code: str
    message: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: Problem
