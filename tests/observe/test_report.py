"""The report of complete, partial and damaged runs: what it says, and that it stands alone."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_run import RunMaker

from headrace.errors import UserError
from headrace.observe.charts import Dot, Line, Share, bar_chart, line_chart, share_bar, ticks
from headrace.observe.report import write_report
from headrace.observe.runs import open_run
from headrace.observe.samples import sample_pairs

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks nesting and collects text and attributes."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self.feed(markup)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag, f"</{tag}> out of order"

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def test_a_complete_run_tells_its_story(finished_run: Path) -> None:
    path = write_report(finished_run)
    assert path == finished_run / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    with open_run(finished_run) as run:
        best = run.headline()
        assert best is not None
        assert best.stage == "rl"
        assert run.ledger is not None
        tokens = run.ledger.conservation()
    headline = f"{100 * best.change.difference:+.1f} points"
    assert headline in page.text
    for words in (
        "finished",
        "after sft",
        "after rl",
        "stage sft-longer, same start",
        "count_lines",
        "Reward and held-out success over the run",
        "Staleness of trained tokens (bound 4)",
        "Train/rollout log-probability mismatch",
        "Where the time went",
        f"{tokens.sampled:,}",
        "closes",
        "not trained: no signal",
        "L9",
        "broken",
        "one batch twice",
        "before",
        "bash: ls -1 dat | sort",
        "Example CPU",
        "The resolved recipe",
    ):
        assert words in page.text, words
    assert page.tags.count("article") == 3


def test_nothing_is_fetched_and_nothing_runs(finished_run: Path) -> None:
    markup = write_report(finished_run).read_text(encoding="utf-8")
    page = Page(markup)
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset")]
    assert not re.search(r"url\(|@import|https?://", markup)


def test_model_output_cannot_become_markup(finished_run: Path) -> None:
    markup = write_report(finished_run).read_text(encoding="utf-8")
    assert "&lt;level" in markup
    assert "<level" not in markup


def test_numbers_in_charts_are_finite(finished_run: Path) -> None:
    markup = write_report(finished_run).read_text(encoding="utf-8")
    assert not re.search(r"\b(nan|inf)\b", markup)


def test_a_run_killed_after_its_first_stage(run_maker: RunMaker, tmp_path: Path) -> None:
    run = run_maker.make(tmp_path / "killed", until="sft")
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "unfinished" in page.text
    assert "No evaluation has finished" in page.text
    assert "Supervised stages" in page.text
    assert "Reinforcement learning" not in page.text


def test_a_run_that_only_has_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps({"name": "x", "stages": []}))
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "no rollout was recorded yet" in page.text


def test_a_damaged_ledger_is_named_and_the_rest_shown(finished_run: Path) -> None:
    for side in ("-wal", "-shm"):
        finished_run.joinpath(f"ledger.sqlite{side}").unlink(missing_ok=True)
    (finished_run / "ledger.sqlite").write_bytes(b"not a database" * 400)
    page = Page(write_report(finished_run).read_text(encoding="utf-8"))
    assert "damaged" in page.text
    assert "after rl" in page.text


def test_a_single_evaluation_is_no_change(finished_run: Path) -> None:
    summary = json.loads((finished_run / "summary.json").read_text())
    summary["evaluations"] = summary["evaluations"][:1]
    (finished_run / "summary.json").write_text(json.dumps(summary))
    page = Page(write_report(finished_run).read_text(encoding="utf-8"))
    assert "Only one measurement exists" in page.text


def test_a_greedy_measurement_does_not_displace_the_sampled_one(finished_run: Path) -> None:
    summary = json.loads((finished_run / "summary.json").read_text())
    greedy = dict(summary["evaluations"][2], temperature=0, success=1.0)
    greedy["after"] = "rl greedy"
    greedy["instances"] = dict.fromkeys(greedy["instances"], 1)
    summary["evaluations"].append(greedy)
    (finished_run / "summary.json").write_text(json.dumps(summary))
    with open_run(finished_run) as run:
        best = run.headline()
        assert best is not None
        assert best.after["temperature"] == 1.0
    assert "after rl, greedy" in Page(write_report(finished_run).read_text(encoding="utf-8")).text


def test_every_task_has_its_own_change_and_labels(finished_run: Path) -> None:
    summary = json.loads((finished_run / "summary.json").read_text())
    first = summary["evaluations"]
    task = first[0]["task"]
    lost = dict.fromkeys(first[0]["instances"], 0)
    other = [{**e, "task": "other", "success": 0.0, "instances": lost} for e in first]
    both = [e for pair in zip(first, other, strict=True) for e in pair]
    (finished_run / "summary.json").write_text(json.dumps({**summary, "evaluations": both}))
    with open_run(finished_run) as run:
        changes = {c.task: c.change.difference for c in run.headlines()}
        assert list(changes) == [task, "other"]
        assert changes["other"] == 0.0 != changes[task]
        assert run.headline() == run.headlines()[0]
        compared = [(c.task, c.stage) for c in run.comparisons()]
        assert len(set(compared)) * 2 > len(compared) > 2
    text = Page(write_report(finished_run).read_text(encoding="utf-8")).text
    assert f"{task} after rl" in text
    assert "other after rl" in text
    assert "success on other changed by" in text


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        write_report(tmp_path / "missing")


def test_samples_pair_the_same_instance_around_rl(finished_run: Path) -> None:
    with open_run(finished_run) as run:
        pairs = sample_pairs(run)
    assert len(pairs) == 3
    for pair in pairs:
        assert pair.before is not None
        assert pair.before.instance["seed"] == pair.after.instance["seed"]
        assert (pair.before.purpose, pair.after.purpose) == ("eval:sft", "eval:rl")
    learned = [p for p in pairs if p.before and p.before.reward == 0 and p.after.reward == 1]
    assert len(learned) >= 2
    assert learned[0].after.instance["family"] != learned[1].after.instance["family"]
    assert learned[0].after.instance["min_turns"] == 3


def test_comparisons_use_the_stage_started_from(finished_run: Path) -> None:
    with open_run(finished_run) as run:
        found = [(c.stage, c.before["after"], c.rival) for c in run.comparisons()]
    assert found == [
        ("sft", "start", ""),
        ("rl", "sft", ""),
        ("sft-longer", "sft", ""),
        ("rl", "sft-longer", "sft-longer"),
    ]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3.0, 97.0, [20.0, 40.0, 60.0, 80.0]),
        (5.0, 5.0, [5.0]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_charts_survive_odd_data() -> None:
    def lines(*points: tuple[float, float]) -> str:
        return line_chart([Line("a", points)], title="t", x_label="x", y_label="y")

    assert "No data" in lines()
    assert "No data" in lines((0.0, float("nan")))
    assert "<circle" in lines((3.0, 0.0)), "one point is a dot"
    Page(lines((0.0, 2.0), (1.0, 2.0)))
    assert "No data" in bar_chart([("0", 0.0)], title="t", x_label="x", y_label="y")
    assert "No data" in share_bar([Share("a", "a", 0.0, 0)], title="t", write=str)
    many = lines(*((float(i), float(i % 7)) for i in range(100_000)))
    assert len(many) < 20_000, "long series are thinned"


def test_a_dot_is_drawn_at_its_value() -> None:
    chart = line_chart(
        [],
        title="t",
        x_label="x",
        y_label="y",
        y_range=(0.0, 1.0),
        dots=[Dot(0.0, 0.0, 0.0, 0.1, "bottom"), Dot(1.0, 1.0, 0.9, 1.0, "top")],
        dots_label="d",
        height=240,
    )
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', chart)]
    assert heights == [200.0, 14.0]
