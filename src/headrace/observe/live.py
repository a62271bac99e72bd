"""The live view of a run in a terminal, and the plain log that replaces it everywhere else.

It only shows what it is told; it reads no files and knows no rooms. Frames are drawn by rich's own
thread once a second, so the loop that reports pays only for storing a number.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.observe.braille import bar, curve
from headrace.observe.difficulty import difficulty_words
from headrace.observe.fates import failure_metrics, failure_words
from headrace.observe.live_tasks import task_table, task_words, tasks_in
from headrace.observe.measurements import Measure, Measurement, measurement_of
from headrace.observe.units import (
    after_words,
    count,
    duration,
    interval,
    label_of,
    loss_name,
    percent,
    short,
    supervised_numbers,
)

_HISTORY = 4096
"""Rows kept for the curve; older ones are thinned, so memory stays bounded on long runs."""
_MEASURED_STAGES = 2
"""Stages whose measurements the view shows, the newest."""


class _Stage:
    """What is known about one stage while the run goes on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = ""
        self.total: float | None = None
        self.unit = "s"
        self.fraction = 0.0
        self.told_at: float | None = None
        self.started: float | None = None
        self.wall_s: float | None = None
        self.earlier = False
        self.step = 0
        self.skipped = 0.0
        self.failures: Counter[str] = Counter()
        self.latest: dict[str, float] = {}
        self.curve: list[float] = []


class LiveView:
    """Context manager that shows a run's progress.

    Args:
        recipe_name: for the title.
        stages: stage names in order; a stage that starts without being listed is added.
        run_dir: for the title.
        enabled: True draws the live view, False logs plain lines, None decides by the terminal.
        budgets: seconds each stage may use, where known, for the remaining time.
        tasks: what is evaluated; where there are several, evaluations name theirs.
        console: where to draw; stdout by default.
        log_every_s: least seconds between plain progress lines.
        clock: monotonic seconds; replaced in tests.
    """

    def __init__(
        self,
        recipe_name: str,
        stages: Sequence[str],
        run_dir: Path,
        enabled: bool | None = None,
        *,
        budgets: Mapping[str, float] | None = None,
        tasks: Sequence[str] = (),
        console: Console | None = None,
        log_every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recipe = recipe_name
        self._run_dir = run_dir
        self._stages = [_Stage(name) for name in stages]
        self._budgets = dict(budgets or {})
        self._names_tasks = len(tasks) > 1
        self._console = console or Console()
        self._fancy = self._console.is_terminal if enabled is None else enabled
        self._log_every_s = log_every_s
        self._clock = clock
        self._begun = clock()
        self._last_line = -float("inf")
        self._current: _Stage | None = None
        self._evaluations: list[Mapping[str, Any]] = []
        self._measured: dict[str, list[Measurement]] = {}
        self._messages: deque[str] = deque(maxlen=2)
        self._lock = threading.Lock()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._fancy:
            self._live = Live(
                get_renderable=self.render, console=self._console, refresh_per_second=1
            )
            self._live.start()
        else:
            names = ", ".join(stage.name for stage in self._stages)
            self._line(f"headrace {self._recipe}: stages {names}; run directory {self._run_dir}")
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._finish_current()
        if self._live is not None:
            self._live.stop()
            self._live = None

    # -- what the loop reports -------------------------------------------------------------------

    def stage_started(self, name: str, kind: str, total: float | None, unit: str = "s") -> None:
        """A stage begins; the one before it ends.

        Args:
            name: stage name.
            kind: as in the recipe, or "evaluation"; decides which curve is drawn.
            total: its budget in `unit`, if known.
            unit: "s" for seconds, else what is counted, e.g. "updates".
        """
        with self._lock:
            self._finish_current()
            stage = next((s for s in self._stages if s.name == name), None)
            begun = [i for i, s in enumerate(self._stages) if s.started is not None or s.earlier]
            if stage is None:
                stage = _Stage(name)
                self._stages.insert(begun[-1] + 1 if begun else 0, stage)
            else:
                # On a resume, stages that are passed over were finished by an earlier process.
                for passed in self._stages[: self._stages.index(stage)]:
                    passed.earlier = passed.earlier or passed.started is None
            stage.kind, stage.total, stage.unit = kind, total, unit
            stage.started, stage.wall_s, stage.fraction = self._clock(), None, 0.0
            self._current = stage
        if not self._fancy:
            budget = "" if total is None else f", budget {_amount(total, unit)}"
            self._line(f"stage {name} ({kind}) started{budget}")

    def stage_finished(self) -> None:
        """The current stage is over, and nothing else has begun yet."""
        with self._lock:
            self._finish_current()

    def progress(self, fraction: float) -> None:
        """How much of the current stage is done, in [0, 1]."""
        with self._lock:
            if self._current is not None:
                self._current.fraction = min(max(fraction, 0.0), 1.0)
                self._current.told_at = self._clock()
        self._maybe_line()

    def metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """One metrics row, with the names that metrics.jsonl uses."""
        with self._lock:
            target = next((s for s in self._stages if s.name == stage), None)
            if target is None:
                return
            target.step = step
            target.skipped += metrics.get("skipped", 0.0)
            target.failures.update(failure_metrics(metrics))
            target.latest.update(metrics)
            value = metrics.get("reward_mean" if target.kind == "agentic_rl" else "loss")
            # A skipped step may have had a loss that is no number.
            if value is not None and math.isfinite(value):
                target.curve.append(value)
                if len(target.curve) > _HISTORY:
                    target.curve = target.curve[::2]
        self._maybe_line()

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """A finished evaluation (the record that summary.json keeps)."""
        with self._lock:
            self._evaluations.append(record)
        if not self._fancy:
            self._line(f"evaluation {_evaluation_words(record, self._label(record))}")

    def measurement(self, record: Mapping[str, Any]) -> None:
        """A finished measurement (the record that summary.json keeps)."""
        one = measurement_of(record)
        with self._lock:
            self._measured.setdefault(one.after, []).append(one)
        if not self._fancy:
            sure = "" if one.bounds is None else f"{interval(*one.bounds)}, "
            words = f"{one.task} {after_words(one.after)}: {one.words}"
            self._line(f"{words} ({sure}n={count(one.n)})")

    def message(self, text: str) -> None:
        """A line worth reading: restarts, warnings, where the report is."""
        with self._lock:
            self._messages.append(text)
        if not self._fancy:
            self._line(text)

    # -- plain log -------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self._last_line = self._clock()
        stamp = duration(self._last_line - self._begun)
        self._console.print(
            f"[{stamp:>7}] {text}", markup=False, highlight=False, soft_wrap=True, emoji=False
        )

    def _maybe_line(self) -> None:
        if self._fancy or self._clock() - self._last_line < self._log_every_s:
            return
        with self._lock:
            stage = self._current
            if stage is None:
                return
            parts = [f"{stage.name} {percent(stage.fraction, 0)}", *_plain_numbers(stage)]
            left = self._stage_left(stage)
            if left is not None:
                parts.append(f"left {duration(left)}")
        self._line(" · ".join(parts))

    # -- state -----------------------------------------------------------------------------------

    def _finish_current(self) -> None:
        stage = self._current
        if stage is not None and stage.started is not None:
            stage.wall_s = self._clock() - stage.started
        self._current = None

    def _stage_left(self, stage: _Stage) -> float | None:
        """Seconds until `stage` ends, or None while that cannot be told."""
        if stage.started is None:
            return self._budgets.get(stage.name)
        spent = self._clock() - stage.started
        if stage.unit == "s" and stage.total is not None:
            if stage.told_at is None:
                return max(stage.total - spent, 0.0)
            # By what was told, as an earlier process may have spent a part of it.
            return max(stage.total * (1 - stage.fraction) - (self._clock() - stage.told_at), 0.0)
        if stage.fraction < 0.02:
            return None
        return spent * (1 - stage.fraction) / stage.fraction

    def _run_left(self) -> float | None:
        """Seconds until the last stage ends, or None when a stage's length is unknown."""
        ahead = [s for s in self._stages if s.wall_s is None and not s.earlier]
        left = [self._stage_left(s) for s in ahead]
        known = [x for x in left if x is not None]
        return sum(known) if known and len(known) == len(left) else None

    # -- drawing ---------------------------------------------------------------------------------

    def render(self) -> RenderableType:
        """The view as it is now."""
        with self._lock:
            width = min(self._console.width, 120)
            inner = width - 4
            shown = self._shown_stage()
            parts: list[RenderableType] = [self._stage_table()]
            if shown is not None and shown.curve:
                parts += [Text(), _chart(shown, inner)]
            if shown is not None and shown.latest:
                parts += [Text(), _numbers(shown, inner)]
            if self._measured:
                parts += [Text(), _measured_table(self._measured)]
            if self._evaluations:
                parts += [Text(), *self._evaluation_lines()]
            parts += [Text(m, style="dim", overflow="fold") for m in self._messages]
            left = self._run_left()
            clock = duration(self._clock() - self._begun) + " elapsed"
            if left is not None and self._current is not None:
                clock += f" · about {duration(left)} left"
            return Panel(
                Group(*parts),
                title=Text.assemble(("headrace", "bold cyan"), " · ", (self._recipe, "bold")),
                subtitle=Text(clock, style="dim"),
                title_align="left",
                subtitle_align="right",
                border_style="cyan",
                width=width,
                padding=(0, 1),
            )

    def _label(self, record: Mapping[str, Any]) -> str:
        return label_of(record, task=self._names_tasks)

    def _evaluation_lines(self) -> list[Text]:
        """The newest evaluations, below one another."""
        shown = [(e, self._label(e)) for e in self._evaluations[-6:]]
        width = max(24, *(len(label) for _, label in shown))
        return [_evaluation_line(e, f"{label:<{width}}") for e, label in shown]

    def _shown_stage(self) -> _Stage | None:
        """The stage whose curve is drawn: the running one, else the last with rows."""
        if self._current is not None and self._current.curve:
            return self._current
        return next((s for s in reversed(self._stages) if s.curve), None)

    def _stage_table(self) -> Table:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=1)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
        for stage in self._stages:
            if stage.kind == "evaluation" and stage.wall_s is not None:
                continue  # its result has a line of its own
            table.add_row(*self._stage_row(stage))
        return table

    def _stage_row(self, stage: _Stage) -> list[Text]:
        if stage.earlier:
            return [Text("✓", "green"), Text(stage.name), Text(), Text("finished earlier", "dim")]
        if stage.started is None:
            budget = self._budgets.get(stage.name)
            words = "" if budget is None else f"up to {duration(budget)}"
            return [Text("·", "dim"), Text(stage.name, "dim"), Text(), Text(words, "dim")]
        spent = (self._clock() if stage.wall_s is None else 0.0) - stage.started
        if stage.wall_s is not None:
            words = f"{_steps(stage)}{duration(stage.wall_s)}"
            return [Text("✓", "green"), Text(stage.name), Text(), Text(words, "dim")]
        filled = round(stage.fraction * 24)
        track = Text.assemble(("━" * filled, "cyan"), ("━" * (24 - filled), "grey37"))
        track.append(f" {percent(stage.fraction, 0):>4}")
        left = self._stage_left(stage)
        words = f"{_steps(stage)}{duration(spent)}"
        words += "" if left is None else f" · {duration(left)} left"
        return [Text("▸", "bold cyan"), Text(stage.name, "bold"), track, Text(words)]


def _amount(total: float, unit: str) -> str:
    return duration(total) if unit == "s" else f"{count(total)} {unit}"


def _steps(stage: _Stage) -> str:
    if not stage.step:
        return ""
    noun = "update" if stage.kind == "agentic_rl" else "step"
    return f"{noun} {count(stage.step)} · "


def _evaluation_words(record: Mapping[str, Any], label: str) -> str:
    return (
        f"{label}: {percent(record.get('success'))} "
        f"({interval(record.get('low', 0.0), record.get('high', 1.0))}, n={record.get('n')})"
    )


def _evaluation_line(record: Mapping[str, Any], label: str) -> Text:
    line = Text("held-out success ", style="dim")
    line.append(label, style="default")
    line.append(f"{percent(record.get('success')):>6}", style="bold green")
    spread = interval(record.get("low", 0.0), record.get("high", 1.0))
    line.append(f"  {spread}  n={record.get('n')}", style="dim")
    return line


def _measured_table(measured: Mapping[str, Sequence[Measurement]]) -> Table:
    """The newest stages' measurements, a line for each: few words, since there may be many."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for stage, found in list(measured.items())[-_MEASURED_STAGES:]:
        line = Text()
        length = 0
        for one in found:
            same = one.kind is Measure.RETRIEVAL and one.length == length
            line.append(", " if same else " · " if line else "")
            if one.kind is Measure.RETRIEVAL and not same:
                line.append(f"retrieval {count(one.length)}: ")
            length = one.length
            line.append(f"{one.short_task} ")
            line.append(one.words, style="bold green")
        table.add_row(after_words(stage), line)
    return table


def _chart(stage: _Stage, width: int) -> Table:
    """The stage's curve with its scale on the left."""
    rewards = stage.kind == "agentic_rl"
    values = stage.curve
    low, high = (0.0, 1.0) if rewards else (min(values), max(values))
    if not rewards:
        low = min(low, 0.0) if low < 0.3 * high else low
        high = high if high > low else low + 1.0
    label = max(len(short(low)), len(short(high)))
    lines = curve(values, max(width - label - 3, 10), 6, low, high)
    table = Table.grid(padding=0)
    table.add_column(justify="right", width=label + 1, style="dim")
    table.add_column(no_wrap=True)
    name = "reward (mean of scored rollouts)" if rewards else loss_name(stage.kind)
    table.add_row("", Text(f" {name}, now {short(values[-1])}", style="bold"))
    for index, line in enumerate(lines):
        scale = short(high) if index == 0 else short(low) if index == len(lines) - 1 else ""
        edge = "┤" if scale else "│"
        colour = "green" if rewards else "yellow"
        table.add_row(scale, Text.assemble((edge, "dim"), (line, colour)))
    return table


def _numbers(stage: _Stage, width: int) -> RenderableType:
    """Throughput, utilisation, queue and staleness of an RL stage; losses and rates of others."""
    m = stage.latest
    if stage.kind != "agentic_rl":
        return Text(" · ".join(_plain_numbers(stage)), overflow="fold")
    table = Table.grid(padding=(0, 1))
    bar_width = 20 if width < 100 else 32
    for side, busy, rate in (
        ("engine", "engine_busy", "gen_tokens_per_s"),
        ("trainer", "trainer_busy", "train_tokens_per_s"),
    ):
        if busy not in m:
            continue
        share = m.get(busy)
        drawn = Text(bar(share or 0.0, bar_width), style="cyan on grey19")
        words = f"{percent(share, 0):>4} busy · {short(m.get(rate))} tokens/s"
        table.add_row(Text(side, "dim"), drawn, words)
    tau = f"staleness {short(m.get('lag_mean'))} mean, {short(m.get('lag_max'))} max"
    masked = m.get("masked_low", 0.0) + m.get("masked_high", 0.0)
    queue = f"queue {short(m.get('queue_groups'))} groups"
    flight = f"{short(m.get('rollouts_in_flight'))} rollouts in flight"
    lines = [
        f"success {percent(m.get('success_rate'), 0)} · {queue} · {flight}",
        f"{tau} · masked {percent(masked)} · "
        f"mismatch {short(m.get('mismatch_mean_abs'))} · weights v{short(m.get('version'))}",
    ]
    if (words := difficulty_words(m)) is not None:
        lines.append(words)
    if "replicas_serving" in m:
        lines.append(_replica_words(m))
    if stage.failures:
        lines.append(f"failed: {failure_words(stage.failures)}")
    parts: list[RenderableType] = [table, *(Text(line, overflow="fold") for line in lines)]
    if tasks_in(m):
        parts.append(task_table(m, bar_width // 2))
    return Group(*parts)


def _replica_words(m: Mapping[str, float]) -> str:
    """How many replicas serve, how often one was started again, and which do not serve now."""
    down = [
        name.removeprefix("replica.").removesuffix(".serving")
        for name, serving in m.items()
        if name.startswith("replica.") and name.endswith(".serving") and not serving
    ]
    words = f"replicas {short(m['replicas_serving'])} serving"
    if down:
        words += f", {', '.join(down)} down"
    return f"{words} · {short(m.get('replica_restarts'))} restarts"


def _plain_numbers(stage: _Stage) -> list[str]:
    """The numbers of a one-line log, most telling first."""
    m = stage.latest
    parts = [f"{_steps(stage).removesuffix(' · ')}"] if stage.step else []
    if stage.kind != "agentic_rl":
        skipped = [f"skipped {count(stage.skipped)}"] if stage.skipped else []
        return parts + supervised_numbers(stage.kind, m) + skipped
    shown = (
        ("reward", "reward_mean", short),
        ("success", "success_rate", lambda v: percent(v, 0)),
        ("loss", "loss", short),
        ("gen tok/s", "gen_tokens_per_s", short),
        ("train tok/s", "train_tokens_per_s", short),
        ("queue", "queue_groups", short),
        ("lag", "lag_mean", short),
        ("lr", "learning_rate", short),
    )
    parts += [f"{label} {write(m[key])}" for label, key, write in shown if key in m]
    if stage.failures:
        parts.append(f"failed {failure_words(stage.failures)}")
    return parts + task_words(m)
