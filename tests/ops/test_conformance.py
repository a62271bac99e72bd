"""The suite passes for what is built in and fails for backends that are wrong in one way each."""

import contextvars
import functools

import pytest
import torch
from rich.console import Console

from headrace import cli, doctor, ops
from headrace.ops import conformance, cross_entropy, dense, grouped, reference
from headrace.ops.registry import REGISTRY, Registry

OPS = REGISTRY.ops()


@pytest.mark.parametrize("op", OPS)
def test_every_backend_of_this_machine_passes(op):
    report = conformance.run_suite(ops=[op])
    assert {check.op for check in report.checks} == {op}
    assert [check for check in report.checks if not check.passed] == []
    backends = {check.backend for check in report.checks}
    assert backends | {name for _, name, _ in report.unavailable} == {"cpu", "reference"}
    assert "reference" in backends


def failures(op, function):
    """Names of the checks that `function` fails as a backend of `op`."""
    registry = Registry()
    registry.register(op, "broken", function)
    report = conformance.run_suite(registry)
    assert not report.passed
    return {check.check for check in report.checks if not check.passed}


def plain_topk(q, weights, k, layout, topk):
    """What one writes first: right scores and a mask, but ties as torch.topk breaks them."""
    lower, upper = layout.bounds(q.shape[0])
    column = torch.arange(k.shape[0])
    products = torch.einsum("shd,td->sht", q.double(), k.double()).relu()
    scores = torch.einsum("sht,sh->st", products, weights.double()).float().nan_to_num(-1e30)
    hidden = (column < lower[:, None]) | (column >= upper[:, None])
    best = scores.masked_fill(hidden, -torch.inf).topk(min(topk, k.shape[0]), dim=-1)
    beyond = k.shape[0]
    chosen = best.indices.masked_fill(best.values == -torch.inf, beyond).sort(-1).values
    chosen = chosen.masked_fill(chosen == beyond, -1)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=-1).int()


def test_plain_torch_topk_fails_wherever_scores_tie():
    failed = failures("select_topk", plain_topk)
    assert {"ties to the lowest index", "padding, chunks, batch"} <= failed
    assert "the best keys" not in failed


def test_a_score_that_depends_on_what_is_beside_it_fails():
    def rescaled(q, weights, k, layout, topk):
        # Per-tensor quantisation: a larger key elsewhere changes every score.
        step = k.abs().amax().float() / 127 if k.numel() else 1.0
        k = (k.float() / step).round() * step
        return reference.select_topk(q.float(), weights, k, layout, topk)

    failed = failures("select_topk", rescaled)
    assert "padding, chunks, batch" in failed
    assert "the best keys" in failed


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda chosen: chosen.flip(-1), "the best keys"),
        (lambda chosen: chosen.clamp(min=0), "rows that see nothing"),
        (lambda chosen: chosen.long(), "the best keys"),
    ],
)
def test_a_selection_of_wrong_form_fails(change, check):
    def broken(*arguments):
        return change(reference.select_topk(*arguments))

    assert check in failures("select_topk", broken)


def test_a_wrong_result_fails_forward():
    def broken(*arguments, **options):
        return dense.dense_attention(*arguments, **options) * 1.1

    failed = failures("dense_attention", broken)
    assert any(name.startswith("forward") for name in failed)


def test_one_wrong_element_in_a_large_result_fails():
    def broken(*arguments, **options):
        out = dense.dense_attention(*arguments, **options)
        nudge = torch.zeros_like(out)
        if out.shape[0] > 400:
            nudge[399, 0, 0] = 1.0
        return out + nudge

    assert failures("dense_attention", broken) == {"forward: longer, large scores"}


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 1.1


def test_a_wrong_gradient_fails_though_the_result_is_right():
    def broken(x, weight, counts):
        return grouped.grouped_matmul(WrongGradient.apply(x), weight, counts)

    failed = failures("grouped_matmul", broken)
    assert {name.partition(":")[0] for name in failed} == {"gradient", "gradient of a sum"}


def test_a_stride_zero_gradient_that_crashes_fails_and_is_named():
    def raw(x, weight, counts):
        ends = torch.tensor(counts).cumsum(0).int()
        if x.shape[1] % 8 or not x.numel():
            return grouped.grouped_matmul(x, weight, counts)
        return torch.nn.functional.grouped_mm(x, weight.mT, offs=ends)

    assert "gradient of a sum" in failures("grouped_matmul", raw)


def test_rows_whose_bits_change_with_others_fail():
    def plain(*arguments, **options):
        # A context of its own is one in which nobody asked for independent rows.
        attend = reference.sparse_latent_attention
        return contextvars.Context().run(attend, *arguments, **options)

    assert failures("sparse_latent_attention", plain) == {"rows do not depend on others"}


def test_results_that_change_between_calls_fail():
    noise = torch.Generator().manual_seed(0)

    def broken(*arguments):
        scores = reference.indexer_scores(*arguments)
        return scores + torch.rand(scores.shape, generator=noise) * 1e-7

    failed = failures("indexer_scores", broken)
    assert {name.partition(":")[0] for name in failed} == {"repeatable"}


class Consuming(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = torch.ones_like(x)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        grad = grads[0] * ctx.kept
        ctx.kept.zero_()
        return grad


def test_a_backward_that_uses_up_what_was_kept_fails():
    def broken(x, weight, counts):
        return grouped.grouped_matmul(Consuming.apply(x), weight, counts)

    failed = failures("grouped_matmul", broken)
    assert {name.partition(":")[0] for name in failed} == {"repeatable"}


def test_logits_that_exist_all_at_once_fail():
    def unchunked(*arguments, chunk_elements, **options):
        return cross_entropy.linear_cross_entropy(*arguments, chunk_elements=1 << 30, **options)

    assert failures("linear_cross_entropy", unchunked) == {"memory within a chunk"}


def test_logits_kept_chunk_by_chunk_fail():
    def kept(hidden, weight, targets, *, temperature=1.0, chunk_elements):
        rows = max(1, chunk_elements // weight.shape[0])
        one = functools.partial(reference.linear_cross_entropy, temperature=temperature)
        chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
        parts = [one(h, weight, t) for h, t in chunks]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    assert failures("linear_cross_entropy", kept) == {"memory within a chunk"}


def test_what_raises_has_failed_with_its_reason():
    def broken(*_, **__):
        raise RuntimeError("no such kernel")

    registry = Registry()
    registry.register("sparse_latent_attention", "broken", broken)
    report = conformance.run_suite(registry)
    assert not any(check.passed for check in report.checks)
    assert report.checks[0].note == "RuntimeError: no such kernel"


def test_an_op_that_nobody_checks_has_not_passed():
    assert failures("new_op", lambda x: x) == {"has checks"}


def printed(report):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(doctor.render_ops(report, "native code: none"))
    return capture.get()


def test_doctor_shows_failures_and_what_is_unavailable(monkeypatch, capsys):
    registry = Registry()
    registry.register("grouped_matmul", "reference", reference.grouped_matmul)
    registry.register("grouped_matmul", "broken", lambda x, w, c: x.new_zeros(len(x), w.shape[1]))
    registry.register("grouped_matmul", "absent", print, available=lambda: "no [tool] here")
    report = conformance.run_suite(registry, timings=False)
    text = printed(report)
    assert "broken fp32, forward: aligned: error 1, allowed" in text.replace("float32", "fp32")
    assert "absent: unavailable: no [tool] here" in text
    monkeypatch.setattr(doctor, "examine_ops", lambda: (report, "native code: none"))
    assert cli.main(["doctor", "--ops"]) == 1
    assert "headrace ops" in capsys.readouterr().out


def test_doctor_ends_well_when_all_passes(monkeypatch):
    registry = Registry()
    registry.register("grouped_matmul", "reference", ops.reference.grouped_matmul)
    report = conformance.run_suite(registry, timings=True)
    assert report.timings[0].forward > 0
    assert "13/13" in printed(report)
    monkeypatch.setattr(doctor, "examine_ops", lambda: (report, "native code: none"))
    assert cli.main(["doctor", "--ops"]) == 0
