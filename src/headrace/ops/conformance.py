"""What a backend has to pass: every op, dtype and backend of a registry against float64 references.

Needs no test runner, so that `headrace doctor --ops` can ask it of any machine. A check measures an
error, and passes when that is at most what is allowed; a check that raises has failed.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.ops import reference
from headrace.ops.conformance_cases import CASES, FLOAT32_ARGUMENTS, Case, timing_cases
from headrace.ops.conformance_draws import DRAW_CHECKS, SCORE_CHECKS
from headrace.ops.conformance_packed import GROUPED_CHECKS, PACKED_CHECKS, PACKING_CHECKS
from headrace.ops.conformance_paged import PAGED_CHECKS
from headrace.ops.conformance_rows import ROW_CHECKS
from headrace.ops.conformance_selection import SELECTION_CHECKS
from headrace.ops.packed import PackedMatrix
from headrace.ops.packed_grouped import PackedMatrices
from headrace.ops.registry import REGISTRY, Backend, Registry

DTYPES = (torch.float32, torch.bfloat16)

_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error of any element over the largest element of the result."""


@dataclass(frozen=True)
class Check:
    """One measurement.

    Attributes:
        op, backend, dtype: what was checked, e.g. "select_topk", "cpu", "bfloat16".
        check: what was looked at.
        error: worst error found; infinite when the call raised or gave a wrong shape.
        allowed: largest error that passes.
        note: the exception, if there was one.
    """

    op: str
    backend: str
    dtype: str
    check: str
    error: float
    allowed: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within what is allowed; NaN is not."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one medium-sized call; `backward` includes the forward, None without one."""

    op: str
    backend: str
    dtype: str
    forward: float
    backward: float | None


@dataclass(frozen=True)
class Report:
    """Everything found.

    Attributes:
        checks: in order of op, backend and dtype.
        timings: in the same order; empty if not asked for.
        unavailable: (op, backend, reason) of what cannot run here.
    """

    checks: list[Check]
    timings: list[Timing]
    unavailable: list[tuple[str, str, str]]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)


def run_suite(
    registry: Registry = REGISTRY,
    *,
    device: str = "cpu",
    ops: Sequence[str] | None = None,
    timings: bool = False,
    seed: int = 0,
) -> Report:
    """Check all backends of a registry that take tensors on `device`.

    Args:
        device: e.g. "cpu" or "cuda".
        ops: only these; None is all.
        timings: also time one call of each.
        seed: of the inputs.
    """
    checks: list[Check] = []
    times: list[Timing] = []
    unavailable = []
    for op in registry.ops():
        if ops is not None and op not in ops:
            continue
        for backend in registry.backends(op, torch.device(device).type):
            reason = registry.reason(backend)
            if reason is not None:
                unavailable.append((op, backend.name, reason))
                continue
            for dtype in DTYPES:
                checks += _check_backend(backend, dtype, device, seed)
                case = timing_cases(torch.Generator().manual_seed(seed)).get(op)
                if timings and case is not None:
                    times.append(_time(backend, case, dtype, device))
    return Report(checks, times, unavailable)


def _check_backend(backend: Backend, dtype: torch.dtype, device: str, seed: int) -> Iterator[Check]:
    def measured(name: str, allowed: float, measure: Callable[[], float]) -> Check:
        note = ""
        try:
            error = measure()
        except Exception as exception:  # whatever a backend raises is the finding
            error, note = math.inf, f"{type(exception).__name__}: {exception}"
        if math.isnan(error):
            error = math.inf
        identity = (backend.op, backend.name, str(dtype).removeprefix("torch."))
        return Check(*identity, name, error, allowed, note)

    if backend.op not in CASES and backend.op not in SPECIAL_CHECKS:
        # Nothing checked must not look like everything passed.
        yield measured("has checks", 0.0, lambda: math.inf)
    call = _on_device(backend.function, device)
    if backend.op in CASES:
        generator = torch.Generator().manual_seed(seed)
        for case in CASES[backend.op](generator):
            run = _Run(call, getattr(reference, backend.op), case, dtype)
            yield measured(f"forward: {case.name}", _ALLOWED[dtype], run.forward_error)
            yield measured(f"gradient: {case.name}", _ALLOWED[dtype], run.gradient_error)
            yield measured(f"repeatable: {case.name}", 0.0, run.differences)
    for name, (check, allowed) in SPECIAL_CHECKS.get(backend.op, {}).items():
        generator = torch.Generator().manual_seed(seed)
        yield measured(
            name,
            _ALLOWED[dtype] if allowed is None else allowed,
            lambda check=check, g=generator: check(call, dtype, g),
        )


def _on_device(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function with tensors taken to `device` and its results brought back."""

    def move(value: Any, to: str) -> Any:
        if isinstance(value, tuple):
            return tuple(move(item, to) for item in value)
        return value.to(to) if isinstance(value, Tensor | PackedMatrix | PackedMatrices) else value

    def call(*arguments: Any, **options: Any) -> Any:
        return move(function(*(move(value, device) for value in arguments), **options), "cpu")

    return call


class _Run:
    """One differentiable case, compared with the reference in float64."""

    def __init__(
        self,
        call: Callable[..., Any],
        oracle: Callable[..., Any],
        case: Case,
        dtype: torch.dtype,
    ) -> None:
        self.call, self.oracle, self.case = call, oracle, case
        self.inputs = {
            name: x if name in FLOAT32_ARGUMENTS else x.to(dtype)
            for name, x in case.tensors.items()
        }

    def forward_error(self) -> float:
        got, want = self._outputs(self.call), self._outputs(self.oracle, torch.float64)
        return max(_error(a, b) for a, b in zip(got, want, strict=True))

    def gradient_error(self) -> float:
        got, want = self._gradients(self.call), self._gradients(self.oracle, torch.float64)
        return max(_error(a, b) for a, b in zip(got, want, strict=True))

    def differences(self) -> float:
        """How many numbers differ between two calls, the second one with a second backward."""
        first, second = (
            [*self._outputs(self.call), *self._gradients(self.call, again=again)]
            for again in (False, True)
        )
        return float(sum(int((~_same(a, b)).sum()) for a, b in zip(first, second, strict=True)))

    def _leaves(self, dtype: torch.dtype | None) -> list[Tensor]:
        return [
            x.detach().to(dtype or x.dtype, copy=True).requires_grad_()
            for x in self.inputs.values()
        ]

    def _invoke(self, call: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
        result = call(*leaves, *self.case.rest, **self.case.options)
        return list(result) if isinstance(result, tuple) else [result]

    def _outputs(self, call: Callable[..., Any], dtype: torch.dtype | None = None) -> list[Tensor]:
        return [x.detach() for x in self._invoke(call, self._leaves(dtype))]

    def _gradients(
        self, call: Callable[..., Any], dtype: torch.dtype | None = None, again: bool = False
    ) -> list[Tensor]:
        leaves = self._leaves(dtype)
        out = self._invoke(call, leaves)[0]
        # A score of -inf stands for no entry: it has no gradient to give.
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(out.shape, generator=generator)
        weights = weights.to(next(iter(self.inputs.values())).dtype).to(out.dtype)
        loss_gradient = weights.masked_fill(out.detach().isinf(), 0.0)
        options: dict[str, Any] = {"grad_outputs": loss_gradient, "allow_unused": True}
        gradients = torch.autograd.grad(out, leaves, retain_graph=again, **options)
        if again:
            gradients = torch.autograd.grad(out, leaves, **options)
        return [
            torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)
        ]


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _error(got: Tensor, want: Tensor) -> float:
    """Largest error over the largest wanted magnitude; infinities must be the same ones."""
    if got.shape != want.shape:
        return math.inf
    infinite = want.isinf()
    if not torch.equal(got.isinf(), infinite):
        return math.inf
    got, want = (x.double().masked_fill(infinite, 0.0) for x in (got, want))
    if want.numel() == 0:
        return 0.0
    largest = float(want.abs().max())
    difference = float((got - want).abs().max())
    return difference / largest if largest > 0 else difference


# -- checks that only one op has ---------------------------------------------------------------


def _expanded_gradient(call: Callable[..., Any], dtype: torch.dtype, g: torch.Generator) -> float:
    """A plain sum sends a gradient with strides of zero."""
    x = torch.randn(12, 16, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(3, 16, 16, generator=g).to(dtype).requires_grad_()
    got = torch.autograd.grad(call(x, weight, [4, 0, 8]).sum(), (x, weight))
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    out = reference.grouped_matmul(x64, weight64, [4, 0, 8])
    want = torch.autograd.grad(out.sum(), (x64, weight64))
    return max(_error(a, b) for a, b in zip(got, want, strict=True))


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation's result had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.numel())
        return result


def _chunk_memory(call: Callable[..., Any], dtype: torch.dtype, g: torch.Generator) -> float:
    """How far beyond a chunk the largest tensor made is, or all that is kept for the backward."""
    rows, width, vocabulary = 128, 8, 256
    chunk = rows * vocabulary // 8
    hidden = torch.randn(rows, width, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=g)
    kept: dict[int, int] = {}
    given = {x.data_ptr() for x in (hidden, weight, targets)}

    def keep(x: Tensor) -> Tensor:
        if x.data_ptr() not in given:
            kept[x.data_ptr()] = x.numel()
        return x

    with _LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logprobs, _ = call(hidden, weight, targets, chunk_elements=chunk)
        saved = sum(kept.values())
        logprobs.sum().backward()
    return max(largest.elements, saved) / chunk - 1


def _chunks_agree(call: Callable[..., Any], dtype: torch.dtype, g: torch.Generator) -> float:
    """Chunked against unchunked, forward and backward."""
    hidden = torch.randn(40, 16, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(0, 50, (40,), generator=g)
    factors = torch.randn(40, generator=g)
    results = []
    for chunk in (1 << 20, 3 * 50):
        logprobs, entropies = call(hidden, weight, targets, chunk_elements=chunk)
        gradients = torch.autograd.grad(logprobs, (hidden, weight), factors)
        results.append([logprobs.detach(), entropies, *gradients])
    return max(_error(a, b) for a, b in zip(*results, strict=True))


SpecialCheck = Callable[[Callable[..., Any], torch.dtype, torch.Generator], float]

SPECIAL_CHECKS: dict[str, dict[str, tuple[SpecialCheck, float | None]]] = {
    **ROW_CHECKS,
    "draw_tokens": DRAW_CHECKS,
    "token_logprobs": SCORE_CHECKS,
    "paged_attention": PAGED_CHECKS,
    "pack_matrix": PACKING_CHECKS,
    "packed_linear": PACKED_CHECKS,
    "packed_grouped_linear": GROUPED_CHECKS,
    "select_topk": SELECTION_CHECKS,
    "grouped_matmul": {"gradient of a sum": (_expanded_gradient, None)},
    "linear_cross_entropy": {
        "memory within a chunk": (_chunk_memory, 0.0),
        "chunked = unchunked": (_chunks_agree, None),
    },
}
"""Check and largest passing error; None is what forwards and gradients are allowed."""


def _time(backend: Backend, case: Case, dtype: torch.dtype, device: str) -> Timing:
    """Best of a few calls, after one that warms up."""
    differentiable = backend.op in CASES
    leaves = [
        (x if name in FLOAT32_ARGUMENTS else x.to(dtype)).to(device).requires_grad_(differentiable)
        for name, x in case.tensors.items()
    ]
    rest = [
        x.to(device) if isinstance(x, Tensor | PackedMatrix | PackedMatrices) else x
        for x in case.rest
    ]

    def forward() -> Tensor:
        result = backend.function(*leaves, *rest, **case.options)
        return result[0] if isinstance(result, tuple) else result

    def backward() -> None:
        out = forward()
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    def best(call: Callable[[], object]) -> float:
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            call()
            if device != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times[1:]) * 1e3

    with torch.no_grad():
        forward_time = best(forward)
    return Timing(
        backend.op,
        backend.name,
        str(dtype).removeprefix("torch."),
        forward_time,
        best(backward) if differentiable else None,
    )
