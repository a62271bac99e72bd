"""Runs to look at: one complete run, made once and copied, and a maker for others."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostile_run import add_hostile_sessions
from synthetic_language import make_language_run
from synthetic_run import START, RunMaker

from headrace.observe import metrics


def _clock(patch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time that metrics carry."""
    now = [START]
    patch.setattr(metrics.time, "time", lambda: now[0])

    def set_clock(value: float) -> None:
        now[0] = value

    return set_clock


def _maker(patch: pytest.MonkeyPatch) -> RunMaker:
    return RunMaker(_clock(patch))


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


@pytest.fixture(scope="session")
def hostile_run_template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        maker = _maker(patch)
        path = maker.make(tmp_path_factory.mktemp("template") / "hostile")
        add_hostile_sessions(path, maker)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def hostile_run(hostile_run_template: Path, tmp_path: Path) -> Path:
    """A run with forks, failures, an open rollout and texts that try to break a page."""
    return Path(shutil.copytree(hostile_run_template, tmp_path / "hostile-1"))


@pytest.fixture
def language_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A complete run of language-model stages, without rollouts."""
    return make_language_run(tmp_path / "base-3", _clock(monkeypatch))


@pytest.fixture
def metrics_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time that metrics carry."""
    return _clock(monkeypatch)
