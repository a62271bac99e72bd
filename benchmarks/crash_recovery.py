"""What SIGKILL at random moments does to a run: nothing, if the record is worth its name.

A short deterministic run (supervised warm-up, then synchronous RL on a reasoning task with a model
of a few hundred thousand parameters) goes through once without interruption. Then it goes through
again while its trainer, its engine, its main process (orchestrator, gateway, ledger) or its whole
process group is killed at random moments, and is resumed each time, in as many runs as it takes.
After each kill the ledger is audited and nothing may be left of the dead: processes, shared memory,
temporary files. In the end each interrupted run must have trained the same trajectories (problem,
tokens, advantage to the bit, update) as the uninterrupted one.
"""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from headrace.rollout.record.audit import audit
from headrace.rollout.record.reading import LedgerReader, ledger_file
from headrace.rollout.record.trained import trained_trajectories
from report import fill_sizes, new_parser, print_report

STAGE = "rl"
TARGETS = ("trainer", "engine", "main", "all")
DEADLINE_S = 600.0
"""Longest that one process of a run may take."""
GONE_S = 15.0
"""So long after its end nothing of a run may be left."""
_POLL_S = 0.02
_MARK = "HEADRACE_CRASH_RECOVERY"

_HEAD = """
name = "crashes"
seed = {seed}
[engine]
max_running = 16
max_context = 384
deterministic = true
[tasks.reasoning]
system_prompt = "Count."
families = {{ count_bits = {{ min_n = 1, max_n = 31 }} }}
[evaluation]
task = "reasoning"
instances = 8
before = false
"""
_NEW_MODEL = """
[model.init]
family = "llama"
hidden_size = 96
intermediate_size = 256
num_layers = 2
num_heads = 4
num_kv_heads = 4
max_positions = 384
[tokenizer]
vocab_size = 480
demonstrations = 300
"""
_WARMUP = """
[[stages]]
kind = "sft"
name = "warmup"
task = "reasoning"
demonstrations = 400
quality = 0.5
steps = {steps}
checkpoint_every = 20
batch_tokens = 2048
learning_rate = 4e-3
"""
_RL = """
[[stages]]
kind = "agentic_rl"
name = "rl"
task = "reasoning"
mode = "sync"
updates = {updates}
group_size = 4
groups_per_batch = 4
concurrency = 16
publish_every = 2
learning_rate = 2e-4
"""


def warmup_recipe(seed: int, steps: int) -> str:
    """A run that makes a model and warms it up."""
    return (_HEAD + _NEW_MODEL + _WARMUP).format(seed=seed, steps=steps)


def rl_recipe(seed: int, updates: int, checkpoint: Path) -> str:
    """A run that trains such a model."""
    return (
        _HEAD.format(seed=seed) + f'[model]\npath = "{checkpoint}"\n' + _RL.format(updates=updates)
    )


def whole_recipe(seed: int, steps: int, updates: int) -> str:
    """All of it."""
    parts = _HEAD + _NEW_MODEL + _WARMUP + _RL
    return parts.format(seed=seed, steps=steps, updates=updates)


class Failure(Exception):
    """What must not happen."""


class Lives:
    """One run in a folder of its own, process after process.

    Args:
        recipe: its file.
        folder: for everything it writes; made, and must not exist.
    """

    def __init__(self, recipe: Path, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.recipe = recipe
        self.mark = uuid.uuid4().hex
        self.output = folder / "output.txt"
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Begin the run, or resume it."""
        arguments = ["run", str(self.recipe), "--run-dir", str(self.run_dir)]
        if (self.run_dir / "recipe.json").exists():
            arguments = ["run", "--resume", str(self.run_dir)]
        elif self.run_dir.exists():  # killed before it was a run
            shutil.rmtree(self.run_dir)
        environment = {
            **os.environ,
            "NO_COLOR": "1",
            "TMPDIR": str(self.temporary),
            # A cache, meant to stay.
            "TORCHINDUCTOR_CACHE_DIR": str(self.recipe.parent / "compiled"),
            _MARK: self.mark,
        }
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self.starts += 1
        return self.process

    def worker(self, kind: str) -> int | None:
        """Process id of the engine, or of a stage's trainer; None if there is none now."""
        for pid in self._processes():
            with contextlib.suppress(OSError):
                if b"headrace.cluster.worker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    continue
                log = Path(os.readlink(f"/proc/{pid}/fd/1")).stem
                if (log == "engine") == (kind == "engine"):
                    return pid
        return None

    def kill(self, target: str) -> bool:
        """SIGKILL what `target` names; False if the run ended before there was such a thing."""
        process = self.process
        assert process is not None
        if target == "all":
            os.killpg(process.pid, signal.SIGKILL)
        elif target == "main":
            process.kill()
        else:
            deadline = time.monotonic() + DEADLINE_S
            while (pid := self.worker(target)) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)  # another process's children: nothing to wait on
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return True
        process.wait(DEADLINE_S)
        return True

    @property
    def updates(self) -> int:
        """Updates of the RL stage that it has reported."""
        try:
            lines = (self.run_dir / "metrics.jsonl").read_text(errors="replace").splitlines()
        except OSError:
            return 0
        return sum(f'"stage":"{STAGE}"' in line.replace(" ", "") for line in lines)

    def wait(self, after_s: float, *, update: bool) -> bool:
        """Until so much time has passed, counted from the next update if that is wanted; False if
        the run ended before."""
        process = self.process
        assert process is not None
        if update:
            reached, deadline = self.updates, time.monotonic() + DEADLINE_S
            while self.updates == reached and process.poll() is None:
                if time.monotonic() > deadline:
                    raise Failure(f"{self.run_dir} makes no progress")
                time.sleep(_POLL_S)  # another process's file: nothing to wait on
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    def left_behind(self) -> list[str]:
        """What there still is of a run whose main process has ended, once it had time to go."""
        deadline = time.monotonic() + GONE_S
        while (found := list(self._remains())) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    def _remains(self) -> Iterator[str]:
        for pid in self._processes():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                yield f"process {pid}: {command.decode(errors='replace')[:100]}"
        run = hashlib.blake2b(os.fsencode(self.run_dir.resolve()), digest_size=8).hexdigest()
        if (shared := Path(f"/dev/shm/headrace-{run}")).exists():
            yield f"shared memory {shared}"
        yield from (f"temporary {path.name}" for path in self.temporary.iterdir())

    def _processes(self) -> Iterator[int]:
        mark = f"{_MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        yield int(entry.name)

    def end(self) -> None:
        """Kill what is left of it."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(DEADLINE_S)

    def check_audit(self) -> None:
        """Raises Failure when a law is broken in its record as it is now."""
        if not ledger_file(self.run_dir).exists():
            return  # killed before it had one
        from headrace.errors import UserError

        try:
            reader = LedgerReader.open(self.run_dir)
        except UserError as error:
            if "is empty" in str(error):
                return
            raise
        with reader as ledger:
            broken = {law: detail for law, (held, detail) in audit(ledger).items() if not held}
        if broken:
            raise Failure(f"{self.run_dir}: {broken}")


class Trained:
    """What a finished run has trained."""

    def __init__(self, run_dir: Path) -> None:
        with LedgerReader.open(run_dir) as ledger:
            self.trajectories = trained_trajectories(ledger, STAGE)
            sessions = list(ledger.sessions(stage=STAGE))
            self.lost = sum(session.reason == "crash" for session in sessions)
            self.replayed = sum(batch.replays for batch in ledger.batches(STAGE))
        weights = run_dir / "checkpoints" / STAGE / "model.safetensors"
        self.weights = hashlib.sha256(weights.read_bytes()).hexdigest()


def crash(text: str, folder: Path, *, kills: int, within_s: float, seed: int) -> dict[str, float]:
    """Run without and with kills; counts and times.

    Args:
        text: the recipe.
        folder: for everything.
        kills: how many, in as many runs as it takes.
        within_s: longest time from a start to a kill.
        seed: of targets and moments.

    Raises:
        Failure: something is broken, lost, left behind or different.
    """
    recipe = folder / "crashes.toml"
    recipe.write_text(text)
    began = time.monotonic()
    whole = Lives(recipe, folder / "whole")
    run_to_end(whole)
    uninterrupted_s = time.monotonic() - began
    wanted = Trained(whole.run_dir)
    _require_gone(whole)
    chance = random.Random(seed)
    done: Counter[str] = Counter()
    found: list[Trained] = []
    starts = 0
    while not found or done.total() < kills:
        lives = Lives(recipe, folder / f"broken-{len(found)}")
        try:
            _live_through(lives, chance, done, kills=kills, within_s=within_s)
            found.append(Trained(lives.run_dir))
        finally:
            lives.end()
        starts += lives.starts - 1
        different = (found[-1].trajectories - wanted.trajectories).total() + (
            wanted.trajectories - found[-1].trajectories
        ).total()
        if different:
            raise Failure(f"{different} trajectories are not those of the uninterrupted run")
        print(f"{dict(done)}: run {len(found)} is equal", file=sys.stderr, flush=True)
    same = [run.weights == wanted.weights for run in found]
    return {
        "kills": done.total(),
        **{f"kills_{target}": done[target] for target in TARGETS},
        "audits_clean": done.total() + len(found),
        "runs_compared": len(found),
        "resumes": starts,
        "trajectories_trained": wanted.trajectories.total(),
        "trajectories_different": 0,
        "weights_equal": float(all(same)),
        "rollouts_lost_in_crashes": sum(run.lost for run in found),
        "batches_replayed": sum(run.replayed for run in found),
        "uninterrupted_s": uninterrupted_s,
        "wall_s": time.monotonic() - began,
    }


def run_to_end(lives: Lives) -> None:
    """Start it, and raise Failure unless it ends well."""
    try:
        if lives.start().wait(DEADLINE_S) != 0:
            raise Failure(f"a run that nobody killed failed: {_tail(lives.output)}")
    finally:
        lives.end()


def _live_through(
    lives: Lives, chance: random.Random, done: Counter[str], *, kills: int, within_s: float
) -> None:
    """One run to its end, with kills until there were enough."""
    process = lives.start()
    while True:
        more = done.total() < kills
        # Half of the moments are counted from a start or the last kill, half from an update: a run
        # spends as long with starting as with training when it is killed so often.
        update = chance.random() < 0.5
        after = chance.uniform(0.0, 1.5 if update else within_s)
        target = chance.choice(TARGETS)
        if not more:
            update, after = False, DEADLINE_S
        if lives.wait(after, update=update):
            if not more:
                raise Failure(f"{lives.run_dir} does not end")
            if lives.kill(target):
                done[target] += 1
                lives.check_audit()
            if process.poll() is None:
                continue  # only a part of it was killed, which it may outlive
        code = process.returncode
        _require_gone(lives)
        if code == 0:
            lives.check_audit()
            return
        if code not in (2, -signal.SIGKILL):
            raise Failure(f"exit code {code} after {dict(done)}: {_tail(lives.output)}")
        process = lives.start()


def _require_gone(lives: Lives) -> None:
    if left := lives.left_behind():
        raise Failure(f"left behind: {left}")


def _tail(output: Path) -> str:
    return output.read_text(errors="replace")[-2000:]


def main() -> None:
    """Entry point."""
    parser = new_parser(__doc__, quick="3 kills of a shorter run (about a minute)")
    parser.add_argument("--kills", type=int, help="how many")
    parser.add_argument("--updates", type=int, help="of the RL stage")
    parser.add_argument("--warmup-steps", type=int, help="of the supervised stage")
    parser.add_argument("--within-s", type=float, help="longest time from a start to its kill")
    parser.add_argument("--seed", type=int, default=0, help="of the recipe and the kills")
    parser.add_argument("--folder", type=Path, help="keep everything there instead of nowhere")
    arguments = fill_sizes(
        parser.parse_args(),
        (("kills", 3, 30), ("updates", 12, 40), ("warmup_steps", 60, 60), ("within_s", 12, 12)),
    )
    with contextlib.ExitStack() as stack:
        if arguments.folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="headrace-crashes-")
            folder = Path(stack.enter_context(temporary))
        else:
            folder = arguments.folder
            folder.mkdir(parents=True)
        metrics = crash(
            whole_recipe(arguments.seed, arguments.warmup_steps, arguments.updates),
            folder,
            kills=arguments.kills,
            within_s=arguments.within_s,
            seed=arguments.seed,
        )
    print_report(
        "crash_recovery",
        arguments,
        metrics,
        "Every figure but the times is the same on any machine for which the run is deterministic "
        "within itself; kills hit other moments there.",
    )


if __name__ == "__main__":
    main()
