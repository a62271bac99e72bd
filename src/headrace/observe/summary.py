"""summary.json: what a run is and what came out of it, in one small file.

The loop rewrites it after every step worth keeping, so a run that was killed still has the latest
complete one; readers never see half a file.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.observe.disk import full_disk

FILE_NAME = "summary.json"


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Replace the run's summary in one atomic step.

    Args:
        run_dir: the run directory; must exist.
        summary: JSON-compatible. Keys in use: recipe, seed, status, ended, wall_s, machine, stages
            [{name, kind, wall_s}], evaluations, laws {law: "held" | "broken"}.

    Raises:
        UserError: the disk is full or the directory cannot be written.
    """
    target = run_dir / FILE_NAME
    staged = run_dir / f".{FILE_NAME}.{os.getpid()}"
    text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
    try:
        with staged.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(target)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise full_disk(error, target) from error
    return target


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The run's summary, or None when none was written yet.

    Raises:
        UserError: the file is there but is no JSON object.
    """
    path = run_dir / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(
            f"{path}: cannot be read as JSON ({error}); restore or remove it"
        ) from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object; restore or remove it")
    return data
