"""Calls share the tokens that they have in common: what each read is put together unchanged, and a
session's memory grows with its tokens."""

import gc
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine, answers, merged_tokenizer

from headrace.gateway.gateway import Gateway
from headrace.gateway.history import History, Node
from headrace.rollout.types import Call, FinishReason, ParseState, Span
from headrace.tokens.compact import CompactRenderer

IDS = st.lists(st.integers(0, 3), max_size=4)


def call(index: int, parent: Node | None, delta: list[int], outputs: list[list[int]]) -> Call:
    return Call(
        id=f"s/{index}",
        session_id="s",
        index=index,
        parent_id=None if parent is None else parent.call.id,
        fork_reason=None,
        idempotency_key=None,
        messages=[],
        tools=[],
        renderer_id="r",
        prompt_delta=tuple(delta),
        spans=tuple(
            Span(tuple(ids), (-1.0,) * len(ids), version, "e")
            for version, ids in enumerate(outputs)
            if ids
        ),
        finish_reason=FinishReason.STOP,
        parse_state=ParseState.OK,
        response={},
        started_at=0.0,
        finished_at=0.0,
    )


@given(st.lists(st.tuples(st.integers(0, 9), IDS, st.lists(IDS, max_size=3)), max_size=12))
def test_paths_are_the_concatenations_that_they_stand_for(tree):
    """Random trees of calls, against prompts that are held whole."""
    history = History()
    nodes: list[Node] = []
    whole: list[tuple[list[int], list[int]]] = []  # (prompt, path) of each
    for chosen, delta, outputs in tree:
        parent = chosen - 1 if 0 < chosen <= len(nodes) else None
        before = [] if parent is None else whole[parent][1]
        node = Node.of(
            call(len(nodes), None if parent is None else nodes[parent], delta, outputs),
            None if parent is None else nodes[parent],
            {"role": "assistant", "content": ""},
            b"",
        )
        nodes.append(node)
        history.add(node, [])
        prompt = [*before, *delta]
        whole.append((prompt, [*prompt, *(i for ids in outputs for i in ids)]))
        for held, (read, path) in zip(nodes, whole, strict=True):
            assert held.prompt_ids() == read
            assert held.path_ids() == path
            assert (held.prompt_length, held.path_length) == (len(read), len(path))
        found = history.match_tokens([*whole[-1][1], 7])
        longest = max(len(path) for _, path in whole if [*whole[-1][1], 7][: len(path)] == path)
        assert found is not None
        assert found.path_length == longest


async def test_memory_of_a_session_grows_with_its_tokens():
    renderer = CompactRenderer(merged_tokenizer())
    said = renderer.tokenizer.encode_text("there are 12 lines " * 8)
    engine = ScriptedEngine(answers([*said, min(renderer.stop_ids)]), max_context=10**9)
    gateway = Gateway(engine, renderer)
    key, messages = gateway.open_session("s"), []
    held: list[int] = []
    tracemalloc.start()
    try:
        for turn in range(1, 31):
            text = f"{turn} how many lines are in notes.txt? " * 16
            messages.append({"role": "user", "content": text})
            body = await gateway.chat(key, {"messages": list(messages)})
            answer = body["choices"][0]["message"]
            messages.append({"role": "assistant", "content": answer["content"]})
            engine.requests.clear()
            engine.log.clear()
            if turn % 10 == 0:
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    calls = gateway.calls("s")
    assert sum(len(one.prompt_delta) + len(one.output_ids) for one in calls) > 5_000
    assert all(one.parent_id is not None for one in calls[1:])
    assert held[2] - held[1] < 1.3 * (held[1] - held[0]), "as much for each turn, however late"
