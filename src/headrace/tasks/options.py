"""Options that tasks with an agent of their own have in common, whatever the agent does."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

OutputChars = Annotated[int, Field(ge=16, le=100_000)]
"""How much of a tool's output a model is shown."""


class AgentOptions(BaseModel):
    """Options of an agent that asks a model over HTTP and shows it the output of tools."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    output_chars: OutputChars = 80
    """Characters of a command's output that the model sees."""
    request_retries: int = Field(default=3, ge=0, le=10)
    """Repetitions of a failed model request before the rollout counts as an environment failure."""
