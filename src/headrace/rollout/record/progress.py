"""What a run achieved so far: stages, published versions, durable checkpoints, evaluations, state.

The writing half of the ledger that is not about sessions; `ledger.Ledger` builds on it. Every
method is one transaction, durable against SIGKILL when it returns.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.rollout.record.evidence import encode_json
from headrace.rollout.record.reading import LedgerReader
from headrace.rollout.record.rows import Evaluation
from headrace.rollout.record.store import Store


class ProgressRecord(LedgerReader):
    """A ledger whose stages, weights and evaluations can be written. Use from one thread."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(store)
        self._clock = clock

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Several methods as one: all of them happen or none (e.g. a cursor and its dispatch).

        Never await inside: other coroutines' writes would join the transaction.
        """
        with self._store.transaction():
            yield

    def stage_started(self, stage: str) -> None:
        """A stage begins. Repeating it after a resume keeps the first time.

        Raises:
            ValueError: the stage is finished.
        """
        with self.transaction():
            if self._row("SELECT 1 FROM stages WHERE name = ? AND finished_at IS NOT NULL", stage):
                raise ValueError(f"stage {stage} is finished and cannot start again")
            self._store.execute(
                "INSERT INTO stages (name, started_at) VALUES (?, ?) ON CONFLICT DO NOTHING",
                (stage, self._clock()),
            )

    def publish(self, stage: str, version: int, step: int, path: str | Path) -> None:
        """Weights of `step` went to the engines as `version`.

        Raises:
            ValueError: versions and steps do not rise together.
        """
        with self.transaction():
            if self._row(
                "SELECT 1 FROM publications WHERE stage = ?1 AND (version >= ?2 OR step > ?3)",
                stage,
                version,
                step,
            ):
                raise ValueError(
                    f"publication of version {version}, step {step} in stage {stage} is not newer "
                    "than those before"
                )
            self._store.execute(
                "INSERT INTO publications VALUES (?, ?, ?, ?, ?)",
                (stage, version, step, str(path), self._clock()),
            )

    def checkpointed(self, stage: str, step: int, path: str | Path) -> None:
        """A durable checkpoint of `step` exists at `path`; batches up to it are final.

        Raises:
            ValueError: not newer than the last, or not the step of a committed batch (in a stage
                with batches): a checkpoint inside a batch would train its first part twice.
        """
        with self.transaction():
            row = self._row(
                "SELECT (SELECT COUNT(*) FROM batches WHERE stage = ?1), "
                "EXISTS (SELECT 1 FROM batches WHERE stage = ?1 AND step = ?2), "
                "EXISTS (SELECT 1 FROM checkpoints WHERE stage = ?1 AND step >= ?2)",
                stage,
                step,
            )
            assert row is not None
            batches, committed, superseded = row
            if superseded or (batches and not committed and step != 0):
                raise ValueError(
                    f"checkpoint of step {step} in stage {stage} is not newer than the last one or "
                    "not at the end of a committed batch"
                )
            self._store.execute(
                "INSERT INTO checkpoints VALUES (?, ?, ?, ?)",
                (stage, step, str(path), self._clock()),
            )

    def put_state(self, name: str, value: Any) -> None:
        """Keep a small JSON-compatible value (a cursor, a seed), replacing the former one."""
        with self.transaction():
            self._store.execute(
                "INSERT INTO state VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = ?2",
                (name, encode_json(value)),
            )

    def put_evaluation(self, evaluation: Evaluation) -> None:
        """Keep the result of an evaluation; the same label and task replaces the former one."""
        e = evaluation
        with self.transaction():
            self._store.execute(
                "INSERT INTO evaluations VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) ON CONFLICT "
                "(label, task) DO UPDATE SET stage = ?3, n = ?4, success = ?5, low = ?6, "
                "high = ?7, detail = ?8, at = ?9",
                (
                    e.label,
                    e.task,
                    e.stage,
                    e.n,
                    e.success,
                    e.low,
                    e.high,
                    encode_json(e.detail),
                    self._clock(),
                ),
            )

    def _row(self, sql: str, *parameters: Any) -> tuple[Any, ...] | None:
        rows = self._store.execute(sql, parameters)
        return rows[0] if rows else None
