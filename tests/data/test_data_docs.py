"""The Python of docs/data.md runs and does what it says."""

import re
import shutil
import sysconfig
from pathlib import Path

import pytest

from headrace.tokens.renderer import create_renderer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # One package of the standard library stands for all of it.
    (tmp_path / "library").mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    shutil.copytree(library / "json", tmp_path / "library" / "json")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "library")})
    names: dict = {"folder": tmp_path}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), names)
    assert create_renderer("auto", tmp_path).id == "renderers:glm-5"
    assert len(names["batch"]) == 4
    again = names["stream"].next_batch()
    for row, expected in zip(again, names["expected"], strict=True):
        for (ids, weights), (same_ids, same_weights) in zip(row, expected, strict=True):
            assert ids.tolist() == same_ids.tolist()
            assert weights.tolist() == same_weights.tolist()
