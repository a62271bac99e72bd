"""Metrics on disk: whole lines, resume after a tear, TensorBoard, full disks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from headrace.errors import UserError
from headrace.observe.metrics import FILE_NAME, MetricsWriter, read_metrics
from headrace.observe.summary import read_summary, write_summary


def test_rows_come_back_as_logged(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.log("sft", 1, {"loss": 2.5})
        writer.log("rl", 3, {"reward_mean": 0.25, "loss": float("nan")})
    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert [set(line) for line in lines] == [{"time", "elapsed", "stage", "step", "metrics"}] * 2
    first, second = read_metrics(tmp_path)
    assert (first.stage, first.step, first.metrics) == ("sft", 1, {"loss": 2.5})
    assert second.metrics == {"reward_mean": 0.25}, "what is not finite is left out"
    assert 0 <= first.elapsed <= second.elapsed


def test_a_row_is_on_disk_before_log_returns(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.log("sft", 1, {"loss": 1.0})
        assert len(read_metrics(tmp_path)) == 1


def test_resume_cuts_a_torn_line_and_keeps_counting_time(tmp_path: Path) -> None:
    old = {"time": 1000.0, "elapsed": 40.0, "stage": "sft", "step": 1, "metrics": {"loss": 2.0}}
    (tmp_path / FILE_NAME).write_bytes(json.dumps(old).encode() + b'\n{"time": 1001.0, "ela')
    with MetricsWriter(tmp_path, resume=True) as writer:
        row = writer.log("sft", 2, {"loss": 1.0})
    assert row.elapsed == pytest.approx(row.time - 960.0, abs=0.01)
    assert [r.step for r in read_metrics(tmp_path)] == [1, 2]
    assert all(json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines())


def test_a_used_directory_is_refused_without_resume(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.log("sft", 1, {"loss": 1.0})
    with pytest.raises(UserError, match="--resume"):
        MetricsWriter(tmp_path)


def test_unreadable_lines_are_skipped_by_readers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.log("sft", 1, {"loss": 1.0})
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b"\xff\xfe nonsense\n[1, 2]\n")
    assert len(read_metrics(tmp_path)) == 1
    assert read_metrics(tmp_path / "missing") == []


def test_tensorboard_reads_every_scalar(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.log("rl", 7, {"reward_mean": 0.5, "loss": -0.25})
    (file,) = (tmp_path / "tensorboard").iterdir()
    # The loader checks the records' checksums and migrates scalars to tensors.
    events = list(EventFileLoader(str(file)).Load())
    found = {
        value.tag: (event.step, value.tensor.float_val[0])
        for event in events
        for value in event.summary.value
    }
    assert events[0].file_version == "brain.Event:2"
    assert found == {"rl/reward_mean": (7, 0.5), "rl/loss": (7, -0.25)}


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    with pytest.raises(UserError, match="no space left"):
        writer.log("sft", 1, {"loss": 1.0})
    writer.close()


def test_the_observing_process_never_imports_torch() -> None:
    code = (
        "import sys, headrace.observe.metrics, headrace.observe.live, headrace.observe.report, "
        "headrace.observe.show; sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_summary_is_replaced_whole(tmp_path: Path) -> None:
    assert read_summary(tmp_path) is None
    write_summary(tmp_path, {"status": "running"})
    write_summary(tmp_path, {"status": "finished", "note": "ü"})
    assert read_summary(tmp_path) == {"status": "finished", "note": "ü"}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("content", ['{"status": ', "[1]"])
def test_a_damaged_summary_is_one_clear_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(UserError, match=r"summary\.json"):
        read_summary(tmp_path)


def test_a_missing_directory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_summary(tmp_path / "gone", {})
