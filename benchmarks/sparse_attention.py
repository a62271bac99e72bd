"""Dense against sparse latent attention on CPU: where sparse starts to win, and by how much.

Both sides compute one attention layer of the same model from the same inputs: 16 heads with
queries and keys of 224 + 32 (rotary) and values of 256, a shared latent of 128 per token. Dense
projects the latent up to keys and values and runs torch's causal SDPA. Sparse scores every visible
key with the lightning indexer (4 heads of 32), selects the best K exactly, moves the queries into
the latent space, attends to the selected rows there and projects the result up; all of that is
timed. Sides alternate and each time is the least of its rounds.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.observe.machine import describe_machine
from headrace.ops import Layout, select_topk, sparse_latent_attention
from headrace.ops.native import build

HEADS, NOPE, ROPE, VALUE, RANK = 16, 224, 32, 256, 128
INDEX_HEADS, INDEX_DIM = 4, 32
SCALE = (NOPE + ROPE) ** -0.5
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
EXPONENT_FROM = 4096
"""Growth is fitted from here on: below, fixed costs and short selections bend the curve."""


@dataclass
class Inputs:
    """One layer's inputs for T tokens; those of the indexer carry no gradient.

    q_nope [T, H, 224], q_rope [T, H, 32], latent [T, 128], k_rope [T, 32], w_uk [H, 224, 128],
    w_uv [H, 256, 128], index_q [T, 4, 32], index_weights fp32 [T, 4], index_k [T, 32].
    """

    q_nope: Tensor
    q_rope: Tensor
    latent: Tensor
    k_rope: Tensor
    w_uk: Tensor
    w_uv: Tensor
    index_q: Tensor
    index_weights: Tensor
    index_k: Tensor

    @classmethod
    def random(cls, tokens: int, dtype: torch.dtype) -> "Inputs":
        generator = torch.Generator().manual_seed(tokens)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(dtype)

        return cls(
            draw(tokens, HEADS, NOPE),
            draw(tokens, HEADS, ROPE),
            draw(tokens, RANK),
            draw(tokens, ROPE),
            draw(HEADS, NOPE, RANK, scale=RANK**-0.5),
            draw(HEADS, VALUE, RANK, scale=RANK**-0.5),
            draw(tokens, INDEX_HEADS, INDEX_DIM),
            draw(tokens, INDEX_HEADS).float(),
            draw(tokens, INDEX_DIM),
        )

    def trained(self) -> list[Tensor]:
        """What gets a gradient."""
        return [self.q_nope, self.q_rope, self.latent, self.k_rope, self.w_uk, self.w_uv]


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, a] times weight [H, a, b] -> [T, H, b].

    The contiguous copy matters: without it the backward pass gathers a column of T elements that
    lie a page apart, for every input of every head.
    """
    return torch.bmm(x.transpose(0, 1).contiguous(), weight).transpose(0, 1)


def dense(x: Inputs) -> Tensor:
    """[T, H, 256] by full causal attention."""
    k_nope = F.linear(x.latent, x.w_uk.flatten(0, 1)).unflatten(1, (HEADS, NOPE)).transpose(0, 1)
    v = F.linear(x.latent, x.w_uv.flatten(0, 1)).unflatten(1, (HEADS, VALUE)).transpose(0, 1)
    k = torch.cat([k_nope, x.k_rope.expand(HEADS, -1, -1)], dim=-1)
    q = torch.cat([x.q_nope, x.q_rope], dim=-1).transpose(0, 1)
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=SCALE)
    return out[0].transpose(0, 1)


def sparse(x: Inputs, topk: int) -> Tensor:
    """[T, H, 256] by attention to the indexer's `topk`; equal to `dense` when topk >= T."""
    layout = Layout.causal(1, x.latent.shape[0])
    chosen = select_topk(x.index_q, x.index_weights, x.index_k, layout, topk)
    q = torch.cat([per_head(x.q_nope, x.w_uk), x.q_rope], dim=-1)
    kv = torch.cat([x.latent, x.k_rope], dim=-1)
    out, _ = sparse_latent_attention(q, kv, chosen, scale=SCALE, value_dim=RANK)
    return per_head(out, x.w_uv.transpose(1, 2))


def check_same_model() -> float:
    """Largest difference of the two sides where they must agree, in float32."""
    x = Inputs.random(300, torch.float32)
    return float((dense(x) - sparse(x, 300)).abs().max())


Side = Callable[[Inputs], Tensor]


def seconds_of(side: Side, x: Inputs, backward: bool) -> float:
    """Seconds of one forward, or forward and backward."""
    leaves = x.trained()
    for leaf in leaves:
        leaf.requires_grad_(backward)
        leaf.grad = None
    began = time.perf_counter()
    with torch.set_grad_enabled(backward):
        out = side(x)
        if backward:
            out.backward(torch.ones_like(out))
    took = time.perf_counter() - began
    for leaf in leaves:
        leaf.grad = None
    return took


def least(sides: dict[str, Side], x: Inputs, backward: bool, rounds: int) -> dict[str, float]:
    """Least seconds per side over alternating rounds; with several, one more warms up first."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + (rounds > 1)):
        for name, side in sides.items():
            took = seconds_of(side, x, backward)
            if i or rounds == 1:
                times[name].append(took)
    return {name: min(found) for name, found in times.items()}


def crossover(slow: dict[int, float], fast: dict[int, float]) -> float:
    """Tokens from which `fast` stays ahead, interpolated on log scales; 0 if it never is.

    The shortest length measured when it is ahead everywhere.
    """
    lengths = sorted(slow)
    gains = [math.log(slow[n] / fast[n]) for n in lengths]
    if gains[-1] <= 0:
        return 0.0
    behind = [i for i, gain in enumerate(gains) if gain <= 0]
    if not behind:
        return float(lengths[0])
    i = behind[-1]
    share = -gains[i] / (gains[i + 1] - gains[i])
    return math.exp(math.log(lengths[i]) * (1 - share) + math.log(lengths[i + 1]) * share)


def exponent(times: dict[int, float]) -> float:
    """Least-squares slope of log seconds over log tokens."""
    points = [(math.log(n), math.log(s)) for n, s in times.items() if n >= EXPONENT_FROM]
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    above = sum((x - x_mean) * (y - y_mean) for x, y in points)
    return above / sum((x - x_mean) ** 2 for x, _ in points)


def label(tokens: int) -> str:
    return f"{tokens // 1024}k"


class Table:
    """Seconds by (backward, side) and length, filled by `measure`."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[bool, str], dict[int, float]] = {}

    def measure(
        self, tokens: int, dtype: torch.dtype, sides: dict[str, Side], backward: bool, rounds: int
    ) -> None:
        name = "bf16" if dtype == torch.bfloat16 else "fp32"
        x = Inputs.random(tokens, dtype)
        found = least(sides, x, backward, rounds)
        for side, took in found.items():
            self.seconds.setdefault((backward, f"{side}_{name}"), {})[tokens] = took
        kind = "forward+backward" if backward else "forward"
        shown = ", ".join(f"{side} {took:.3f}" for side, took in found.items())
        print(f"{label(tokens)} {name} {kind}: {shown}", flush=True)

    def speedup(self, dtype: str, tokens: int, topk: int, backward: bool = False) -> float:
        """Dense seconds over sparse seconds."""
        dense_times = self.seconds[backward, f"dense_{dtype}"]
        return dense_times[tokens] / self.seconds[backward, f"k{topk}_{dtype}"][tokens]


SIDES: dict[str, Side] = {
    "dense": dense,
    "k512": lambda x: sparse(x, 512),
    "k2048": lambda x: sparse(x, 2048),
}


def measure_all(quick: bool) -> Table:
    """Every length; quick leaves out the slow cases whose figures no metric uses."""
    table = Table()
    for tokens in LENGTHS:
        short = tokens <= 4096
        rounds = 1 if quick else (5 if short else 3 if tokens <= 16384 else 2)
        table.measure(tokens, torch.bfloat16, SIDES, False, rounds)
        if not quick or tokens in (1024, 4096, 8192):
            table.measure(tokens, torch.bfloat16, SIDES, True, 1 if quick else min(rounds, 2))
        if not quick or tokens in (1024, 4096, 8192):
            table.measure(tokens, torch.float32, SIDES, False, 1 if tokens > 4096 else rounds)
        # In fp32 a dense step of 32k tokens takes minutes and says nothing that 16k does not.
        if tokens <= 16384 and not quick:
            table.measure(tokens, torch.float32, SIDES, True, 1)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and cases")
    options = parser.parse_args()
    reason = build.unavailable_reason()
    difference = check_same_model()
    if difference > 1e-3:
        raise RuntimeError(f"dense and sparse differ by {difference} where they must agree")
    table = measure_all(options.quick)
    forward = {side: times for (backward, side), times in table.seconds.items() if not backward}
    metrics = {
        "speedup_bf16_16k_k512": table.speedup("bf16", 16384, 512),
        "speedup_bf16_32k_k512": table.speedup("bf16", 32768, 512),
        "speedup_bf16_16k_k2048": table.speedup("bf16", 16384, 2048),
        "speedup_bf16_32k_k2048": table.speedup("bf16", 32768, 2048),
        "speedup_fp32_8k_k512": table.speedup("fp32", 8192, 512),
        "speedup_step_bf16_8k_k512": table.speedup("bf16", 8192, 512, backward=True),
        "crossover_k512": crossover(forward["dense_bf16"], forward["k512_bf16"]),
        "crossover_k2048": crossover(forward["dense_bf16"], forward["k2048_bf16"]),
        "crossover_step_k512": crossover(
            table.seconds[True, "dense_bf16"], table.seconds[True, "k512_bf16"]
        ),
        "exponent_dense": exponent(forward["dense_bf16"]),
        "exponent_sparse": exponent(forward["k512_bf16"]),
    }
    lines = [
        f"{'step' if backward else 'forward'} {side}: "
        + " ".join(f"{label(n)}={took:.4g}" for n, took in times.items())
        for (backward, side), times in table.seconds.items()
    ]
    report = {
        "name": "sparse_attention",
        "machine": describe_machine(),
        "config": {
            "heads": HEADS,
            "query_dim": NOPE + ROPE,
            "value_dim": VALUE,
            "kv_rank": RANK,
            "rope_dim": ROPE,
            "index_heads": INDEX_HEADS,
            "index_dim": INDEX_DIM,
            "threads": torch.get_num_threads(),
            "instructions": build.level() if reason is None else f"none: {reason}",
            "quick": options.quick,
        },
        "metrics": {name: round(value, 3) for name, value in metrics.items()},
        "notes": (
            "one layer, same inputs both sides; dense: up-projection of keys and values + causal "
            "SDPA; sparse: indexer scores + exact top-k + absorbed latent attention + output "
            "up-projection; crossovers and exponents (>= 4k) from bf16 forward, crossover_step "
            "from bf16 forward+backward; crossover 0 means never ahead; seconds: "
            + "; ".join(lines)
        ),
    }
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
