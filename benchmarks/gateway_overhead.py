"""What the gateway adds to a model call: latency, requests a second, and growth with the history.

An engine that answers at once with one tool call stands behind each side, in one process for all of
them: as OpenAI endpoint behind LiteLLM's proxy (`--litellm-python`, one worker, no database, no
keys, no logging), and as token-in token-out engine, with prompts as ids and a logprob for each
sampled one, behind headrace's gateway. `embedded` is headrace with such an engine in its own
process, the default of a run. `direct` asks the engine's OpenAI endpoint itself. Sides take turns
within a round. A server has one core to itself; the agents and the engine share another.

Agents keep one connection and one key for each session, and every turn appends the assistant's
message with its tool call and a tool result of a few hundred tokens, other text each time. A
session has 20 turns and is then followed by another. Sessions are of all ages from the beginning,
so that every measurement is of the same mix of turns (of 1,000 only two fifths, `--quick` one, the
others are at their first); headrace records those histories beforehand, without HTTP. That each
call continued its session's, and was read as a tool call, is checked. Progress goes to stderr.

`rps_SIDE_cN` are requests a second with N agents that ask again at once, medians over rounds; the
proxy is asked less often, a `litellm_share`, and at least once by each agent.
`rps_ratio_vs_litellm_cN` is the median of one round's ratios. Waiting is then nearly all of their
latency, so added latency is measured apart, with agents that think between their turns: requests
arrive at random (a Poisson process), N agents in turn, `arrivals` times a second, at most half of
what the slowest side manages with 100 agents; one agent alone asks again at once.
`added_p50_ms_cN` and `added_p99_ms_cN` are that quantile through a side less the same quantile of
`direct`.

`history_exponent` is the slope of log added milliseconds over log tokens of history, of one agent
from its second turn to its last, medians over sessions; `history_exponent_long` of sessions that go
on for more turns. 0 is a cost of the new tokens alone, 1 one of the history. `_embedded` has no
engine that must be sent the whole prompt. `added_ms_turn_T` are what it is fitted to.

`cpu_ms_SIDE` is CPU time of the side's server process per request, with 100 agents; of the stub's
for `direct`. `direct` itself bounds what can be seen (`rps_direct_cN`); `load_busy` is the largest
share of its core that the process of the agents used in a closed loop with headrace.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.cluster.local import available_cores
from headrace.tokens.library import LibraryRenderer
from headrace.tokens.messages import normalise
from headrace.tokens.training import train_tokenizer
from peer_process import Peer
from peers.agent_text import ARGUMENTS, COMMAND, CONTENT, THOUGHT, TOOL, AgentText
from report import fill_sizes, new_parser, print_report

VOCAB = 4096
CONCURRENCIES = (1, 100, 1000)
HEADRACE = {"headrace": "", "embedded": "_embedded"}
"""Sides of headrace and their suffix in metrics."""
START_S, ANSWER_S = 300.0, 600.0
SIZES = [
    ("rounds", 1, 3),
    ("requests_c1", 100, 300),
    ("requests_c100", 400, 1500),
    ("requests_c1000", 1000, 2000),
    ("litellm_share", 0.5, 0.25),
    ("aged_c1000", 0.2, 0.4),
    ("arrivals", 100, 100),
    ("arrivals_s", 2, 3),
    ("long_turns", 100, 200),
    ("histories", 2, 6),
]
SHOWN_TURNS = (2, 5, 10, 20, 50, 100, 200)
STARTED = time.perf_counter()
LITELLM_ENVIRONMENT = "HEADRACE_LITELLM_PYTHON"


class Answers(NamedTuple):
    """What one measurement saw.

    Attributes:
        turns: of all answers.
        latencies: theirs, seconds.
        rate: answers a second.
        busy: share of its core that the process of the agents used.
        cpu_ms: of the server's process for each answer.
    """

    turns: list[int]
    latencies: list[float]
    rate: float
    busy: float
    cpu_ms: float

    def quantile(self, q: float) -> float:
        """Milliseconds."""
        return 1e3 * float(np.quantile(self.latencies, q))

    def by_turn(self) -> dict[int, float]:
        """Median milliseconds of each turn, numbered from 1."""
        found: dict[int, list[float]] = defaultdict(list)
        for turn, latency in zip(self.turns, self.latencies, strict=True):
            found[turn + 1].append(1e3 * latency)
        return {turn: statistics.median(values) for turn, values in sorted(found.items())}


class Servers:
    """The processes of all sides, up and stopped.

    Args:
        stack: ends them.
        arguments: see `parse`.
        folder: for their files.
    """

    def __init__(self, stack: ExitStack, arguments: argparse.Namespace, folder: Path) -> None:
        cores = sorted(available_cores())
        beside = [cores[1 % len(cores)]]
        server = [cores[0]]
        tokenizer, ids, self.history = make_answer(folder, arguments.lines)
        self.answer_tokens = len(ids)

        def start(name: str, script: str, python: str | None = None, **options: Any) -> Peer:
            log = folder / f"{name}.log"
            path = [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
            environment = {} if python else {"PYTHONPATH": os.pathsep.join(filter(None, path))}
            words = python or sys.executable
            return stack.enter_context(Peer(name, words, script, options, log, environment))

        self.stub = start("stub", "answer_stub.py", cores=beside, ids=ids)
        self._stub_port = self.stub.wait_ready(START_S)["port"]
        url = f"http://127.0.0.1:{self._stub_port}"
        self.load = start("agents", "agent_load.py", cores=beside)
        given = {"cores": server, "ids": ids, "tokenizer": str(tokenizer)}
        script = "gateway_under_load.py"
        self.peers = {
            "headrace": start("headrace", script, engine_url=url, **given),
            "embedded": start("embedded", script, engine_url=None, **given),
        }
        if arguments.litellm_python:
            self.peers["litellm"] = start(
                "litellm",
                "litellm_proxy.py",
                arguments.litellm_python,
                engine_url=url,
                cores=server,
                folder=str(folder),
            )
        show("servers start")
        self.load.wait_ready(START_S)
        self._ports = {"direct": self._stub_port}
        with self.stub.awake():
            for name, peer in self.peers.items():
                self._ports[name] = peer.wait_ready(START_S).get("port", 0)
        self.sides = ["direct", *self.peers]
        self._arguments = arguments
        self._series = 0

    @contextmanager
    def up(self, side: str) -> Iterator[None]:
        """A side and the engine run meanwhile."""
        with ExitStack() as awake:
            awake.enter_context(self.stub.awake())
            if side in self.peers:
                awake.enter_context(self.peers[side].awake())
            yield

    def ask(
        self, side: str, agents: int, requests: int, *, arrivals: float = 0.0, turns: int = 0
    ) -> Answers:
        """Let agents ask a side.

        Args:
            agents: sessions at once.
            requests: in all.
            arrivals: see `Plan`.
            turns: of a session; 0 is the usual number, begun at all ages.
        """
        usual = self._arguments.turns
        draw = random.Random(agents)
        text = {"lines": self._arguments.lines, "series": self._series}
        ages = [0 if turns else (i * usual // agents) % usual for i in range(agents)]
        draw.shuffle(ages)
        if agents >= 1000 and not arrivals:  # making their histories takes longest
            aged = self._arguments.aged_c1000
            ages = [age if draw.random() < aged else 0 for age in ages]
        if arrivals:  # nobody else will ask
            ages[requests:] = [0] * len(ages[requests:])
        spare = requests // (turns or usual) + agents
        port, keys = self._ports[side], [f"sk-{i}" for i in range(agents + spare)]
        if side in HEADRACE:
            said = self.peers[side].ask("open", ANSWER_S, ages=[*ages, *[0] * spare], **text)
            port, keys = said["port"], said["keys"]
        self._series += 1
        server = self.peers.get(side, self.stub)
        with self.up(side):
            before = server.cpu_s()
            answer = self.load.ask(
                "run",
                ANSWER_S,
                ages=ages,
                port=port,
                keys=keys,
                turns=turns or usual,
                limit=requests,
                arrivals=arrivals,
                **text,
            )
            used = server.cpu_s() - before
        return Answers(
            answer["turns"],
            answer["latencies"],
            requests / answer["seconds"],
            answer["busy"],
            1e3 * used / requests,
        )


def make_answer(folder: Path, lines: int) -> tuple[Path, list[int], list[int]]:
    """A tokenizer of such text, the ids of the stub's answer, and the tokens of two histories: of
    the first turn's prompt, and what each further turn adds."""
    text = AgentText(lines, series=0)
    texts = [text.result(0, turn) for turn in range(60)]
    texts += [text.opening.head.decode(), CONTENT, THOUGHT, ARGUMENTS] * len(texts)
    tokenizer = train_tokenizer(texts, VOCAB, "glm-5")
    renderer = LibraryRenderer("glm-5", tokenizer)
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}}
    messages = normalise(
        [
            {"role": "system", "content": "You fix bugs."},
            {"role": "user", "content": "Fix this one."},
            {
                "role": "assistant",
                "content": CONTENT,
                "reasoning_content": THOUGHT,
                "tool_calls": [call],
            },
            {"role": "tool", "content": text.result(0, 1)},
        ]
    )
    ids = renderer.completion(messages[:3], [TOOL])
    if ids is None or COMMAND not in tokenizer.decode(ids):
        raise RuntimeError("the answer is not what is sampled after its prompt")
    first = len(renderer.render(messages[:2], [TOOL]))
    second = len(renderer.render(messages, [TOOL]))
    path = folder / "tokenizer"
    tokenizer.save(path)
    return path, ids, [first, second - first]


def exponent(costs: dict[int, float], history: Sequence[int], turns: Sequence[int]) -> float:
    """Slope of log cost over log history, least squares; costs below 10 us count as that."""
    first, added = history
    lengths = [first + added * (turn - 1) for turn in turns]
    values = [max(costs[turn], 0.01) for turn in turns]
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def measure(servers: Servers, arguments: argparse.Namespace) -> dict[str, float]:
    """All metrics."""
    metrics: dict[str, float] = {}
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    used: dict[str, list[float]] = defaultdict(list)
    busy = 0.0
    for side in servers.sides:  # first uses of code, connections and caches
        servers.ask(side, 4, 100)
    for number in range(arguments.rounds):
        for agents in CONCURRENCIES:
            for side in turned(servers.sides, number):
                requests = getattr(arguments, f"requests_c{agents}")
                if side == "litellm":
                    requests = max(agents, round(arguments.litellm_share * requests))
                answers = servers.ask(side, agents, requests)
                rates[side, agents].append(answers.rate)
                busy = max(busy, answers.busy if side in HEADRACE else 0.0)
                if agents == 100:
                    used[side].append(answers.cpu_ms)
                show(
                    f"round {number + 1} of {arguments.rounds}, {side} c{agents}: "
                    f"{answers.rate:.0f} requests/s, {answers.cpu_ms:.2f} ms CPU"
                )
    for (side, agents), found in rates.items():
        metrics[f"rps_{side}_c{agents}"] = statistics.median(found)
    for agents in CONCURRENCIES if "litellm" in servers.peers else ():
        other = rates["litellm", agents]
        for side, suffix in HEADRACE.items():
            ratios = [a / b for a, b in zip(rates[side, agents], other, strict=True)]
            metrics[f"rps_ratio_vs_litellm_c{agents}{suffix}"] = statistics.median(ratios)
    metrics |= {f"cpu_ms_{side}": statistics.median(found) for side, found in used.items()}
    metrics["load_busy"] = busy
    slowest = min(statistics.median(rates[side, 100]) for side in servers.sides)
    metrics["arrivals"] = arrivals = min(arguments.arrivals, slowest / 2)
    metrics |= measure_added(servers, arguments, arrivals)
    return metrics | measure_history(servers, arguments)


def measure_added(
    servers: Servers, arguments: argparse.Namespace, arrivals: float
) -> dict[str, float]:
    """Latencies of agents that think."""
    metrics: dict[str, float] = {}
    for agents in CONCURRENCIES:
        seen: dict[str, list[Answers]] = defaultdict(list)
        for number in range(arguments.rounds):
            for side in turned(servers.sides, number):
                if agents > 1:
                    requests = round(arrivals * arguments.arrivals_s)
                    answers = servers.ask(side, agents, requests, arrivals=arrivals)
                else:
                    answers = servers.ask(side, agents, arguments.requests_c1)
                seen[side].append(answers)
        for name, q in (("p50", 0.5), ("p99", 0.99)):
            found = {s: statistics.median(a.quantile(q) for a in seen[s]) for s in servers.sides}
            metrics[f"direct_{name}_ms_c{agents}"] = found["direct"]
            for side in servers.peers:
                suffix = HEADRACE.get(side, f"_{side}")
                metrics[f"added_{name}_ms_c{agents}{suffix}"] = found[side] - found["direct"]
        show(f"latency c{agents}: {found['headrace'] - found['direct']:.2f} ms added p99")
    return metrics


def measure_history(servers: Servers, arguments: argparse.Namespace) -> dict[str, float]:
    """Cost by turn of one agent."""
    metrics: dict[str, float] = {}
    histories = arguments.histories
    for suffix, turns, sessions, first in (
        ("", arguments.turns, 3 * histories, 2),
        ("_long", arguments.long_turns, histories, arguments.turns // 2),
    ):
        medians = {}
        for side in servers.sides:
            medians[side] = servers.ask(side, 1, turns * sessions, turns=turns).by_turn()
            show(f"{side}: {sessions} sessions of {turns} turns")
        for side in servers.peers:
            name = HEADRACE.get(side, f"_{side}")
            added = {
                turn: medians[side][turn] - medians["direct"][turn] for turn in range(1, turns + 1)
            }
            fitted = range(first, turns + 1)
            metrics[f"history_exponent{suffix}{name}"] = exponent(added, servers.history, fitted)
            for turn in SHOWN_TURNS:
                if turn in added and (suffix or turn <= arguments.turns):
                    metrics[f"added_ms_turn_{turn}{name}"] = added[turn]
    return metrics


def turned(sides: list[str], number: int) -> list[str]:
    """Another side first in each round."""
    first = number % len(sides)
    return sides[first:] + sides[:first]


def show(text: str) -> None:
    """Tell whoever watches how it goes, beside the report."""
    print(f"[{time.perf_counter() - STARTED:4.0f} s] {text}", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--litellm-python",
        default=os.environ.get(LITELLM_ENVIRONMENT),
        help="interpreter that has litellm[proxy]; left out unless given",
    )
    parser.add_argument("--turns", type=int, default=20, help="of a session")
    parser.add_argument("--lines", type=int, default=16, help="of a tool result")
    for name, _, full in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(full))
    return fill_sizes(parser.parse_args(), SIZES)


def main() -> None:
    """Run it."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = Servers(stack, arguments, Path(folder))
        metrics = measure(servers, arguments)
    cores = len(available_cores())
    notes = [
        f"{servers.history[0]} tokens before the first turn, {servers.history[1]} more with each "
        f"turn, of which {servers.answer_tokens} are the answer",
        f"the engine alone answers {metrics['rps_direct_c100']:.0f} requests/s of 100 agents",
        "one core for the server, one for agents and engine" if cores > 1 else "all on one core",
    ]
    if "litellm" not in servers.peers:
        notes.append("without LiteLLM: name its interpreter with --litellm-python")
    print_report("gateway_overhead", arguments, metrics, "; ".join(notes))


if __name__ == "__main__":
    main()
