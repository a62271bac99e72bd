"""Where metrics go beside metrics.jsonl, as the recipe says: TensorBoard, Weights & Biases.

Weights & Biases is an optional package that this imports only when a recipe names it. It keeps its
own rules: WANDB_MODE=offline writes to the run directory and nothing leaves the machine.
"""

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.observe.metrics import BoardSink, Sink
from headrace.recipe import Recipe

logger = logging.getLogger(__name__)

_ID_FILE = "wandb-id.txt"


def open_sinks(recipe: Recipe, run_dir: Path) -> list[Sink]:
    """The sinks of `[observe]`.

    Args:
        recipe: the recipe, which Weights & Biases shows as the configuration.
        run_dir: of the run; must exist.

    Raises:
        UserError: wandb is not installed or cannot start.
    """
    opened: list[Sink] = []
    if recipe.observe.wandb is not None:
        opened.append(WandbSink(run_dir, recipe.model_dump(mode="json"), recipe.observe.wandb))
    if recipe.observe.tensorboard:
        opened.append(BoardSink(run_dir))
    return opened


class WandbSink:
    """Rows as history of one Weights & Biases run, which a resumed run continues.

    Every stage counts its own steps, so `STAGE/step` is the x axis of `STAGE/...`.

    Args:
        run_dir: files and the run's id are kept there.
        recipe: the configuration to show.
        project: the project's name.

    Raises:
        UserError: wandb is not installed or cannot start.
    """

    def __init__(self, run_dir: Path, recipe: Mapping[str, Any], project: str) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]  # an optional package
        except ImportError as error:
            raise UserError(
                f'observe.wandb "{project}" needs the package wandb, which is not installed: '
                'run `pip install "headrace[wandb]"`, or leave observe.wandb out'
            ) from error
        id_file = run_dir / _ID_FILE
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        try:
            self._run = wandb.init(
                project=project,
                id=id_file.read_text().strip(),
                name=run_dir.name,
                dir=str(run_dir),
                config=dict(recipe),
                resume="allow",
            )
        except Exception as error:  # the package has many, of several families
            raise UserError(
                f'observe.wandb "{project}" cannot start ({error}); run `wandb login`, set '
                "WANDB_MODE=offline to stay on this machine, or leave observe.wandb out"
            ) from error
        self._stages: set[str] = set()
        self._broken = False

    def scalars(self, stage: str, step: int, metrics: Mapping[str, float], now: float) -> None:
        """See `Sink`. A failure of the service ends the sink, never the run."""
        if self._broken:
            return
        try:
            if stage not in self._stages:
                self._stages.add(stage)
                self._run.define_metric(f"{stage}/step")
                self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            row = {f"{stage}/{name}": value for name, value in metrics.items()}
            self._run.log({**row, f"{stage}/step": step, "time": now})
        except Exception as error:
            self._broken = True
            logger.warning("wandb: no more metrics go there (%s); the run goes on", error)

    def close(self) -> None:
        """Finish the Weights & Biases run."""
        try:
            self._run.finish()
        except Exception as error:
            logger.warning("wandb: did not finish well (%s)", error)
