"""`headrace show`: what it prints of a run and of a trajectory, and its mistakes."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import RunMaker
from tokenizers import Tokenizer
from tokenizers.models import BPE

from headrace.errors import UserError
from headrace.observe.conversation import conversation
from headrace.observe.show import list_trajectories, show_run, show_trajectory
from headrace.observe.units import duration, printable, short
from headrace.observe.vocabulary import Vocabulary
from headrace.rollout.record.reading import LedgerReader
from headrace.rollout.types import Call, FinishReason, ParseState, Session


def _console(width: int = 120) -> Console:
    return Console(width=width, record=True, file=io.StringIO(), color_system=None)


def _unwrapped(console: Console) -> str:
    return " ".join(console.export_text().split())


def test_summary_of_a_run(finished_run: Path) -> None:
    console = _console()
    show_run(finished_run, console)
    printed = _unwrapped(console)
    for words in (
        "quickstart finished",
        "seed 7",
        "sft-longer",
        "after rl against after sft:",
        "after rl against stage sft-longer (same start)",
        "not trained: evaluation",
        "The ledger closes.",
        "L9 broken (one batch twice)",
    ):
        assert words in printed, words


def test_summary_of_a_killed_run(run_maker: RunMaker, tmp_path: Path) -> None:
    run = run_maker.make(tmp_path / "killed", until="sft")
    console = _console()
    show_run(run, console)
    printed = _unwrapped(console)
    assert "quickstart unfinished" in printed
    assert "No evaluation has finished" in printed
    assert "not started" in printed


def test_list_is_newest_first_and_bounded(finished_run: Path) -> None:
    console = _console()
    list_trajectories(finished_run, console, limit=3)
    rows = [line for line in console.export_text().splitlines() if "eval-" in line]
    assert [row.split()[0] for row in rows] == [f"eval-sft-longer-{i}" for i in (23, 22, 21)]
    console = _console()
    list_trajectories(finished_run, console)
    assert "rl-g012-2-3" in console.export_text()


def test_trajectory_token_by_token(finished_run: Path) -> None:
    with LedgerReader.open(finished_run) as ledger:
        summary = next(s for s in ledger.sessions(purpose="train") if s.step is not None)
        session = ledger.session(summary.id)
    console = _console()
    show_trajectory(finished_run, summary.id, console)
    printed = console.export_text()
    rows = [line.split() for line in printed.splitlines() if line.strip()[:1].isdigit()]
    rows = [row for row in rows if row[-1] == "–" or row[-1].startswith("v")]
    sampled = [row for row in rows if row[-1].startswith("v")]
    spans = [span for call in session.calls for span in call.spans]
    assert [int(row[1]) for row in sampled] == [i for span in spans for i in span.ids]
    assert [float(row[-2]) for row in sampled] == pytest.approx(
        [p for span in spans for p in span.logprobs], abs=5e-5
    )
    assert [row[-1] for row in sampled] == [f"v{s.weight_version}" for s in spans for _ in s.ids]
    assert all(row[-3] == "train" for row in sampled)
    assert len(rows) == len(sampled) + sum(len(c.prompt_delta) for c in session.calls)
    assert "trained in update" in printed
    assert "<|assistant|>bash ls -1" in printed, "the text as the model wrote it"


def test_characters_that_span_tokens(finished_run: Path) -> None:
    with LedgerReader.open(finished_run) as ledger:
        failed = next(s for s in ledger.sessions(purpose="eval:sft") if s.reward == 0)
    console = _console()
    show_trajectory(finished_run, failed.id, console)
    printed = console.export_text()
    assert "0 ☃<|endoftext|>" in printed, "whole in running text"
    assert "'\\xe2'" in printed, "byte by byte in the table"
    assert "dropped" in printed, "evaluation tokens never train"


def test_a_unique_prefix_is_enough(finished_run: Path) -> None:
    console = _console()
    show_trajectory(finished_run, "rl-g012-2-3", console)
    assert "trajectory rl-g012-2-3-" in _unwrapped(console)


def test_a_whole_id_wins_over_longer_ones(finished_run: Path) -> None:
    console = _console()
    show_trajectory(finished_run, "eval-start-2", console)  # eval-start-20 exists, too
    assert "trajectory eval-start-2 " in _unwrapped(console)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("rl-g012", "12 ids start with it"), ("eval-rl-x7", 'did you mean "eval-rl-7"')],
)
def test_unclear_ids(finished_run: Path, wanted: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        show_trajectory(finished_run, wanted, _console())
    assert "\n" not in str(caught.value)


def test_directories_that_are_no_runs(finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match='did you mean "quickstart-7"'):
        show_run(tmp_path / "quickstart-8", _console())
    with pytest.raises(UserError, match="it holds the runs quickstart-7"):
        show_run(tmp_path, _console())
    empty = tmp_path / "only-recipe"
    empty.mkdir()
    (empty / "recipe.json").write_text("{}")
    with pytest.raises(UserError, match="no rollout was recorded"):
        list_trajectories(empty, _console())


def test_ids_are_shown_without_a_tokenizer(finished_run: Path) -> None:
    (finished_run / "checkpoints" / "sft" / "tokenizer.json").unlink()
    console = _console()
    show_trajectory(finished_run, "rl-g012-2-3", console)
    assert "ids are shown without text" in console.export_text()


def test_a_damaged_tokenizer_is_one_clear_line(finished_run: Path) -> None:
    (finished_run / "checkpoints" / "sft" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="not a readable tokenizer"):
        show_trajectory(finished_run, "rl-g012-2-3", _console())


def test_every_byte_comes_back(run_maker: RunMaker) -> None:
    vocabulary = Vocabulary(run_maker.tokenizer)
    text = "".join(map(chr, range(1, 0x250))) + "☃ \n\t<|user|>"
    ids = run_maker.tokenizer.encode(text).ids
    assert b"".join(vocabulary.raw(i) for i in ids).decode() == text
    assert vocabulary.raw(10_000_000) == b""


def test_sentencepiece_tokens_are_read() -> None:
    vocabulary = Vocabulary(
        Tokenizer(BPE(vocab={"▁ls": 0, "<0x0A>": 1, "é": 2, "<0xFF>": 3}, merges=[]))
    )
    assert (vocabulary.raw(0), vocabulary.raw(1), vocabulary.text(1)) == (b" ls", b"\n", "\\n")
    assert vocabulary.text(2) == "é"


def _call(index: int, response: dict, state: ParseState, messages: list[dict]) -> Call:
    return Call(
        id=f"c{index}",
        session_id="s",
        index=index,
        parent_id=None,
        fork_reason=None,
        idempotency_key=None,
        messages=messages,
        tools=[],
        renderer_id="compact",
        prompt_delta=(1,),
        spans=(),
        finish_reason=FinishReason.LENGTH,
        parse_state=state,
        response=response,
        started_at=0.0,
        finished_at=0.0,
    )


def test_conversations_are_total_and_say_what_went_wrong() -> None:
    bad = {"role": "assistant", "content": "<tool_call>bash<", "tool_calls": None}
    odd = {
        "role": "assistant",
        "content": [{"type": "text", "text": "hm"}],
        "tool_calls": [
            {"function": {"name": "edit", "arguments": '{"a": 1, "b": "x"}'}},
            {"function": {"name": "bash", "arguments": "{not json"}},
            "nonsense",
        ],
    }
    first = _call(0, bad, ParseState.MALFORMED, [{"role": "user", "content": "go"}])
    bell = {"role": "tool", "content": "a\x07b\x00\ud800\tc\x9b31m"}
    second = _call(1, odd, ParseState.TRUNCATED, [*first.messages, bad, bell])
    session = Session(
        id="s",
        stage="rl",
        purpose="train",
        task="t",
        instance={},
        group_id="g",
        calls=(first, second),
    )
    turns = conversation(session)
    assert [t.role for t in turns] == ["user", "assistant", "tool", "assistant"]
    assert turns[1].note == "malformed tool call"
    assert turns[2].text == "a␇b␀\\ud800\tc\ufffd31m", "nothing that a terminal would obey"
    assert turns[3].note == "cut off (length)"
    assert turns[3].text == 'hm\nedit(a=1, b="x")\nbash({not json)\nnonsense'
    assert conversation(Session("s", "rl", "train", "t", {}, "g")) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.42, "0.4 s"), (59.6, "1:00"), (42.0, "42 s"), (187.0, "3:07"), (3723.0, "1:02:03")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
    assert duration(None) == "–"


def test_short_numbers_and_printable_text() -> None:
    assert [short(v) for v in (842.0, 3120.0, 1.5e7, 0.0042, 2.1e-6, 0.0)] == [
        "842",
        "3.1k",
        "15.0M",
        "0.0042",
        "2.1e-06",
        "0",
    ]
    assert printable("a\nb\x00é") == "a\\nb\\x00é"
