"""What one command in a sandbox costs: latency and CPU time, for every kind this machine has.

A `true` command runs again and again in one open sandbox, the kinds taking turns so that load from
elsewhere hits all of them alike. A second part runs commands in many sandboxes at once, as rollouts
do. CPU time is that of the sandbox server and everything it started, from /proc.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

from headrace.observe.machine import describe_machine
from headrace.sandbox import ServerProvider, ServerSandbox, open_provider, probe
from headrace.sandbox.types import FileEntry

CLOCK_MS = 10.0
"""Unit of the times in /proc/PID/stat (USER_HZ is 100 on every Linux architecture)."""
BOXES = 16


def cpu_ms(provider: ServerProvider) -> float:
    """CPU milliseconds of the server behind `provider` and of its finished commands."""
    pid = provider.server_pid
    # An isolated server is the only child of its keeper, whose pid the provider knows.
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    server = children[0] if children and provider.kind != "none" else pid
    fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) * CLOCK_MS


async def timed_run(box: ServerSandbox) -> float:
    """Milliseconds of one `true` command."""
    began = time.perf_counter()
    result = await box.run("true")
    took = (time.perf_counter() - began) * 1e3
    if result.exit_code != 0:
        raise RuntimeError(f"`true` ended with {result}")
    return took


async def timed_open(provider: ServerProvider) -> float:
    """Milliseconds to open a sandbox with a few files."""
    files = {f"dir/{i}.txt": FileEntry("file", 0o644, b"line\n" * 20) for i in range(10)}
    began = time.perf_counter()
    box = await provider.open(files)
    took = (time.perf_counter() - began) * 1e3
    await box.close()
    return took


async def measure(kinds: list[str], rounds: int) -> dict[str, float]:
    """All metrics, keyed NAME_KIND."""
    providers = {kind: open_provider(kind) for kind in kinds}
    boxes = {kind: await provider.open({}) for kind, provider in providers.items()}
    runs: dict[str, list[float]] = {kind: [] for kind in kinds}
    opens: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, float] = {}
    metrics: dict[str, float] = {}
    try:
        for box in boxes.values():
            await timed_run(box)
        for kind in kinds:
            cpu[kind] = -cpu_ms(providers[kind])
        for _ in range(rounds):
            for kind in kinds:
                runs[kind].append(await timed_run(boxes[kind]))
        for kind in kinds:
            cpu[kind] += cpu_ms(providers[kind])
        for _ in range(max(20, rounds // 10)):
            for kind in kinds:
                opens[kind].append(await timed_open(providers[kind]))
        for kind in kinds:
            metrics[f"median_ms_{kind}"] = statistics.median(runs[kind])
            metrics[f"p99_ms_{kind}"] = statistics.quantiles(runs[kind], n=100)[98]
            metrics[f"cpu_ms_{kind}"] = cpu[kind] / rounds
            metrics[f"open_ms_{kind}"] = statistics.median(opens[kind])
            metrics[f"per_second_{kind}"] = await throughput(providers[kind], rounds)
    finally:
        for provider in providers.values():
            await provider.close()
    return metrics


async def throughput(provider: ServerProvider, commands: int) -> float:
    """Commands per second with BOXES sandboxes at work."""
    boxes = [await provider.open({}) for _ in range(BOXES)]

    async def work(box: ServerSandbox) -> None:
        for _ in range(commands // BOXES):
            await box.run("true")

    began = time.perf_counter()
    await asyncio.gather(*(work(box) for box in boxes))
    took = time.perf_counter() - began
    await asyncio.gather(*(box.close() for box in boxes))
    return commands // BOXES * BOXES / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--quick", action="store_true", help="a tenth of the commands")
    options = parser.parse_args()
    rounds = 100 if options.quick else 1000
    found = probe()
    kinds = [kind for kind, state in found.items() if state == "ok"]
    if kinds == ["none"]:
        raise SystemExit(f"no isolating sandbox works here: {found}")
    metrics = asyncio.run(measure(kinds, rounds))
    # Without a suffix: the kind that a user gets by default.
    for name in ("median_ms", "p99_ms", "cpu_ms", "open_ms", "per_second"):
        metrics[name] = metrics[f"{name}_{kinds[0]}"]
    metrics = {name: round(metrics[name], 3) for name in sorted(metrics)}
    machine = describe_machine()
    if not options.json:
        for name, value in metrics.items():
            print(f"{name:24} {value:10.2f}")
    print(
        json.dumps(
            {
                "name": "sandbox_start",
                "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['system']}",
                "config": {"rounds": rounds, "kinds": kinds, "boxes": BOXES, "command": "true"},
                "metrics": metrics,
                "notes": "no isolation (none) is the floor: server, socket and bash alone",
            }
        )
    )


if __name__ == "__main__":
    main()
