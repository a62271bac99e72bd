"""Chat: thinking and tool calls are shown, calls carried out when asked, a conversation goes on."""

import io

import pytest
from rich.console import Console

from headrace.chat import ChatOptions, Conversation, read_files
from headrace.engine.types import GenerationResult
from headrace.errors import UserError
from headrace.gateway.gateway import Gateway
from headrace.gateway.turn import ApiError
from headrace.rollout.types import FinishReason, Span
from headrace.sandbox.types import CommandResult, EndReason, FileEntry
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.training import SMALLEST_VOCABULARY, train_tokenizer


def answer(content="", calls=(), finish="stop", thinking=None):
    """A chat completion as the gateway returns it; calls are (name, arguments) pairs."""
    message: dict[str, object] = {"role": "assistant", "content": content}
    if thinking is not None:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(calls)
        ]
    return {"choices": [{"message": message, "finish_reason": finish}]}


class ScriptedGateway:
    """Gives prepared answers and keeps what it was sent."""

    model = "scripted"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.bodies = []

    async def chat(self, key, body, idempotency_key=None):
        self.bodies.append({**body, "messages": list(body["messages"])})
        prepared = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(prepared, Exception):
            raise prepared
        return prepared


class EchoSandbox:
    """Says which command it was given."""

    def __init__(self):
        self.commands = []

    async def run(self, command, *, timeout_s=None):
        self.commands.append(command)
        return CommandResult(0, f"ran {command}\n".encode(), False, EndReason.EXITED, 0.0)


class SpeakingEngine:
    """Samples prepared texts, template tokens and all."""

    max_context = 4096
    weight_version = 0

    def __init__(self, tokenizer, *texts):
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.prompts = []

    async def generate(self, request, on_progress=None):
        self.prompts.append(self.tokenizer.decode(request.prompt_ids))
        ids = tuple(self.tokenizer.encode(self.texts.pop(0)))
        stopped = ids[-1] in request.sampling.stop_ids
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return GenerationResult(request.id, (Span(ids, (-1.0,) * len(ids), 0, "e"),), reason)

    async def abort(self, request_id):
        pass

    async def load_weights(self, path, version, policy="continue"):
        pass

    async def stats(self):
        return {}

    async def close(self):
        pass


def conversation(gateway, sandbox=None, *, key="key", terminal=False, **options):
    colors = "standard" if terminal else None
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=colors)
    return Conversation(gateway, key, ChatOptions(**options), console, sandbox), console


def shown(console):
    return console.file.getvalue()


async def test_the_conversation_grows_by_each_turn():
    gateway = ScriptedGateway(answer("hello"), answer("bye"))
    talk, console = conversation(gateway, system="Be brief.")
    await talk.say("hi")
    await talk.say("see you")
    assert [m["role"] for m in gateway.bodies[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert "tools" not in gateway.bodies[0]
    assert shown(console) == "hello\nbye\n"


async def test_tool_calls_are_only_shown_without_a_sandbox():
    gateway = ScriptedGateway(answer(calls=[("bash", '{"command": "ls"}')]))
    talk, console = conversation(gateway)
    await talk.say("list")
    assert 'call bash {"command": "ls"}' in shown(console)
    assert len(gateway.bodies) == 1


async def test_tool_calls_run_in_the_sandbox_and_the_model_reads_the_result():
    gateway = ScriptedGateway(answer(calls=[("bash", '{"command": "wc -l"}')]), answer("3"))
    sandbox = EchoSandbox()
    talk, console = conversation(gateway, sandbox)
    await talk.say("count")
    assert sandbox.commands == ["wc -l"]
    last = gateway.bodies[1]["messages"][-1]
    assert last == {"role": "tool", "tool_call_id": "c0", "content": "ran wc -l"}
    assert gateway.bodies[0]["tools"][0]["function"]["name"] == "bash"
    assert shown(console).splitlines()[-1] == "3"


@pytest.mark.parametrize(
    "call",
    [
        ("bash", "{not json"),
        ("bash", "[1]"),
        ("bash", '{"command": 3}'),
        ("bash", '{"command": "a\\u0000b"}'),
        ("python", '{"command": "ls"}'),
    ],
)
async def test_a_call_that_cannot_be_read_is_answered_not_run(call):
    gateway = ScriptedGateway(answer(calls=[call]), answer("sorry"))
    sandbox = EchoSandbox()
    talk, _ = conversation(gateway, sandbox)
    await talk.say("go")
    assert sandbox.commands == []
    assert gateway.bodies[1]["messages"][-1]["content"].startswith("error: call bash")


async def test_thinking_is_shown_dimmed_before_the_answer():
    gateway = ScriptedGateway(answer("12", thinking="I count\nthe lines.\n"))
    talk, console = conversation(gateway)
    await talk.say("how many?")
    assert shown(console) == "think I count\nthe lines.\n12\n"
    talk, console = conversation(gateway, terminal=True)
    await talk.say("how many?")
    dim, plain = shown(console).split("the lines.")
    assert dim.startswith("\x1b[2;3mthink I count")
    assert "2;3" not in plain
    talk, console = conversation(ScriptedGateway(answer("12", thinking=" ")))
    await talk.say("how many?")
    assert shown(console) == "12\n"


async def test_a_thinking_model_behind_the_gateway_thinks_calls_and_answers():
    """GLM-5's format end to end: thinking of a tool cycle stays, a new question removes it."""
    tokenizer = train_tokenizer([], SMALLEST_VOCABULARY)
    call = "<tool_call>bash<arg_key>command</arg_key><arg_value>wc -l</arg_value></tool_call>"
    engine = SpeakingEngine(
        tokenizer,
        f"I count.</think>{call}<|observation|>",
        "So 3.</think>3 lines<|user|>",
        "I am.</think>yes<|user|>",
        "I never end",
    )
    gateway = Gateway(engine, LibraryRenderer("glm-5", tokenizer))
    key = gateway.open_session("chat")
    talk, console = conversation(gateway, EchoSandbox(), key=key, system="Be brief.")
    for text in ("how many?", "sure?", "really?"):
        await talk.say(text)
    await gateway.close()
    assert shown(console).splitlines() == [
        "think I count.",
        'call bash {"command":"wc -l"}',
        "     ran wc -l",
        "think So 3.",
        "3 lines",
        "think I am.",
        "yes",
        "think I never end",
        "(cut; allow more with --max-tokens)",
    ]
    assert engine.prompts[1].endswith(
        f"<think>I count.</think>{call}<|observation|><tool_response>ran wc -l</tool_response>"
        "<|assistant|><think>"
    )
    assert engine.prompts[2].endswith("</think>3 lines<|user|>sure?<|assistant|><think>")
    assert "I count." not in engine.prompts[2]


async def test_endless_tool_calls_are_stopped():
    gateway = ScriptedGateway(answer(calls=[("bash", '{"command": "ls"}')]))
    talk, console = conversation(gateway, EchoSandbox())
    await talk.say("go")
    assert len(gateway.bodies) == 8
    assert "stopped after 8 rounds" in shown(console)


async def test_a_cut_answer_says_so_and_markup_is_not_interpreted():
    gateway = ScriptedGateway(answer("[bold]x[/bold]", finish="length"))
    talk, console = conversation(gateway)
    await talk.say("go")
    assert "[bold]x[/bold]" in shown(console)
    assert "--max-tokens" in shown(console)


async def test_a_full_context_is_a_clear_end():
    gateway = ScriptedGateway(ApiError(400, "context_length_exceeded", "too many tokens"))
    talk, _ = conversation(gateway)
    with pytest.raises(UserError, match="too many tokens; start a new conversation"):
        await talk.say("go")


def test_files_are_read_as_they_are_and_links_stay_links(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("x\n")
    (tmp_path / "sub" / "a.txt").chmod(0o600)
    (tmp_path / "out").symlink_to("/etc/passwd")
    (tmp_path / "away").symlink_to("/etc")
    found = read_files(tmp_path)
    assert set(found) == {"sub", "sub/a.txt", "out", "away"}
    assert found["sub/a.txt"] == FileEntry("file", 0o600, b"x\n")
    assert (found["out"].kind, found["out"].data) == ("link", b"/etc/passwd")
    assert (found["away"].kind, found["away"].data) == ("link", b"/etc")


def test_too_many_files_and_missing_folders_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no such directory"):
        read_files(tmp_path / "none")
    monkeypatch.setattr("headrace.chat._MAX_FILES", 2)
    for name in "abc":
        (tmp_path / name).write_text(name)
    with pytest.raises(UserError, match="more than 2 files"):
        read_files(tmp_path)
    monkeypatch.setattr("headrace.chat._MAX_FILE_BYTES", 2)
    with pytest.raises(UserError, match="more than 16 MiB"):
        read_files(tmp_path)
