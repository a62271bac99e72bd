"""A run directory as its readers see it: recipe, summary, metrics and ledger, as far as they exist.

Runs are read while they go on and after they crashed, so every part may be missing; only a
directory with none of them is no run. The comparisons between evaluations are decided here, so that
the report and `headrace show` say the same.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import UserError
from headrace.observe.measurements import Measurement, is_measurement, measurement_of
from headrace.observe.metrics import MetricRow, read_metrics
from headrace.observe.statistics import PairedDifference, paired_difference
from headrace.observe.summary import FILE_NAME as SUMMARY_FILE
from headrace.observe.summary import read_summary
from headrace.observe.units import label_of, several_tasks, stage_of
from headrace.rollout.record.reading import FILE_NAME as LEDGER_FILE
from headrace.rollout.record.reading import LedgerReader
from headrace.rollout.record.rows import SessionSummary

RECIPE_FILE = "recipe.json"
_NO_ROLLOUT = "no rollout was recorded yet"


class Comparison(msgspec.Struct, frozen=True):
    """Two evaluations of the same instances and how the second differs.

    Attributes:
        stage: the stage the comparison is about.
        kind: its kind.
        before: the evaluation of the model it is measured against.
        after: the evaluation of the model after the stage.
        change: the paired difference.
        rival: "" when `before` is what the stage started from, else the other stage that started
            from the same model and is measured against.
    """

    stage: str
    kind: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    change: PairedDifference
    rival: str = ""

    @property
    def task(self) -> str:
        """What both evaluations measured."""
        return str(self.after.get("task", "?"))


class Span(msgspec.Struct, frozen=True):
    """When a stage logged, in seconds since the run started."""

    stage: str
    start: float
    end: float


class Run:
    """What a run directory holds. Close it, or use it as a context manager.

    Attributes:
        path: the directory.
        recipe: the resolved recipe as a dict; empty when it was not written yet.
        summary: summary.json; empty when it was not written yet.
        rows: metrics, oldest first.
        ledger: the evidence, or None when there is none that can be read.
        ledger_problem: why not, for people; "" otherwise.
    """

    def __init__(
        self,
        path: Path,
        *,
        rows: list[MetricRow] | None = None,
        ledger: LedgerReader | None = None,
    ) -> None:
        """Read the directory; `rows` and `ledger` are given by who has read them already."""
        self.path = path
        self.recipe = _read_object(path / RECIPE_FILE)
        self.summary = read_summary(path) or {}
        self.rows: list[MetricRow] = read_metrics(path) if rows is None else rows
        self.ledger: LedgerReader | None = ledger
        self.ledger_problem = ""
        if ledger is not None:
            return
        if (path / LEDGER_FILE).is_file():
            try:
                self.ledger = LedgerReader.open(path)
            except UserError as error:
                self.ledger_problem = str(error)
        else:
            self.ledger_problem = _NO_ROLLOUT

    def close(self) -> None:
        """Close the ledger. Safe to repeat."""
        if self.ledger is not None:
            self.ledger.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The recipe's name, else the directory's."""
        return str(self.recipe.get("name") or self.summary.get("recipe") or self.path.name)

    @property
    def status(self) -> str:
        """The summary's status; "unfinished" for a run that has not written one."""
        return str(self.summary.get("status") or "unfinished")

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        """Records of evaluations by rollouts on a task, in order."""
        return [e for e in self._records() if not is_measurement(e)]

    @property
    def measurements(self) -> list[Measurement]:
        """What was measured of the model itself, in order."""
        return [measurement_of(e) for e in self._records() if is_measurement(e)]

    @property
    def has_rollouts(self) -> bool:
        """Whether any rollout was recorded."""
        return self.ledger is not None and bool(self.ledger.outcome_counts())

    @property
    def missing_rollouts(self) -> str:
        """Why no rollout can be shown; "" when some can, or when the recipe asks for none."""
        if self.has_rollouts:
            return ""
        damaged = self.ledger is None and (self.path / LEDGER_FILE).is_file()
        stages = self.recipe.get("stages") or []
        wanted = any(s.get("kind") == "agentic_rl" for s in stages) or self.recipe.get("evaluation")
        if stages and not wanted and not damaged:
            return ""
        return self.ledger_problem or _NO_ROLLOUT

    def stages(self) -> list[dict[str, Any]]:
        """Recipe stages in order, each {name, kind, wall_s or None, start_from}."""
        walls = {s.get("name"): s.get("wall_s") for s in self.summary.get("stages") or []}
        listed = [dict(stage) for stage in self.recipe.get("stages") or []]
        if not listed:
            # Measurements log rows, too, all at step 0.
            logged = dict.fromkeys(
                row.stage
                for row in self.rows
                if row.step > 0 and not row.stage.startswith("evaluate ")
            )
            names = list(walls) or list(logged)
            listed = [{"name": name, "kind": self._guess_kind(str(name))} for name in names]
        previous = "start"
        for stage in listed:
            name = stage["name"]
            stage["wall_s"] = walls.get(name, self._elapsed(name))
            stage["start_from"] = stage.get("start_from") or previous
            previous = name
        return listed

    def rows_of(self, stage: str) -> list[MetricRow]:
        """Metrics rows of one stage, steps rising.

        A stage that went on from a checkpoint logs the steps after it again; the later rows count.
        """
        found: list[MetricRow] = []
        for row in self.rows:
            if row.stage == stage:
                while found and found[-1].step >= row.step:
                    found.pop()
                found.append(row)
        return found

    def spans(self) -> list[Span]:
        """When each stage that logged anything ran, in order."""
        found: list[Span] = []
        for stage in self.stages():
            rows = self.rows_of(stage["name"])
            if not rows:
                continue
            # A first row is logged after its step, so the stage began about one step earlier.
            lead = (rows[-1].elapsed - rows[0].elapsed) / max(len(rows) - 1, 1)
            previous = found[-1].end if found else 0.0
            start = max(rows[0].elapsed - lead, previous)
            found.append(Span(stage["name"], start, rows[-1].elapsed))
        return found

    def measured_at(self) -> dict[str, float]:
        """When each measured model came to be, in seconds since the run started, by label.

        Evaluations are drawn there: when their stage ended, "start" at 0, "rl@20" when stage rl
        had made 20 updates.
        """
        found = {"start": 0.0} | {span.stage: span.end for span in self.spans()}
        for label in {stage_of(record) for record in self.evaluations} - found.keys():
            stage, _, step = label.partition("@")
            rows = self.rows_of(stage) if step.isdigit() else []
            at = next((row.elapsed for row in rows if row.step >= int(step)), None)
            if at is not None:
                found[label] = at
        return found

    def label(self, evaluation: Mapping[str, Any]) -> str:
        """What an evaluation measured, in words; with its task where there are several."""
        return label_of(evaluation, task=several_tasks(self.evaluations))

    def comparisons(self) -> list[Comparison]:
        """Of each task, every stage against the model it started from, then against rivals with
        that start."""
        by_task: dict[str, dict[str, Mapping[str, Any]]] = {}
        for record in self.evaluations:
            # The recipe's own temperature is measured first; a greedy record never replaces it.
            found = by_task.setdefault(str(record.get("task", "?")), {})
            found.setdefault(stage_of(record), record)
        return [c for found in by_task.values() for c in self._comparisons(found)]

    def _comparisons(self, found: Mapping[str, Mapping[str, Any]]) -> list[Comparison]:
        """Of one task's evaluations by stage."""
        result: list[Comparison] = []
        stages = [s for s in self.stages() if s["name"] in found]
        for stage in stages:
            name, kind = stage["name"], str(stage.get("kind", ""))
            before = found.get(stage["start_from"])
            if before is not None:
                change = paired_difference(before, found[name])
                if change is not None:
                    result.append(Comparison(name, kind, before, found[name], change))
        for stage in stages:
            if stage.get("kind") != "agentic_rl":
                continue
            for other in stages:
                if other["name"] != stage["name"] and other["start_from"] == stage["start_from"]:
                    a, b = found[other["name"]], found[stage["name"]]
                    change = paired_difference(a, b)
                    if change is not None:
                        kind = "agentic_rl"
                        result.append(Comparison(stage["name"], kind, a, b, change, other["name"]))
        return result

    def headlines(self) -> list[Comparison]:
        """The comparison of each task to lead with: the last RL stage's, else the last stage's."""
        own: dict[str, list[Comparison]] = {}
        for comparison in self.comparisons():
            if not comparison.rival:
                own.setdefault(comparison.task, []).append(comparison)
        return [
            ([c for c in found if c.kind == "agentic_rl"] or found)[-1] for found in own.values()
        ]

    def headline(self) -> Comparison | None:
        """The first task's of `headlines`."""
        return next(iter(self.headlines()), None)

    def _records(self) -> list[Mapping[str, Any]]:
        return [e for e in self.summary.get("evaluations") or [] if isinstance(e, dict)]

    def _guess_kind(self, stage: str) -> str:
        rows = self.rows_of(stage)
        return "agentic_rl" if any("reward_mean" in row.metrics for row in rows) else "sft"

    def _elapsed(self, stage: str) -> float | None:
        """Seconds between a stage's first and last row: the least it took."""
        rows = self.rows_of(stage)
        return rows[-1].elapsed - rows[0].elapsed if rows else None


def open_run(run_dir: Path) -> Run:
    """Read a run directory.

    Raises:
        UserError: no such directory, or nothing in it comes from a run.
    """
    return Run(require_run(run_dir))


def require_run(run_dir: Path) -> Path:
    """The directory, when something in it comes from a run.

    Raises:
        UserError: it does not, or there is no such directory.
    """
    path = Path(run_dir)
    if not path.is_dir():
        near = _nearest(path.name, _siblings(path.parent))
        raise UserError(f"run {path}: no such directory{near}")
    if not any((path / name).exists() for name in (RECIPE_FILE, SUMMARY_FILE, LEDGER_FILE)):
        inside = _siblings(path)
        hint = f"; it holds the runs {', '.join(inside[:5])}" if inside else ""
        raise UserError(
            f"run {path}: not a run directory (no {RECIPE_FILE}, {SUMMARY_FILE} or "
            f"{LEDGER_FILE}){hint}"
        )
    return path


def find_session(ledger: LedgerReader, wanted: str) -> SessionSummary:
    """The session whose id is `wanted` or starts with it.

    Raises:
        UserError: none does, or several do.
    """
    known: list[str] = []
    matches: list[SessionSummary] = []
    for session in ledger.sessions():
        if session.id == wanted:
            return session
        known.append(session.id)
        if session.id.startswith(wanted):
            matches.append(session)
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(s.id for s in matches[:3])
        raise UserError(
            f"trajectory {wanted}: {len(matches)} ids start with it ({names} ...); give more of it"
        )
    raise UserError(
        f"trajectory {wanted}: no such id{_nearest(wanted, known)}; "
        "list them with `headrace show RUN trajectories`"
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f'; did you mean "{near[0]}"?' if near else ""


def _siblings(folder: Path) -> list[str]:
    """Names of the runs in `folder`, newest name last."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    return [e.name for e in entries if (e / RECIPE_FILE).exists() or (e / SUMMARY_FILE).exists()]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise UserError(
            f"{path}: cannot be read as JSON ({error}); restore or remove it"
        ) from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object; restore or remove it")
    return data
