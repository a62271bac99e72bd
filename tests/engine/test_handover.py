"""Handed-over prefixes: the same tokens as computed ones, and every way it can go wrong."""

import random
from pathlib import Path

import msgspec
import pytest
import torch
from engine_harness import (
    LATENT_KINDS,
    ask,
    drain,
    full_logits,
    greedy_reference,
    latent_model,
    logprobs,
    new_core,
    output,
    random_prompt,
    tiny_model,
)

from headrace.engine.cache import transfer as kv_transfer
from headrace.engine.cache.handover import Handover, HandoverFiles
from headrace.engine.cache.transfer import Adoption
from headrace.engine.core import EngineCore
from headrace.engine.types import GenerationResult
from headrace.errors import UserError
from headrace.model.checkpoint import save_checkpoint
from headrace.model.decoder import Decoder

torch.set_num_threads(1)


def make(kind: str, seed: int = 0) -> Decoder:
    return tiny_model(seed) if kind == "grouped" else latent_model(kind, seed)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks each, so that short prompts have several."""
    monkeypatch.setattr(kv_transfer, "_PIECE_BYTES", 5_000)


def compute(core: EngineCore, prompt: tuple[int, ...]) -> None:
    """As an engine does that only computes prompts."""
    core.add(ask("prefill", prompt, max_tokens=1))
    drain(core)


def hand_over(
    prefill: EngineCore, decode: EngineCore, prompt: tuple[int, ...], file: Path
) -> Handover:
    first = decode.handovers.held(prompt)
    compute(prefill, prompt)
    handover = prefill.handovers.export(prompt[:-1], first, file)
    assert handover is not None
    assert file.stat().st_size == handover.nbytes
    assert decode.handovers.adopt(prompt, handover) == len(prompt) - 1
    file.unlink()
    return handover


def check_whole(core: EngineCore) -> None:
    """Every block is free or held by the tree alone."""
    assert core._pool.idle == core._tree.held
    assert core._pool.free + core._pool.idle == core._pool.blocks


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("kind", ["grouped", *LATENT_KINDS])
def test_sessions_say_the_same_as_without_a_handover(
    kind: str, drafts: int, tmp_path: Path
) -> None:
    """Three turns of three sessions: only what the sampling engine lacks crosses over."""
    model = make(kind)
    sizes = {"draft_tokens": drafts, "max_context": 256}
    prefill, decode, alone = (new_core(make(kind), **sizes) for _ in range(3))
    prompts = {f"s{i}": random_prompt(i, 33 + 10 * i) for i in range(3)}
    for turn in range(3):
        requests = [
            ask(name, prompt, max_tokens=9, temperature=1.0, seed=turn)
            for name, prompt in prompts.items()
        ]
        for request in requests:
            held = decode.handovers.held(request.prompt_ids)
            handover = hand_over(prefill, decode, request.prompt_ids, tmp_path / "f")
            assert handover.first == held // 8 * 8
            assert handover.end == len(request.prompt_ids) - 1
            assert len(handover.pieces) > 1 or turn
        before = decode.stats()
        for core in (decode, alone):
            for request in requests:
                core.add(request)
        results, wanted = drain(decode), drain(alone)
        # Nothing but the last token of each prompt was computed here.
        assert decode.stats().tokens_prefilled - before.tokens_prefilled == len(requests)
        for name, prompt in prompts.items():
            got, want = results[name], wanted[name]
            assert output(got) == output(want)
            assert logprobs(got) == pytest.approx(logprobs(want), abs=1e-5)
            assert got.reused_tokens == len(prompt) - 1
            if drafts and model.mtp is not None:
                assert (got.drafted_tokens, got.accepted_tokens) == (
                    want.drafted_tokens,
                    want.accepted_tokens,
                )
            prompts[name] = (*prompt, *output(got), *random_prompt(100 + turn, 17))
    stats = decode.stats()
    assert (stats.handovers, stats.handovers_stale, stats.handovers_failed) == (9, 0, 0)
    assert stats.handover_bytes == prefill.stats().handover_bytes > 0
    check_whole(decode)
    check_whole(prefill)


def test_deterministic_engines_hand_over_without_a_trace(tmp_path: Path) -> None:
    """To the bit: a prompt computed in other chunks by another engine."""
    sizes = {"deterministic": True, "prefill_tokens": 16}
    prefill, decode, alone = (new_core(tiny_model(), **sizes) for _ in range(3))
    prompt = random_prompt(0, 70)
    hand_over(prefill, decode, prompt, tmp_path / "f")
    for core in (decode, alone):
        core.add(ask("r", prompt, max_tokens=20, temperature=0.8, seed=3, logprobs=2))
    got, want = drain(decode)["r"], drain(alone)["r"]
    assert got.spans == want.spans
    assert got.raw_logprobs == want.raw_logprobs
    assert got.alternatives == want.alternatives


def exported(core: EngineCore, prompt: tuple[int, ...], file: Path) -> Handover:
    compute(core, prompt)
    handover = core.handovers.export(prompt[:-1], 0, file)
    assert handover is not None
    return handover


def says_the_right_thing(core: EngineCore, prompt: tuple[int, ...], seed: int = 0) -> None:
    core.add(ask("after", prompt))
    assert output(drain(core)["after"]) == greedy_reference(tiny_model(seed), prompt, 8)
    check_whole(core)


def test_new_weights_refuse_what_old_ones_computed(tmp_path: Path) -> None:
    save_checkpoint(tiny_model(1), tmp_path / "v1")
    prompt = random_prompt(0, 60)
    decode = new_core(tiny_model(0))
    handover = exported(new_core(tiny_model(0)), prompt, tmp_path / "f")
    decode.load_weights(str(tmp_path / "v1"), 1)
    assert decode.handovers.adopt(prompt, handover) == 0
    assert decode.stats().handovers_stale == 1
    # And in the middle of one.
    late = new_core(tiny_model(0))
    adoption = Adoption(late.handovers, prompt, handover)
    assert adoption.advance()
    assert 0 < adoption.held < len(prompt) - 1
    late.load_weights(str(tmp_path / "v1"), 1)
    assert adoption.held == 0
    assert not adoption.advance()
    assert (late.stats().handovers, late.stats().handovers_stale) == (0, 1)
    for core in (decode, late):
        says_the_right_thing(core, prompt, seed=1)


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({"version": 3}, True),
        ({"layout": ("float32 [1, 2]",)}, True),
        ({"block_tokens": 16}, True),
        ({"prompt": 5}, True),
        ({"path": "/nowhere/at/all"}, False),
    ],
)
def test_what_does_not_fit_is_counted_and_left(
    change: dict[str, object], stale: bool, tmp_path: Path
) -> None:
    prompt = random_prompt(0, 60)
    decode = new_core(tiny_model())
    handover = exported(new_core(tiny_model()), prompt, tmp_path / "f")
    changed = msgspec.structs.replace(handover, **change)
    assert decode.handovers.adopt(prompt, changed) == 0
    stats = decode.stats()
    assert (stats.handovers_stale, stats.handovers_failed) == (int(stale), int(not stale))
    # Another prompt of the same length, and one too short for it.
    assert decode.handovers.adopt((*prompt[:20], 96 - prompt[20], *prompt[21:]), handover) == 0
    assert decode.handovers.adopt(prompt[:30], handover) == 0
    assert decode.stats().handovers_stale == 2 + stale
    says_the_right_thing(decode, prompt)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_file_gives_what_is_whole(damage: str, tmp_path: Path) -> None:
    prompt = random_prompt(0, 100)
    decode = new_core(tiny_model())
    handover = exported(new_core(tiny_model()), prompt, tmp_path / "f")
    piece = handover.pieces[1]
    data = bytearray((tmp_path / "f").read_bytes())
    if damage == "flip":
        data[piece.offset + piece.nbytes // 3] ^= 1
    else:
        del data[(piece.offset + 5) * (damage == "cut") :]
    (tmp_path / "f").write_bytes(data)
    held = decode.handovers.adopt(prompt, handover)
    assert held == (0 if damage == "empty" else piece.first)
    stats = decode.stats()
    assert (stats.handovers, stats.handovers_failed) == (0, 1)
    says_the_right_thing(decode, prompt)


def test_a_full_file_system_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(0, 60)
    core = new_core(tiny_model())
    compute(core, prompt)
    written = []

    def full(data: memoryview) -> int:
        written.append(len(data))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(kv_transfer, "checksum", full)
        assert core.handovers.export(prompt, 0, tmp_path / "f") is None
    assert written
    assert core.handovers.export(prompt, 0, tmp_path / "missing" / "f") is None
    assert core.handovers.export(random_prompt(5, 40), 0, tmp_path / "f") is None
    assert list(tmp_path.iterdir()) == []
    assert core.stats().handovers_failed == 2
    check_whole(core)


def test_evicted_before_it_is_used(tmp_path: Path) -> None:
    prompt, other = random_prompt(0, 60), random_prompt(1, 60)
    decode = new_core(tiny_model(), cache_tokens=72)
    hand_over(new_core(tiny_model()), decode, prompt, tmp_path / "f")
    decode.add(ask("other", other))
    drain(decode)
    assert decode.handovers.held(prompt) < 16
    says_the_right_thing(decode, prompt)
    # And between two pieces.
    handover = exported(new_core(tiny_model()), other, tmp_path / "g")
    adoption = Adoption(decode.handovers, other, handover)
    assert adoption.advance()
    decode.forget_prefixes()
    assert not adoption.advance()
    assert adoption.held == 0
    assert decode.stats().handovers == 1
    says_the_right_thing(decode, other)


def test_running_requests_keep_their_room(tmp_path: Path) -> None:
    """A full cache takes in what is left, and nobody is preempted for it."""
    prompt = random_prompt(0, 60)
    decode = new_core(tiny_model(), cache_tokens=72)
    handover = exported(new_core(tiny_model()), prompt, tmp_path / "f")
    decode.add(ask("running", random_prompt(1, 30), max_tokens=20))
    decode.step()
    held = decode.handovers.adopt(prompt, handover)
    assert 0 < held < 40
    assert held % 8 == 0
    decode.add(ask("asked", prompt, max_tokens=4))
    results = drain(decode)
    # What was idle gave way once more while it waited.
    assert 0 < results["asked"].reused_tokens <= held
    assert output(results["running"]) == greedy_reference(tiny_model(), random_prompt(1, 30), 20)
    assert output(results["asked"]) == greedy_reference(tiny_model(), prompt, 4)
    full = new_core(tiny_model(), cache_tokens=64)
    full.add(ask("all", random_prompt(1, 50), max_tokens=14))
    full.step()
    assert full.handovers.adopt(prompt, handover) == 0
    assert full.stats().handovers_failed == full.stats().preemptions == 0


@pytest.mark.parametrize("kind", ["grouped", "glm_moe_dsa"])
def test_random_histories(kind: str, tmp_path: Path) -> None:
    """Prompts arrive, are handed over in pieces among steps, updates, aborts and evictions."""
    rng = random.Random(7)
    models = [make(kind, version) for version in range(3)]
    for version, model in enumerate(models):
        save_checkpoint(model, tmp_path / f"v{version}")
    sizes = {"max_running": 4, "cache_tokens": 240, "prefill_tokens": 16}
    prefill, decode = new_core(make(kind), **sizes), new_core(make(kind), **sizes)
    adoptions: list[tuple[Adoption, tuple[int, ...]]] = []
    texts = [random_prompt(i, rng.randint(5, 40)) for i in range(3)]
    asked: dict[str, tuple[int, ...]] = {}
    checked = 0
    version = 0
    for turn in range(260):
        action = rng.random()
        if action < 0.25:
            base = rng.choice(texts)
            prompt = (*base[: rng.randint(1, len(base))], *random_prompt(turn, rng.randint(1, 30)))
            prompt = prompt[:90]
            file = tmp_path / f"f{turn}"
            compute(prefill, prompt)
            handover = prefill.handovers.export(prompt[:-1], decode.handovers.held(prompt), file)
            if handover is not None:
                adoptions.append((Adoption(decode.handovers, prompt, handover), prompt))
                file.unlink()
        elif action < 0.65 and adoptions:
            adoption, prompt = rng.choice(adoptions)
            if not adoption.advance():
                adoptions.remove((adoption, prompt))
                asked[f"r{turn}"] = prompt
                decode.add(ask(f"r{turn}", prompt, max_tokens=rng.randint(1, 12)))
        elif action < 0.68 and asked:
            decode.abort(rng.choice(list(asked)))
        elif action > 0.985 and version < 2:
            version += 1
            for core in (decode, prefill) if turn % 2 else (prefill, decode):
                core.load_weights(str(tmp_path / f"v{version}"), version)
        else:
            for ended in decode.step():
                assert isinstance(ended, GenerationResult)
                prompt = asked.pop(ended.id)
                texts.append((*prompt, *output(ended))[:60])
                written = list(prompt)
                for span in ended.spans:
                    written += span.ids
                    logits = full_logits(models[span.weight_version], written)
                    want = logits[-1 - len(span.ids) : -1].argmax(-1)
                    assert span.ids == tuple(want.tolist())
                    checked += 1
    for adoption, _ in adoptions:
        adoption.close()
    drain(decode)
    check_whole(decode)
    check_whole(prefill)
    assert version == 2
    assert checked > 20
    assert decode.stats().handovers > 10


def test_folders_of_the_dead_are_removed(tmp_path: Path) -> None:
    living = HandoverFiles(tmp_path)
    dead = tmp_path / "headrace-handover-dead"
    dead.mkdir()
    (dead / "0").write_bytes(b"keys and values")
    other = HandoverFiles(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living.folder, other.folder])
    assert living.folder.stat().st_mode & 0o777 == 0o700
    with living.file() as path, living.file() as second:
        path.write_bytes(b"a")
        second.write_bytes(b"b")
        assert second != path
    assert list(living.folder.iterdir()) == []
    for files in (living, other, living):
        files.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"no folder .*missing.*prefill_cores = 0"):
        HandoverFiles(tmp_path / "missing")
