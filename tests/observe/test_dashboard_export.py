"""The exported page: one file, whole, bounded, and nothing in it can break out."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hostile_run import FORKED, SCRIPT

from headrace.cli import main
from headrace.errors import UserError
from headrace.observe.dashboard import answers
from headrace.observe.dashboard.export import export_page
from headrace.rollout.record.browsing import BrowsingReader


def embedded(page: str) -> Any:
    (block,) = re.findall(r'<script type="application/json" id="embedded">(.*?)</script>', page)
    return json.loads(block)


def test_one_file_holds_everything_and_says_what_is_left_out(hostile_run: Path) -> None:
    target = hostile_run / "page.html"
    words = export_page(hostile_run, target, trajectories=30)
    data = embedded(target.read_text())
    with BrowsingReader.open(hostile_run) as reader:
        total = sum(reader.outcome_counts().values())
        choices = reader.choices()
    assert f"30 of {total} trajectories" in words
    assert data["made"]["words"] == f"30 of {total} trajectories"
    assert set(data["answers"]) == set(answers.AGGREGATES)
    ids = [row["id"] for row in data["rows"]]
    assert len(ids) == len(set(ids)) == 30
    assert set(ids) == set(data["details"]) == set(data["tokens"])
    assert [row["dispatched"] for row in data["rows"]] == sorted(
        (row["dispatched"] for row in data["rows"]), reverse=True
    )
    # Every kind is there, also the rare ones.
    assert FORKED in ids
    for name in ("outcome", "purpose", "task"):
        assert {row[name] for row in data["rows"]} == set(choices[name])
    assert len(data["tokens"][FORKED]) == 3
    assert not list(hostile_run.glob(".page.html*"))


def test_hostile_text_stays_text(hostile_run: Path) -> None:
    target = hostile_run / "page.html"
    export_page(hostile_run, target)
    page = target.read_text()
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 2
    (detail,) = [d for i, d in embedded(page)["details"].items() if i == FORKED]
    assert SCRIPT in detail["turns"][0]["text"]


def test_only_its_own_script_and_style_may_run(finished_run: Path) -> None:
    target = finished_run / "page.html"
    export_page(finished_run, target, trajectories=1)
    page = target.read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for text in (script, style):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "static/" not in page
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)


def test_long_segments_are_cut_and_that_is_said(
    hostile_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.observe.dashboard.trajectories.TOKENS", 100)
    words = export_page(hostile_run, hostile_run / "page.html")
    assert "long segments only up to token 100" in words


def test_a_run_without_rollouts_exports(language_run: Path) -> None:
    words = export_page(language_run, language_run / "page.html")
    assert "0 of 0 trajectories" in words


def test_where_it_cannot_go(finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        export_page(finished_run, tmp_path / "missing" / "page.html")
    with pytest.raises(UserError, match="is a directory"):
        export_page(finished_run, finished_run)
    with pytest.raises(UserError, match="not a run directory"):
        export_page(tmp_path, tmp_path / "page.html")


def test_the_command(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = finished_run / "page.html"
    options = ["--export", str(target), "--trajectories", "2"]
    assert main(["dashboard", str(finished_run), *options]) == 0
    assert str(target) in capsys.readouterr().out
    assert main(["dashboard", str(finished_run / "nothing")]) == 2
    assert "no such directory" in capsys.readouterr().err
