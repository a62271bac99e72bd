"""Which backend a call gets."""

import threading
import warnings

import pytest

from headrace.errors import UserError
from headrace.ops.registry import ENVIRONMENT_VARIABLE, OpFallbackWarning, Registry


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    registry = Registry()
    # The order of registration must not matter for the reference.
    registry.register("add", "cpu", lambda: "cpu add")
    registry.register("add", "reference", lambda: "reference add", devices=("any",))
    registry.register("mul", "reference", lambda: "reference mul", devices=("any",))
    return registry


def test_fast_comes_before_reference_and_devices_count(registry):
    assert registry.resolve("add", "cpu")() == "cpu add"
    assert registry.resolve("add", "cuda")() == "reference add"
    registry.register("add", "newer", lambda: "newer add", devices=("cpu", "cuda"))
    assert registry.resolve("add", "cuda")() == "newer add"
    assert [b.name for b in registry.backends("add", "cpu")] == ["newer", "cpu", "reference"]


def test_use_holds_inside_the_block_and_where_it_applies(registry):
    with registry.use("reference"):
        assert registry.resolve("add", "cpu")() == "reference add"
        with registry.use("cpu"):
            assert registry.resolve("add", "cpu")() == "cpu add"
            assert registry.resolve("mul", "cpu")() == "reference mul"
        assert registry.resolve("add", "cpu")() == "reference add"
    assert registry.resolve("add", "cpu")() == "cpu add"


def test_use_does_not_reach_other_threads(registry):
    found = []
    with registry.use("reference"):
        thread = threading.Thread(target=lambda: found.append(registry.resolve("add", "cpu")()))
        thread.start()
        thread.join(timeout=10)
    assert found == ["cpu add"]


def test_the_environment_asks_too(registry, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    assert registry.resolve("add", "cpu")() == "reference add"
    with registry.use("cpu"):
        assert registry.resolve("add", "cpu")() == "cpu add"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "refrence")
    with pytest.raises(UserError, match=r'HEADRACE_OPS.*"refrence".*"cpu", "reference"'):
        registry.resolve("add", "cpu")


def test_unavailable_falls_back_with_one_warning(registry):
    asked = []

    def no_compiler():
        asked.append(1)
        return "no compiler"

    for op in ("add", "mul"):
        registry.register(op, "native", lambda: "native", available=no_compiler)
    with pytest.warns(OpFallbackWarning, match=r"native.*no compiler") as caught:
        assert registry.resolve("add", "cpu")() == "cpu add"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.resolve("add", "cpu")() == "cpu add"
        assert registry.resolve("mul", "cpu")() == "reference mul"
    assert len(asked) == 2  # once per op


def test_mistakes_are_named(registry):
    with pytest.raises(UserError, match='"fast"'), registry.use("fast"):
        pass
    with pytest.raises(UserError, match=r'"sub".*"cpu"'):
        registry.resolve("sub", "cpu")
    with pytest.raises(ValueError, match="already"):
        registry.register("add", "cpu", lambda: None)
