"""The table of a task service: where it runs, and how one that runs elsewhere is dealt with."""

import re
from typing import Any, Literal

from pydantic import ConfigDict, field_validator, model_validator

from headrace.recipe.tables import Positive, Seconds, Table

REGISTERS = "registers"
"""Instead of the address of a service that announces itself."""


class TaskTable(Table):
    """A task service: where it runs. Every further key is an option of the service, which checks it
    ([tasks.md](tasks.md)); [task-services.md](task-services.md) describes the rest.
    """

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    where: Literal["run", "process"] = "run"
    """"run": in the run's own process; "process": in a process of its own, which is started again
    when it dies."""
    implementation: str | None = None
    """"package.module:Class", a task service of your own; its options are the class's keyword
    arguments. By default the service that headrace has under the table's name."""
    service: str | None = None
    """Instead: address of a service that runs elsewhere, e.g. "http://10.0.0.7:8700", or
    "registers": it announces itself, see `gateway.register_port`. Options here must be those it is
    served with."""
    token_env: str | None = None
    """Environment variable that holds the token of that service; needed where it registers."""
    register_s: Seconds = 300.0
    """Longest wait at the start of a run for a service that registers."""
    rollouts: Positive = 256
    """Most rollouts in flight at a service in a process of its own or elsewhere."""
    answer_s: Seconds = 10.0
    """Longest wait for an answer of such a service; one that takes longer hangs."""
    poll_s: Seconds = 20.0
    """How long one request waits for the end of a rollout before it asks again."""
    start_s: Seconds = 60.0
    """Longest wait for a process to begin to serve."""

    @field_validator("implementation")
    @classmethod
    def _is_path(cls, path: str | None) -> str | None:
        if path is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", path):
            raise ValueError('write it as "package.module:Class"')
        return path

    @model_validator(mode="after")
    def _one_place(self) -> "TaskTable":
        if self.service is not None and (self.where != "run" or self.implementation is not None):
            raise ValueError(
                "service names one that runs elsewhere; leave out where and implementation"
            )
        if self.token_env is not None and self.service is None:
            raise ValueError("token_env is the token of a service elsewhere; give service, too")
        if self.registers and self.token_env is None:
            raise ValueError(
                "whoever registers has to show a token; give token_env, the name of the "
                "environment variable that holds it"
            )
        return self

    @property
    def registers(self) -> bool:
        """Whether the service announces itself."""
        return self.service == REGISTERS

    @property
    def options(self) -> dict[str, Any]:
        """Every key that is not one of this table's own."""
        return dict(self.model_extra or {})
