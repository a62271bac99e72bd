"""The command line: mistakes are one line on stderr and exit code 2, never a traceback."""

import errno
import json
import subprocess
import sys
import time
import types

import pytest

from headrace.cli import main
from headrace.errors import UserError

RECIPE = """
name = "tiny"
model.path = "{model}"
[[stages]]
kind = "agentic_rl"
name = "rl"
updates = 1
"""


@pytest.fixture
def recipe_file(tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(RECIPE.format(model="smollm2-135m-instruct"))
    return file


@pytest.fixture
def stand_in_run(monkeypatch):
    """Replaces the training loop; what it was called with is recorded."""
    calls = []

    def run_recipe(recipe, run_dir, *, resume, no_isolation, acknowledged):
        calls.append((recipe, run_dir, resume, no_isolation))
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "report.html").write_text("<p>done</p>")
        return 0

    module = types.ModuleType("headrace.run")
    module.run_recipe = run_recipe  # type: ignore[attr-defined] # a stand-in module
    module.plan = lambda recipe: [f"plan of {recipe.name}", "seed 0"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headrace.run", module)
    return calls


def mistake(capsys, arguments):
    """Run the command, require exit code 2 and one line; returns the line."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.startswith("headrace: ")
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err + captured.out
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "run"),
        (["run"], "name a recipe"),
        (["run", "no-such"], "recipe no-such: no such file"),
        (["run", "quickstrat"], 'did you mean "quickstart"'),
        (["run", "quickstart", "--sed", "1"], "--seed"),
        (["run", "quickstart", "--seed", "one"], "--seed"),
        (["run", "quickstart", "--set", "engine"], "write table.key=value"),
        (["run", "quickstart", "--set", "engine.max_runing=3"], 'did you mean "max_running"'),
        (["run", "quickstart", "--set", "stages.lr.seconds=3"], 'no stage "lr"'),
        (["run", "quickstart", "--set", "engine.max_running=many"], "engine.max_running"),
        (["run", "--resume", "/no/such/run"], "no such directory"),
        (["run", "quickstart", "--resume", "x"], "leave out RECIPE"),
        (["run", "--seed", "1", "--resume", "x"], "leave out --seed"),
        (["show"], "RUN"),
        (["show", ".", "everything"], '"everything" is unknown'),
        (["show", ".", "trajectory"], "give an id"),
        (["serve", "x", "--port", "99999"], "--port"),
        (["serve", "x", "--api-key", "k", "--admin-key", "k"], "same as --api-key"),
        (["chat", "x", "--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, message):
    assert message in mistake(capsys, arguments)


def test_unknown_key_in_a_recipe_names_the_nearest(capsys, recipe_file):
    recipe_file.write_text(recipe_file.read_text() + "update = 3\n")
    assert 'did you mean "updates"' in mistake(capsys, ["run", recipe_file])


def test_a_used_run_directory_is_not_overwritten(capsys, recipe_file, tmp_path):
    used = tmp_path / "old"
    used.mkdir()
    (used / "ledger.sqlite").write_text("x")
    line = mistake(capsys, ["run", recipe_file, "--run-dir", used])
    assert f"--resume {used}" in line
    assert (used / "ledger.sqlite").read_text() == "x"


def test_a_file_is_no_run_directory(capsys, recipe_file):
    assert "file of that name" in mistake(capsys, ["run", recipe_file, "--run-dir", recipe_file])


def test_resuming_what_is_no_run(capsys, tmp_path):
    assert "not a run directory" in mistake(capsys, ["run", "--resume", tmp_path])
    (tmp_path / "recipe.json").write_text("{")
    assert "not valid JSON" in mistake(capsys, ["run", "--resume", tmp_path])
    (tmp_path / "recipe.json").write_text("[]")
    assert "JSON object" in mistake(capsys, ["run", "--resume", tmp_path])


def test_a_tripwire_is_acknowledged_for_a_run_that_is_named(capsys, tmp_path):
    assert main(["run", "quickstart", "--acknowledge", "tampering"]) == 2
    assert "name it with --resume RUN" in capsys.readouterr().err


def test_commands_unprotected_need_a_confirmation(capsys, recipe_file, tmp_path, stand_in_run):
    arguments = ["run", recipe_file, "--set", "sandbox.kind=none", "--run-dir", tmp_path / "r"]
    assert "--no-isolation" in mistake(capsys, arguments)
    assert main([str(a) for a in [*arguments, "--no-isolation"]]) == 0
    assert stand_in_run[0][3] is True


def test_dry_run_prints_the_plan_and_writes_nothing(capsys, recipe_file, tmp_path, stand_in_run):
    target = tmp_path / "r"
    assert main(["run", str(recipe_file), "--dry-run", "--run-dir", str(target)]) == 0
    assert capsys.readouterr().out.splitlines() == ["plan of tiny", "seed 0"]
    assert not target.exists()
    assert stand_in_run == []


def test_run_passes_seed_and_overrides_and_says_where_the_report_is(
    capsys, recipe_file, tmp_path, stand_in_run
):
    target = tmp_path / "r"
    overrides = ["--set", "stages.rl.updates=5", "--set", "engine.max_running=8"]
    code = main(["run", str(recipe_file), "--run-dir", str(target), "--seed", "7", *overrides])
    assert code == 0
    recipe, run_dir, resume, no_isolation = stand_in_run[0]
    assert (recipe.seed, recipe.stages[0].updates, recipe.engine.max_running) == (7, 5, 8)
    assert (run_dir, resume, no_isolation) == (target, False, False)
    assert str(target / "report.html") in capsys.readouterr().out


def test_every_run_gets_a_directory_of_its_own(recipe_file, tmp_path, stand_in_run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    for _ in range(2):
        assert main(["run", str(recipe_file)]) == 0
    assert [str(call[1]) for call in stand_in_run] == [
        "runs/tiny-20260101-000000",
        "runs/tiny-20260101-000000-2",
    ]


def test_resume_uses_the_stored_recipe(recipe_file, tmp_path, stand_in_run):
    from headrace.recipe import load_recipe

    run_dir = tmp_path / "r"
    run_dir.mkdir()
    stored = load_recipe(recipe_file, ["stages.rl.updates=9"], seed=3)
    (run_dir / "recipe.json").write_text(stored.model_dump_json())
    assert main(["run", "--resume", str(run_dir)]) == 0
    recipe, target, resume, _ = stand_in_run[0]
    assert (recipe, target, resume) == (stored, run_dir, True)


def raise_in_run(monkeypatch, error):
    module = types.ModuleType("headrace.run")

    def fail(*_, **__):
        raise error

    module.run_recipe = fail  # type: ignore[attr-defined] # a stand-in module
    module.plan = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headrace.run", module)


def test_a_full_disk_is_one_line(capsys, recipe_file, tmp_path, monkeypatch):
    raise_in_run(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "/r/metrics.jsonl"))
    line = mistake(capsys, ["run", recipe_file, "--run-dir", tmp_path / "r"])
    assert "/r/metrics.jsonl: no space left" in line


def test_a_message_of_several_lines_becomes_one(capsys, recipe_file, tmp_path, monkeypatch):
    raise_in_run(monkeypatch, UserError("first\nsecond"))
    line = mistake(capsys, ["run", recipe_file, "--run-dir", tmp_path / "r"])
    assert line == "headrace: first second\n"


def test_interrupt_is_130(capsys, recipe_file, tmp_path, monkeypatch):
    raise_in_run(monkeypatch, KeyboardInterrupt())
    assert main(["run", str(recipe_file), "--run-dir", str(tmp_path / "r")]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_bugs_keep_their_traceback(recipe_file, tmp_path, monkeypatch):
    raise_in_run(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        main(["run", str(recipe_file), "--run-dir", str(tmp_path / "r")])


def test_help_names_every_command_and_bare_headrace_is_help(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in (
        "run",
        "chat",
        "serve",
        "engine",
        "show",
        "ledger",
        "report",
        "model",
        "doctor",
    ):
        assert command in text
    assert main([]) == 0
    assert capsys.readouterr().out == text


def test_help_is_quick_because_no_room_is_imported():
    script = (
        "import json, sys; from headrace.cli import main; main(['--help']);"
        "print(json.dumps([m for m in sys.modules if m in "
        "('torch', 'transformers', 'fastapi', 'pydantic', 'openai', 'asyncio')]))"
    )
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
    # Generous: the machine may be busy; the import list above is the real guard.
    assert time.perf_counter() - started < 30


def test_a_real_process_exits_with_2_and_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "run", "no-such"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
