"""The dashboard's answers over HTTP: right, bounded, read-only, live, and safe."""

import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hostile_run import FORKED, SCRIPT
from starlette.exceptions import HTTPException

from headrace.errors import UserError
from headrace.observe.dashboard import answers
from headrace.observe.dashboard.app import Desk, create_app
from headrace.observe.dashboard.files import PAGE, SCRIPTS, STYLE
from headrace.observe.dashboard.source import RunSource
from headrace.observe.metrics import MetricsWriter
from headrace.observe.runs import open_run
from headrace.rollout.record.ledger import Ledger

Open = Callable[[Path], httpx.AsyncClient]


@pytest.fixture
async def browse(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    """Opens a client of a dashboard over a run that never answers from before a change."""
    monkeypatch.setattr("headrace.observe.dashboard.source._SHARE", float("inf"))
    desks: list[Desk] = []

    def open_client(run: Path) -> httpx.AsyncClient:
        desk = Desk(lambda: RunSource(run))
        desks.append(desk)
        transport = httpx.ASGITransport(create_app(desk, hosts=("127.0.0.1",)))
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8400")

    yield open_client
    for desk in desks:
        desk.close()


async def get(client: httpx.AsyncClient, path: str, **query: object) -> Any:
    response = await client.get(path, params={k: str(v) for k, v in query.items()})
    assert response.status_code == 200, response.text
    return response.json()


def contents(run: Path) -> dict[Path, bytes]:
    """Every file that a reader has no business with: SQLite's side files are its own."""
    files = (path for path in run.rglob("*") if path.is_file())
    return {f: f.read_bytes() for f in files if not f.name.endswith(("-wal", "-shm"))}


def remove_ledger(run: Path) -> None:
    for file in run.glob("ledger.sqlite*"):
        file.unlink()


async def test_the_overview_says_what_the_other_views_say(browse: Open, finished_run: Path) -> None:
    client = browse(finished_run)
    found = await get(client, "/api/overview")
    with open_run(finished_run) as run:
        assert run.ledger is not None
        headline, account = run.headline(), run.ledger.conservation()
    assert headline is not None
    assert found["name"] == "quickstart"
    assert found["headline"]["difference"] == headline.change.difference
    assert found["tokens"]["trained"] == account.trained
    assert found["tokens"]["closes"] is True
    assert [law["held"] for law in found["laws"]] == [True, True, True, False]
    assert found["evaluations"][0] == {
        "label": "before training",
        "task": "terminal",
        "n": 24,
        "success": 0.0,
        "low": 0.0,
        "high": found["evaluations"][0]["high"],
        "greedy": False,
        "minutes": 0.0,
    }


async def test_curves_have_intervals_and_tasks_apart(browse: Open, hostile_run: Path) -> None:
    found = await get(browse(hostile_run), "/api/learning")
    curves = {(c["stage"], c["task"]): c["points"] for c in found["tasks"]}
    assert set(curves) == {("rl", "terminal"), ("rl-maze", "maze")}
    for _, mean, low, high, n in curves["rl", "terminal"]:
        assert 0 <= low <= mean <= high <= 1
        assert n >= 1
    by_stage = {c["stage"]: [chart["title"] for chart in c["charts"]] for c in found["charts"]}
    assert "Loss" in by_stage["sft"]
    assert {"Entropy of sampled tokens", "Groups with signal"} <= set(by_stage["rl"])
    (rates,) = [
        chart
        for stage in found["charts"]
        for chart in stage["charts"]
        if stage["stage"] == "rl" and chart["title"] == "Estimated pass rate by level"
    ]
    assert [line["label"] for line in rates["lines"]] == ["level 1", "level 2"]


async def test_the_timeline_accounts_for_every_second(browse: Open, finished_run: Path) -> None:
    (stage,) = (await get(browse(finished_run), "/api/timeline"))["stages"]
    totals = stage["totals"]
    parts = totals["wait"] + totals["publish"] + totals["update"] + totals["other"]
    assert parts == pytest.approx(totals["seconds"])
    assert totals["generating"] + totals["idle"] <= totals["seconds"] + 1e-9
    with open_run(finished_run) as run:
        waited = sum(r.metrics["wait_s"] for r in run.rows_of("rl"))
    assert totals["wait"] == pytest.approx(waited, rel=0.01)
    for column in stage["columns"]:
        shares = [share for share in column[:3] if share is not None]
        assert sum(shares) <= 1.001


async def test_histograms_and_failures(browse: Open, hostile_run: Path) -> None:
    client = browse(hostile_run)
    (stage,) = (await get(client, "/api/distributions"))["stages"]
    with open_run(hostile_run) as run:
        assert run.ledger is not None
        lags = run.ledger.staleness_histogram("rl")
        updates = len(run.rows_of("rl"))
    assert stage["staleness"] == [[lag, tokens] for lag, tokens in lags.items()]
    assert stage["bound"] == 4
    assert sum(count for _, count in stage["mismatch"]["mean"]) == updates
    failures = await get(client, "/api/failures")
    assert failures["forks"] == {"history_rewritten": 1, "system_changed": 1}
    died = [f for f in failures["ends"] if f["task"] == "maze" and f["outcome"] == "env_failed"]
    assert [f["count"] for f in died] == [3]


async def test_a_list_pages_and_filters(browse: Open, hostile_run: Path) -> None:
    client = browse(hostile_run)
    first = await get(client, "/api/trajectories", limit=4, task="maze")
    second = await get(client, "/api/trajectories", limit=4, task="maze", before=first["next"])
    assert [len(first["rows"]), len(second["rows"]), second["next"]] == [4, 2, None]
    failed = await get(client, "/api/trajectories", failure="session_time", stage="rl-maze")
    assert [(row["id"], row["reasons"]) for row in failed["rows"]] == [("maze-3", ["session_time"])]
    half = await get(client, "/api/trajectories", min_reward=0.5, max_reward=0.5, text="STEP 4")
    assert [row["id"] for row in half["rows"]] == [FORKED]
    assert half["rows"][0]["family"] == SCRIPT[:80], "text goes out as it is, as JSON"


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"limit": 5000}, "limit 5000: give 1 to 200"),
        ({"limit": "many"}, "limit 'many'"),
        ({"before": -1}, "before -1: out of range"),
        ({"before": 10**30}, "out of range"),
        ({"min_reward": "high"}, "filter"),
        ({"forked": "perhaps"}, "filter"),
        ({"failure": "bad luck"}, "filter"),
    ],
)
async def test_a_bad_question_is_explained(
    browse: Open, finished_run: Path, query: dict[str, object], says: str
) -> None:
    response = await browse(finished_run).get(
        "/api/trajectories", params={k: str(v) for k, v in query.items()}
    )
    assert response.status_code == 400
    assert says in response.json()["error"]


async def test_a_search_text_is_bounded(browse: Open, finished_run: Path) -> None:
    response = await browse(finished_run).get("/api/trajectories", params={"text": "x" * 201})
    assert response.status_code == 409
    assert "at most 200" in response.json()["error"]


async def test_a_trajectory_with_its_forks(browse: Open, hostile_run: Path) -> None:
    found = await get(browse(hostile_run), "/api/trajectory", id=FORKED)
    tree = found["tree"]
    assert [c["lane"] for c in tree] == [0, 0, 0, 1, 2, 1]
    assert [c["parent"] for c in tree] == [None, 0, 1, 0, None, 3]
    assert [c["fork"] for c in tree] == [None] * 3 + ["history_rewritten", "system_changed", None]
    assert tree[1]["held"] == tree[0]["read"] + tree[0]["sampled"]
    assert tree[2]["parse"] == "malformed"
    assert len(found["segments"]) == 3
    assert SCRIPT in found["turns"][0]["text"]
    assert "\u202e" not in json.dumps(found["turns"], ensure_ascii=False), "nothing turns the text"
    assert "\\u202e" in found["turns"][-1]["text"]


async def test_tokens_say_what_became_of_them(browse: Open, hostile_run: Path) -> None:
    client = browse(hostile_run)
    first = await get(client, "/api/tokens", id=FORKED)
    second = await get(client, "/api/tokens", id=FORKED, segment=2)
    names = ("ids", "text", "special", "state", "logprob", "version", "newest")
    assert {len(first[name]) for name in names} == {first["total"]}
    assert set(first["state"]) == {"read", "pending"}
    assert set(second["state"]) == {"read", "elsewhere", "pending"}, "call 0 belongs to the first"
    for state, logprob, version in zip(
        first["state"], first["logprob"], first["version"], strict=True
    ):
        assert (state == "read") == (logprob is None) == (version is None)
    assert set(first["version"]) == {None, 10, 11}
    assert "näive ☃" in "".join(first["text"]), "pieces of a character are joined"
    trained = (await get(client, "/api/trajectories", fate="trained", limit=1))["rows"][0]
    tokens = await get(client, "/api/tokens", id=trained["id"])
    assert set(tokens["state"]) == {"read", "trained"}
    assert tokens["advantage"] == trained["advantage"] != 0
    evaluated = (await get(client, "/api/trajectories", purpose="eval:rl", limit=1))["rows"][0]
    tokens = await get(client, "/api/tokens", id=evaluated["id"])
    assert set(tokens["state"]) == {"read", "evaluation"}


async def test_tokens_page(
    browse: Open, hostile_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = browse(hostile_run)
    whole = await get(client, "/api/tokens", id=FORKED)
    monkeypatch.setattr("headrace.observe.dashboard.trajectories.TOKENS", 100)
    ids: list[int] = []
    while len(ids) < whole["total"]:
        part = await get(client, "/api/tokens", id=FORKED, offset=len(ids))
        assert 0 < len(part["ids"]) <= 100
        assert part["state"] == whole["state"][len(ids) : len(ids) + 100]
        ids += part["ids"]
    assert ids == whole["ids"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/trajectory?id=nobody",
        "/api/tokens?id=nobody",
        f"/api/tokens?id={FORKED}&segment=9",
        "/api/nothing",
        "/static/app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
    ],
)
async def test_what_is_not_there(browse: Open, hostile_run: Path, path: str) -> None:
    response = await browse(hostile_run).get(path)
    assert response.status_code == 404
    assert "error" in response.json()


async def test_every_answer_is_locked_down(browse: Open, hostile_run: Path) -> None:
    client = browse(hostile_run)
    for path in ("/", *(f"/static/{name}" for name in (PAGE, STYLE, *SCRIPTS)), "/api/overview"):
        response = await client.get(path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        if not path.startswith("/api"):
            # Nothing from elsewhere, nothing that reads text as markup.
            for word in ("https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval("):
                assert word not in response.text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8400", ""])
async def test_other_hosts_are_refused(browse: Open, finished_run: Path, host: str) -> None:
    response = await browse(finished_run).get("/api/overview", headers={"Host": host})
    assert response.status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_changed(browse: Open, finished_run: Path, method: str) -> None:
    client = browse(finished_run)
    before = contents(finished_run)
    assert (await client.request(method, "/api/trajectories")).status_code == 405
    for name in answers.AGGREGATES:
        await get(client, f"/api/{name}")
    assert contents(finished_run) == before


async def test_a_version_follows_the_run_and_spares_answers(
    browse: Open, finished_run: Path
) -> None:
    client = browse(finished_run)
    first = await client.get("/api/learning")
    assert first.headers["etag"] == f'"{(await get(client, "/api/version"))["version"]}"'
    again = await client.get("/api/learning", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    with MetricsWriter(finished_run, resume=True, sinks=[]) as rows:
        rows.log("rl", 999, {"entropy": 0.125})
    version = (await get(client, "/api/version"))["version"]
    assert f'"{version}"' != first.headers["etag"]
    ledger = Ledger.resume(finished_run)
    ledger.dispatch("late", "train", "late-group", "terminal", {}, ["late-1"])
    assert (await get(client, "/api/version"))["version"] != version
    found = await get(client, "/api/trajectories", limit=1)
    assert found["rows"][0]["id"] == "late-1", "while the writer is at work"
    assert found["rows"][0]["outcome"] == "open"
    ledger.close()


def test_costly_answers_are_made_rarely_while_the_run_goes_on(finished_run: Path) -> None:
    now = [100.0]
    source = RunSource(finished_run, clock=lambda: now[0])
    made = []

    def compute(_: object) -> int:
        now[0] += 0.5
        made.append(now[0])
        return len(made)

    with MetricsWriter(finished_run, resume=True, sinks=[]) as rows:
        version, value = source.kept("x", compute)
        rows.log("rl", 999, {"entropy": 0.1})
        now[0] += 9.0
        assert source.kept("x", compute) == (version, value), "0.5 s of work at most every 10 s"
        now[0] += 2.0
        assert source.kept("x", compute)[1] == 2
        now[0] += 100.0
        assert source.kept("x", compute)[1] == 2, "nothing changed"
    source.close()


async def test_a_run_that_begins_and_one_that_crashed(browse: Open, tmp_path: Path) -> None:
    run = tmp_path / "new"
    run.mkdir()
    (run / "recipe.json").write_text(json.dumps({"name": "new", "stages": []}))
    client = browse(run)
    for name in answers.AGGREGATES:
        assert isinstance(await get(client, f"/api/{name}"), dict)
    assert (await get(client, "/api/trajectories"))["rows"] == []
    assert (await client.get("/api/trajectory", params={"id": "x"})).status_code == 404
    ledger = Ledger.create(run / "ledger.sqlite")
    ledger.dispatch("rl", "train", "g", "terminal", {}, ["s-1"])
    assert [r["id"] for r in (await get(client, "/api/trajectories"))["rows"]] == ["s-1"]
    ledger.close()
    # As a killed process leaves it: a torn row, no summary.
    (run / "metrics.jsonl").write_bytes(b'{"time": 1.0, "elapsed": 0.5, "st')
    found = await get(client, "/api/overview")
    assert found["status"] == "unfinished"
    assert found["outcomes"] == {"open": 1}


async def test_a_run_that_fell_silent_is_told(browse: Open, finished_run: Path) -> None:
    text = (finished_run / "summary.json").read_text()
    (finished_run / "summary.json").write_text(text.replace('"finished"', '"running"'))
    client = browse(finished_run)
    found = await get(client, "/api/overview")
    assert (found["going"], found["silent"]) == (True, False)
    long_ago = found["last_change"] - 1000.0
    for file in contents(finished_run):
        os.utime(file, (long_ago, long_ago))
    found = await get(client, "/api/overview")
    assert (found["going"], found["silent"]) == (True, True), "reading is no sign of life"
    assert found["last_change"] == pytest.approx(long_ago)


async def test_damage_is_explained_and_mended_while_it_runs(
    browse: Open, finished_run: Path
) -> None:
    client = browse(finished_run)
    summary = finished_run / "summary.json"
    text = summary.read_text()
    summary.write_text("{")
    response = await client.get("/api/overview")
    assert response.status_code == 409
    assert "summary.json" in response.json()["error"]
    summary.write_text(text)
    assert (await get(client, "/api/overview"))["status"] == "finished"


async def test_a_ledger_that_is_replaced_is_read_anew(browse: Open, finished_run: Path) -> None:
    client = browse(finished_run)
    assert (await get(client, "/api/trajectories"))["rows"]
    remove_ledger(finished_run)
    assert (await get(client, "/api/trajectories"))["rows"] == []
    assert "no rollout" in (await get(client, "/api/overview"))["problem"]
    shutil.copy(finished_run / "summary.json", finished_run / "ledger.sqlite")
    assert "not a headrace ledger" in (await get(client, "/api/overview"))["problem"]


async def test_too_many_questions_are_refused(finished_run: Path) -> None:
    desk = Desk(lambda: RunSource(finished_run))
    desk._waiting = 32
    with pytest.raises(HTTPException, match="ask again"):
        await desk.ask(lambda source: source.version())
    desk.close()


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        Desk(lambda: RunSource(tmp_path))
