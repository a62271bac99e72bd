"""Runs to look at: one complete run, made once and copied, and a maker for others."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic_run import START, RunMaker

from headrace.observe import metrics


def _maker(patch: pytest.MonkeyPatch) -> RunMaker:
    """A maker whose metrics carry its synthetic clock."""
    now = [START]
    patch.setattr(metrics.time, "time", lambda: now[0])

    def set_clock(value: float) -> None:
        now[0] = value

    return RunMaker(set_clock)


@pytest.fixture
def run_maker(monkeypatch: pytest.MonkeyPatch) -> RunMaker:
    """Makes runs of other kinds."""
    return _maker(monkeypatch)


@pytest.fixture(scope="session")
def finished_run_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = _maker(patch).make(tmp_path_factory.mktemp("template") / "run")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def finished_run(finished_run_template: Path, tmp_path: Path) -> Path:
    """A complete small run, free to be damaged."""
    return Path(shutil.copytree(finished_run_template, tmp_path / "quickstart-7"))
