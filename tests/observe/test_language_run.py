"""Runs of language-model stages: their report, `show` and live view, alone and mixed with RL."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from synthetic_language import EXAMPLES, make_language_run
from test_report import Page

from headrace.observe.charts import Line, line_chart
from headrace.observe.live import LiveView
from headrace.observe.measurements import (
    Measure,
    aspects,
    hardest_retrieval,
    is_measurement,
    latest,
    measurement_of,
    tabulate,
)
from headrace.observe.report import write_report
from headrace.observe.report.chat_examples import _choose, _marked
from headrace.observe.runs import open_run
from headrace.observe.show import show_run


def _page(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def _shown(run: Path, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    show_run(run, console)
    return console.export_text()


def _edit(run: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((run / name).read_text())
    change(data)
    (run / name).write_text(json.dumps(data))


# -- records -------------------------------------------------------------------------------------


def test_measurements_are_no_evaluations(language_run: Path) -> None:
    with open_run(language_run) as run:
        assert run.evaluations == []
        assert run.comparisons() == []
        assert len(run.measurements) == 5 + 2 + 4 * 4 + 1
        assert not run.has_rollouts
        assert run.missing_rollouts == ""


def test_rows_of_the_table_are_ordered_and_the_hardest_is_found(language_run: Path) -> None:
    with open_run(language_run) as run:
        table = tabulate(reversed(run.measurements))
        found = [(latest(row).kind, latest(row).length, latest(row).keys) for row in table.rows]
        table = tabulate(run.measurements)
    assert found == [
        (Measure.BITS, 0, 0),
        (Measure.RETRIEVAL, 256, 1),
        (Measure.RETRIEVAL, 256, 4),
        (Measure.RETRIEVAL, 1024, 1),
        (Measure.RETRIEVAL, 1024, 4),
        (Measure.CHAT, 0, 0),
    ]
    assert table.stages == ("pretrain", "midtrain", "dsa-warmup", "dsa-adapt", "sft")
    hardest = hardest_retrieval(table)
    assert hardest is not None
    assert list(hardest) == ["midtrain", "dsa-warmup", "dsa-adapt", "sft"]
    assert latest(hardest).words == "72.0%"
    chat = latest(table.of_kind(Measure.CHAT)[0])
    assert aspects(chat) == [
        ("parsed", 0.96),
        ("thinking", 0.97),
        ("call", 0.94),
        ("ended", 0.95),
        ("correct", 0.71),
    ]


def test_odd_records_are_read() -> None:
    assert not is_measurement({"after": "rl", "task": "terminal", "success": 0.5})
    one = measurement_of({"value": 2, "task": "retrieval, of a kind", "detail": "none"})
    assert (one.kind, one.after, one.words, one.bounds) == (Measure.OTHER, "?", "2.000", None)
    assert aspects(one) == []


def test_steps_that_were_repeated_after_a_crash_count_once(language_run: Path) -> None:
    with open_run(language_run) as run:
        logged = [row.step for row in run.rows if row.stage == "pretrain"]
        rows = run.rows_of("pretrain")
        assert len(logged) == 65, "the run did repeat some"
        assert [row.step for row in rows] == list(range(1, 61))
        again = logged.index(26, logged.index(26) + 1)
        assert rows[25] is [row for row in run.rows if row.stage == "pretrain"][again]


def test_stages_are_found_without_a_recipe(language_run: Path) -> None:
    (language_run / "recipe.json").write_text("{}")
    _edit(language_run, "summary.json", lambda s: s.pop("stages"))
    with open_run(language_run) as run:
        names = [stage["name"] for stage in run.stages()]
    assert names == ["pretrain", "midtrain", "dsa-warmup", "dsa-adapt", "sft"]


# -- report --------------------------------------------------------------------------------------


def test_the_report_of_a_language_run(language_run: Path) -> None:
    page = _page(language_run)
    for words in (
        "bits per byte, held-out text 1.830 after sft · 60,213 bytes",
        "retrieval, 4 keys, 1024 tokens 72.0% after sft · 58.3–82.5%, n = 50",
        "chat format followed 93.0% after sft · 86.3–96.6%, n = 100",
        "Retrieval after sft, by context",
        "Retrieval at 1,024 tokens, by stage",
        "Loss and its parts",
        "Indexer loss",
        "Expert balance loss, 1 is even",
        "Gradient norm before clipping",
        "Throughput",
        "MFU, of this machine's matmul rate",
        "Memory of the trainer",
        "Steps skipped: 1 by step 17, 1 by step 41.",
        "1.4 GiB",
        "measurement 36 s",
        'expected: thinking, lookup(key="age of the snow")',
    ):
        assert words in page.text, words
    for absent in ("Held-out success", "Accounting", "Trajectories", "No ledger", "Laws"):
        assert absent not in page.text, absent


def test_an_untrained_length_is_a_dash_in_the_table(language_run: Path) -> None:
    markup = write_report(language_run).read_text(encoding="utf-8")
    row = re.search(r"<tr><td>retrieval, 4 keys, 1024 tokens</td>(.*?)</tr>", markup)
    assert row is not None
    cells = re.findall(r"<td class='n'>(.*?)</td>", row[1])
    assert "–" in cells[0]
    assert "%" not in cells[0]
    assert "70.0%" in cells[1]
    assert "56.2–80.9%" in cells[1]


def test_model_text_in_examples_is_escaped_and_marked(language_run: Path) -> None:
    markup = write_report(language_run).read_text(encoding="utf-8")
    assert "<script" not in markup
    assert "<b>bold" not in markup
    assert "&lt;script&gt;alert(1)" in markup
    assert "<span class='think'>I look up the age of the snow.</span>" in markup
    assert "<span class='tok'>&lt;/think&gt;</span><span class='tok'>&lt;tool_call&gt;" in markup
    assert "fish␇ milk" in markup
    assert "… 400 more characters" in markup
    assert not re.search(r"\b(nan|inf)\b", markup)
    Page(markup)


def test_names_from_a_recipe_are_escaped(language_run: Path) -> None:
    def rename(data: dict[str, Any]) -> None:
        for stage in data["stages"]:
            stage["name"] = stage["name"].replace("pretrain", "<i>one")
        for record in data.get("evaluations") or []:
            record["after"] = record["after"].replace("pretrain", "<i>one")

    _edit(language_run, "recipe.json", rename)
    _edit(language_run, "summary.json", rename)
    rows = (language_run / "metrics.jsonl").read_text().replace('"pretrain"', '"<i>one"')
    (language_run / "metrics.jsonl").write_text(rows)
    assert "<i>one" not in write_report(language_run).read_text(encoding="utf-8")
    assert "<i>one" in _shown(language_run), "and none of it is console markup"


def test_damaged_examples_are_shown_as_far_as_they_go(language_run: Path) -> None:
    def damage(summary: dict[str, Any]) -> None:
        detail = summary["evaluations"][-1]["detail"]
        detail["examples"] = [{}, "text", {"expected": {"calls": ["x", {"name": "y"}]}, "score": 1}]
        del detail["rates"]

    _edit(language_run, "summary.json", damage)
    page = _page(language_run)
    assert "(nothing)" in page.text
    assert "holds when" not in page.text


def test_a_run_that_stopped_after_pretraining(
    metrics_clock: Callable[[float], None], tmp_path: Path
) -> None:
    run = make_language_run(tmp_path / "run", metrics_clock, until="pretrain", skipped=False)
    page = _page(run)
    assert "1.921 after pretrain" in page.text
    assert "Chat format" not in page.text
    assert "by stage" not in page.text, "one stage is no development"
    assert "Steps skipped" not in page.text
    assert "not started" in _shown(run)


def test_a_mixed_run_shows_both_worlds(finished_run: Path, language_run: Path) -> None:
    measured = json.loads((language_run / "summary.json").read_text())["evaluations"]
    ours = [{**record, "after": "sft"} for record in measured if record["after"] == "sft"]
    _edit(finished_run, "summary.json", lambda s: s["evaluations"].extend(ours))
    page = _page(finished_run)
    for words in ("paired difference", "bits per byte, held-out text", "Accounting", "Chat format"):
        assert words in page.text, words
    printed = _shown(finished_run)
    assert "retrieval 1024, 4 keys" in printed
    assert "after rl against after sft" in printed
    assert "The ledger closes." in printed


def test_a_broken_law_is_shown_even_without_rollouts(language_run: Path) -> None:
    _edit(language_run, "summary.json", lambda s: s.update(laws={"L9": "broken: lost a batch"}))
    assert "lost a batch" in _page(language_run).text
    assert "L9 broken (lost a batch)" in _shown(language_run)


def test_a_damaged_ledger_is_named_in_a_run_without_rollouts(language_run: Path) -> None:
    for side in ("-wal", "-shm"):
        language_run.joinpath(f"ledger.sqlite{side}").unlink(missing_ok=True)
    (language_run / "ledger.sqlite").write_bytes(b"not a database" * 400)
    assert "damaged" in _page(language_run).text


def test_shown_examples_fail_and_follow() -> None:
    def broken(example: Any) -> bool:
        return not all(example["score"][name] for name in ("parsed", "thinking", "call", "ended"))

    shown, rest = _choose(EXAMPLES)
    assert [broken(e) for e in shown] == [True, True, False, False]
    assert len(rest) == 2
    failing = [e for e in EXAMPLES if broken(e)]
    assert _choose(failing) == (failing, [])
    assert _choose(EXAMPLES[3:]) == (EXAMPLES[3:], [])


def test_thinking_ends_where_the_model_ends_it() -> None:
    assert _marked("a</think>b", thinking=True) == (
        "<span class='think'>a</span><span class='tok'>&lt;/think&gt;</span>b"
    )
    assert _marked("<think>a", thinking=False) == (
        "<span class='tok'>&lt;think&gt;</span><span class='think'>a</span>"
    )
    assert _marked("a <b> c", thinking=False) == "a &lt;b&gt; c"


def test_named_x_values_get_a_second_row_when_they_are_long() -> None:
    def heights(*names: str) -> list[str]:
        points = [(float(i), 0.5) for i in range(len(names))]
        chart = line_chart(
            [Line("a", points)], title="t", x_label="", y_label="y", x_names=names, width=340
        )
        return [re.findall(rf'y="([0-9.]+)">{name}<', chart)[0] for name in names]

    assert heights("a", "b", "c") == ["215.0", "215.0", "215.0"]
    assert heights(*(f"a-rather-long-stage-{i}" for i in "abc")) == ["215.0", "227.0", "215.0"]


def test_a_model_that_diverged_is_a_dash(language_run: Path) -> None:
    def diverge(summary: dict[str, Any]) -> None:
        for record in summary["evaluations"]:
            if record["task"] == "bits per byte" and record["after"] in ("midtrain", "sft"):
                record["value"] = float("nan")

    _edit(language_run, "summary.json", diverge)
    markup = write_report(language_run).read_text(encoding="utf-8")
    assert not re.search(r"\b(nan|inf)\b", markup)
    assert "Bits per byte of held-out text, by stage" in markup
    row = next(line for line in _shown(language_run).splitlines() if "bits per byte" in line)
    assert row.split()[3:] == ["1.921", "–", "1.806", "1.781", "–", "(60,213)"]


# -- show ----------------------------------------------------------------------------------------


def test_show_prints_measurements_and_no_empty_rollouts(language_run: Path) -> None:
    printed = _shown(language_run)
    lines = printed.splitlines()
    row = next(line for line in lines if "retrieval 1024, 4 keys" in line)
    assert row.split()[-7:] == ["–", "70.0%", "62.0%", "76.0%", "72.0%", "58.3–82.5%", "(50)"]
    assert "indexer loss" in next(line for line in lines if "dsa_warmup" in line)
    first = next(line for line in lines if line.strip().startswith("pretrain"))
    assert "MFU" in first
    assert "skipped 2" in first
    assert "correct 71%" in printed
    for absent in ("ledger", "Laws", "trajector", "No evaluation"):
        assert absent not in printed, absent


# -- live view -----------------------------------------------------------------------------------


def _live(enabled: bool, width: int = 80) -> tuple[LiveView, Console]:
    console = Console(width=width, height=50, record=True, file=io.StringIO(), color_system=None)
    stages = ["pretrain", "dsa-warmup", "sft"]
    view = LiveView("base", stages, Path("runs/x"), enabled, console=console, clock=lambda: 60.0)
    return view, console


def _records(run: Path, after: str) -> list[dict[str, Any]]:
    found = json.loads((run / "summary.json").read_text())["evaluations"]
    return [record for record in found if record["after"] == after]


def test_the_live_view_of_language_stages(language_run: Path) -> None:
    view, console = _live(enabled=True)
    view.stage_started("pretrain", "pretrain", 60, "steps")
    for record in _records(language_run, "sft"):
        view.measurement({**record, "after": "pretrain"})
    view.stage_started("dsa-warmup", "dsa_warmup", 15, "steps")
    view.progress(0.4)
    for step in range(1, 7):
        metrics = {"loss": 0.9 / step, "tokens_per_s": 5210.0, "mfu": 0.31, "memory_mb": 900.0}
        view.metrics("dsa-warmup", step, metrics | {"skipped": float(step == 3)})
    console.print(view.render())
    frame = console.export_text()
    lines = frame.splitlines()
    assert len(lines) <= 24, "a frame fits a small terminal"
    assert all(len(line) == 80 for line in lines), "the box is closed on every line"
    frame = " ".join(line.strip("│ ") for line in lines)
    for words in (
        "indexer loss, now 0.15",
        "tokens/s 5.2k · MFU 31.0% · memory 900 MiB",
        "skipped 1",
        "40%",
        "step 6",
        "bits per byte 1.830",
        "retrieval 256: 1 key 96.0%, 4 keys 90.0%",
        "chat format 93.0%",
    ):
        assert words in frame, words


def test_the_plain_log_of_measurements(language_run: Path) -> None:
    view, console = _live(enabled=False)
    for record in _records(language_run, "sft"):
        view.measurement(record)
    lines = [line.partition("] ")[2] for line in console.export_text().splitlines()]
    assert lines[0] == "bits per byte after sft: 1.830 (n=60,213)"
    assert lines[-1] == "chat format after sft: 93.0% (86.3–96.6%, n=100)"


def test_a_loss_that_is_no_number_leaves_the_curve_alone() -> None:
    view, console = _live(enabled=True)
    view.stage_started("pretrain", "pretrain", 60, "steps")
    for loss in (3.0, float("nan"), 2.0, float("inf")):
        view.metrics("pretrain", 1, {"loss": loss})
    console.print(view.render())
    assert "loss, now 2" in console.export_text()


@pytest.mark.parametrize("kind", ["pretrain", "midtrain", "dsa_adapt", "sft"])
def test_only_the_warmup_trains_on_the_indexers_loss(kind: str) -> None:
    view, console = _live(enabled=True)
    view.stage_started("pretrain", kind, 60, "steps")
    view.metrics("pretrain", 1, {"loss": 2.0})
    console.print(view.render())
    assert " loss, now 2" in console.export_text()
    assert "indexer" not in console.export_text()
