"""The live view at two widths, the plain log, and the curves they draw."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.observe.braille import bar, curve, resample
from headrace.observe.difficulty import difficulty_words, pass_rate_labels
from headrace.observe.live import LiveView

RL_METRICS = {
    "reward_mean": 0.75,
    "success_rate": 0.8,
    "gen_tokens_per_s": 2954.2,
    "train_tokens_per_s": 2210.0,
    "engine_busy": 0.93,
    "trainer_busy": 0.61,
    "queue_groups": 3.0,
    "rollouts_in_flight": 64.0,
    "lag_mean": 1.23,
    "lag_max": 3.0,
    "masked_low": 0.01,
    "masked_high": 0.007,
    "mismatch_mean_abs": 0.00012,
    "version": 68.0,
}
EVALUATION = {
    "after": "sft",
    "success": 0.52,
    "low": 0.463,
    "high": 0.576,
    "n": 300,
    "temperature": 1.0,
}


class Clock:
    """Seconds, set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _view(width: int, clock: Clock, enabled: bool) -> tuple[LiveView, Console]:
    console = Console(width=width, height=50, record=True, file=io.StringIO(), color_system=None)
    view = LiveView(
        "quickstart",
        ["sft", "rl"],
        Path("runs/x"),
        enabled,
        budgets={"sft": 90.0, "rl": 200.0},
        console=console,
        clock=clock,
    )
    return view, console


def _run_to_the_middle_of_rl(view: LiveView, clock: Clock) -> None:
    view.stage_started("sft", "sft", 90.0)
    for step in range(1, 50):
        view.metrics("sft", step, {"loss": 3.0 / step, "tokens_per_s": 3100.0})
    clock.now = 90.0
    view.evaluation(EVALUATION)
    view.stage_started("rl", "agentic_rl", 200.0)
    clock.now = 190.0
    view.progress(0.5)
    for step in range(1, 71):
        view.metrics("rl", step, RL_METRICS | {"reward_mean": 0.5 + step / 200})
    view.message("engine restarted; 12 requests retried")


@pytest.mark.parametrize("width", [80, 120])
def test_the_view_fits_and_says_what_matters(width: int) -> None:
    clock = Clock()
    view, console = _view(width, clock, enabled=True)
    _run_to_the_middle_of_rl(view, clock)
    console.print(view.render())
    frame = console.export_text()
    lines = frame.splitlines()
    assert len(lines) <= 24, "a frame fits a small terminal"
    assert all(len(line) == width for line in lines), "the box is closed on every line"
    for words in (
        "headrace · quickstart",
        "✓ sft",
        "step 49 · 1:30",
        "▸ rl",
        "50%",
        "update 70 · 1:40 · 1:40 left",
        "now 0.85",
        "93% busy · 3.0k tokens/s",
        "61% busy · 2.2k tokens/s",
        "success 80% · queue 3 groups · 64 rollouts in flight",
        "staleness 1.23 mean, 3 max",
        "masked 1.7%",
        "52.0%  46.3–57.6%  n=300",
        "12 requests retried",
        "3:10 elapsed · about 1:40 left",
    ):
        assert words in frame, words


def test_difficulty_is_told_and_still_fits() -> None:
    clock = Clock()
    view, console = _view(80, clock, enabled=True)
    _run_to_the_middle_of_rl(view, clock)
    found = {"signal_share": 0.42, "overgeneration": 2.38}
    for level in range(1, 7):
        place = f"difficulty.terminal.level{level}"
        found |= {f"{place}.pass_rate": 0.9 / level, f"{place}.low": 0.1, f"{place}.high": 0.95}
    view.metrics("rl", 71, RL_METRICS | found)
    console.print(view.render())
    lines = console.export_text().splitlines()
    assert len(lines) <= 26
    frame = " ".join(line.strip("│ ") for line in lines)
    assert "signal in 42% of groups · 2.4 generated per trained one" in frame
    assert "level 1 passed 90% (10–95%)" in frame
    assert "2 more levels" in frame
    assert difficulty_words(RL_METRICS) is None


def test_levels_of_several_tasks_are_labelled_in_order() -> None:
    names = ["difficulty.b.level2.pass_rate", "difficulty.a.x.level10.pass_rate", "loss"]
    names += ["difficulty.b.level1.pass_rate", "difficulty.a.x.level9.pass_rate"]
    labels = pass_rate_labels([*names, *names, "difficulty.b.level1.low"])
    assert list(labels.values()) == ["a.x level 9", "a.x level 10", "b level 1", "b level 2"]
    assert list(pass_rate_labels(names[:1]).values()) == ["level 2"]


def test_before_anything_happened_there_is_a_frame() -> None:
    view, console = _view(80, Clock(), enabled=True)
    console.print(view.render())
    assert "up to 1:30" in console.export_text()


def test_remaining_time_of_counted_stages_comes_from_progress() -> None:
    clock = Clock()
    view, console = _view(80, clock, enabled=True)
    view.stage_started("sft", "sft", 90.0)
    view.stage_started("rl", "agentic_rl", 40.0, unit="updates")
    clock.now = 30.0
    view.progress(0.25)
    console.print(view.render())
    assert "1:30 left" in console.export_text()


def test_unlisted_stages_are_added() -> None:
    view, console = _view(80, Clock(), enabled=True)
    view.stage_started("tokenizer", "tokenizer", None)
    console.print(view.render())
    frame = console.export_text()
    assert frame.index("tokenizer") < frame.index("sft")


def test_a_resumed_run_marks_what_was_finished_before() -> None:
    view, console = _view(80, Clock(), enabled=True)
    view.stage_started("rl", "agentic_rl", 200.0)
    view.stage_started("evaluate rl", "evaluation", 300, "instances")
    console.print(view.render())
    lines = console.export_text().splitlines()
    assert "✓ sft" in lines[1]
    assert "finished earlier" in lines[1]
    assert "✓ rl" in lines[2]
    assert "▸ evaluate rl" in lines[3]
    view.stage_finished()
    console.print(view.render())
    assert "evaluate rl" not in console.export_text(), "its result is listed instead"


def test_an_rl_row_without_rewards_adds_nothing_to_the_reward_curve() -> None:
    view, console = _view(80, Clock(), enabled=True)
    view.stage_started("rl", "agentic_rl", 200.0)
    view.metrics("rl", 1, {"loss": -7.5})
    view.metrics("rl", 2, {"loss": -7.5, "reward_mean": 0.25})
    view.metrics("rl", 3, {"loss": -7.5})
    console.print(view.render())
    assert "now 0.25" in console.export_text()


def test_failures_are_summed_over_updates_by_reason() -> None:
    view, console = _view(100, Clock(), enabled=True)
    view.stage_started("rl", "agentic_rl", 10, "updates")
    for step in range(3):
        counts = {"failed.task_hung": 2.0, "failed.no_signal": 4.0 * step}
        view.metrics("rl", step, {**RL_METRICS, **counts})
    console.print(view.render())
    assert isinstance(console.file, io.StringIO)
    assert "failed: 12 no_signal, 6 task_hung" in console.file.getvalue()


def test_live_draws_and_leaves_the_last_frame() -> None:
    clock = Clock()
    out = io.StringIO()
    console = Console(width=80, height=40, file=out, force_terminal=True)
    with LiveView("quickstart", ["sft"], Path("x"), None, console=console, clock=clock) as view:
        view.stage_started("sft", "sft", 90.0)
        clock.now = 42.0
    assert "quickstart" in out.getvalue()
    assert "42 s" in out.getvalue()


def test_plain_log_is_sparse_and_keeps_events() -> None:
    clock = Clock()
    view, console = _view(80, clock, enabled=False)
    with view:
        view.stage_started("rl", "agentic_rl", 40.0, unit="updates")
        for step in range(1, 101):
            clock.now = step * 0.5
            view.progress(step / 100)
            view.metrics("rl", step, RL_METRICS)
        view.evaluation(EVALUATION)
        view.message("report: runs/x/report.html [not markup]")
    lines = console.export_text().splitlines()
    assert 4 + 4 <= len(lines) <= 4 + 6, "50 s make about one line per 10 s"
    assert lines[1].endswith("stage rl (agentic_rl) started, budget 40 updates")
    assert any("reward 0.75" in line and "gen tok/s 3.0k" in line for line in lines)
    assert "evaluation after sft: 52.0% (46.3–57.6%, n=300)" in lines[-2]
    assert lines[-1].endswith("report.html [not markup]")


def test_a_pipe_is_no_terminal() -> None:
    out = io.StringIO()
    with LiveView("quickstart", ["sft"], Path("x"), console=Console(file=out)) as view:
        view.message("hello")
    assert "hello" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_rising_curve_rises() -> None:
    drawn = curve([0.0, 1.0], width=4, height=2, low=0.0, high=1.0)
    assert [len(line) for line in drawn] == [4, 4]
    assert drawn[0][0] == "\u2800", "nothing at the top left"
    assert drawn[1][0] != "\u2800"
    assert drawn[0][3] != "\u2800"
    assert drawn[1][3] == "\u2800", "nothing at the bottom right"


def test_a_step_is_drawn_connected() -> None:
    drawn = curve([0.0] * 4 + [1.0] * 4, width=4, height=3, low=0.0, high=1.0)
    assert all(any(cell != "\u2800" for cell in line) for line in drawn)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 90))
def test_resampling_stays_within_the_data(values: list[float], count: int) -> None:
    result = resample(values, count)
    assert len(result) == count
    slack = 1e-6 * (1 + max(map(abs, values)))
    assert min(values) - slack <= min(result) <= max(result) <= max(values) + slack


def test_bars_fill_in_eighths() -> None:
    assert bar(0.5, 4) == "██  "
    assert bar(0.53125, 4) == "██▏ "
    assert bar(7.0, 3) == "███"
    assert bar(-1.0, 3) == "   "


TASKS = {
    "task.terminal.share": 0.61,
    "task.terminal.target": 0.65,
    "task.terminal.trained_share": 0.5,
    "task.terminal.reward_mean": 0.42,
    "task.terminal.rollouts_per_s": 3.5,
    "task.terminal.rollout_s_p50": 12.4,
    "task.terminal.rollouts_in_flight": 40.0,
    "task.reasoning.share": 0.39,
    "task.reasoning.target": 0.35,
    "task.reasoning.rollouts_per_s": 9.0,
    "task.reasoning.rollouts_in_flight": 8.0,
}


def test_tasks_of_one_stage_have_a_line_each_and_evaluations_name_theirs() -> None:
    console = Console(width=100, height=50, record=True, file=io.StringIO(), color_system=None)
    view = LiveView(
        "mix", ["rl"], Path("x"), True, console=console, tasks=("terminal", "reasoning")
    )
    for task in ("terminal", "reasoning"):
        view.evaluation({**EVALUATION, "task": task})
    view.stage_started("rl", "agentic_rl", 200.0)
    view.metrics("rl", 1, {**RL_METRICS, **TASKS})
    console.print(view.render())
    text = console.export_text()
    (terminal,) = [line for line in text.splitlines() if line.startswith("│ terminal")]
    assert "61% of groups, target 65% · success 42% · 3.5 rollouts/s · 12 s each" in terminal
    (reasoning,) = [line for line in text.splitlines() if line.startswith("│ reasoning")]
    assert "39% of groups, target 35% · 9 rollouts/s · 8 in flight" in reasoning
    assert "held-out success terminal after sft" in text
    assert "held-out success reasoning after sft" in text


def test_the_plain_log_tells_tasks_apart() -> None:
    console = Console(width=400, record=True, file=io.StringIO(), color_system=None)
    clock = Clock()
    tasks = ("terminal", "reasoning")
    view = LiveView("mix", ["rl"], Path("x"), False, console=console, tasks=tasks, clock=clock)
    with view:
        view.stage_started("rl", "agentic_rl", 200.0)
        clock.now = 11.0
        view.metrics("rl", 1, {**RL_METRICS, **TASKS})
        view.evaluation({**EVALUATION, "task": "reasoning"})
    text = console.export_text()
    assert "· terminal 61% reward 0.42 · reasoning 39%" in text
    assert "evaluation reasoning after sft: 52.0%" in text


def test_what_an_earlier_process_spent_is_not_left_any_more() -> None:
    clock = Clock()
    view, console = _view(100, clock, enabled=True)
    view.stage_started("rl", "agentic_rl", 1200, "s")
    clock.now = 20.0
    view.progress(0.5)
    clock.now = 40.0
    console.print(view.render())
    assert isinstance(console.file, io.StringIO)
    assert "9:40 left" in console.file.getvalue()
