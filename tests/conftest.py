"""What makes the suite the same on every machine, and short on one with several cores.

It knows the tests by the names of their files only.
"""

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples everywhere, and no limit of time for one: a busy machine fails nothing.
# `--hypothesis-profile=default` looks for new examples.
settings.register_profile("same everywhere", deadline=None, derandomize=True)
settings.load_profile("same everywhere")

HERE = Path(__file__).parent
LONGEST = (
    "test_whole_language_run.py",
    "test_run.py",
    "engine/test_engine_soak.py",
    "training/test_training_laws.py",
    "test_replicas.py",
    "test_replicated_run.py",
    "rollout/test_chaos.py",
    "test_loop_run.py",
    "test_serving.py",
    "engine/test_client.py",
    "test_task_process_run.py",
    "test_distilled_run.py",
    "training/test_stage_resume.py",
)
"""Files that take longest, first of all, so that no process is left alone with one at the end."""
for name in LONGEST:
    if not (HERE / name).is_file():
        raise pytest.UsageError(f"tests/conftest.py: LONGEST names {name}, which is not there")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where files are shared among processes, the longest come first; else order is untouched."""
    if not hasattr(config, "workerinput"):
        return
    rank = {HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
