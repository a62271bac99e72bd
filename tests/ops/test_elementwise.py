"""The fused norm, gate and rotation: every instruction level, strided rows, the same bits."""

from typing import Any

import pytest
import torch

from headrace import ops
from headrace.ops.native import build

pytestmark = pytest.mark.skipif(
    build.unavailable_reason() is not None, reason="no native library on this machine"
)

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
TOLERANCE = {FLOAT32: 3e-6, BFLOAT16: 8e-3}
WIDTHS = (2, 16, 50, 96, 130)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=("portable", "avx2", "avx512"))
def level(request):
    with build.use_level(request.param):
        yield request.param


def assert_close(got, want):
    assert got.shape == want.shape
    error = (got.double() - want).abs().max() / want.abs().max()
    assert float(error) < TOLERANCE[got.dtype]


def assert_matches_float64(op, leaves, dtype):
    """Result and gradients of `op` against the reference's in float64."""
    out = op(*leaves)
    assert out.dtype == dtype
    grad = torch.randn(out.shape).to(dtype)
    gradients = torch.autograd.grad(out, leaves, grad)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = op(*wide)
    assert_close(out.detach(), want.detach())
    want_gradients = torch.autograd.grad(want, wide, grad.double())
    for leaf, got, expected in zip(leaves, gradients, want_gradients, strict=True):
        assert got.dtype == leaf.dtype
        assert_close(got, expected)


def rotation_tables(batch, tokens, width, interleaved):
    """Cosine and signed sine of random angles, each [batch, tokens, 1, width]."""
    angles = torch.randn(batch, tokens, 1, width // 2)
    cos, sin = angles.cos(), angles.sin()
    if interleaved:
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def slices(dtype, width):
    """Rows as they lie in projections: together, a slice of each, heads of a slice, transposed."""
    whole = torch.randn(3, 5, 4, width + 9).to(dtype)
    views = (
        whole[..., :width].contiguous(),
        whole[:, :, 1, 3 : 3 + width],
        whole[:, :, 1:3, 3 : 3 + width],
        whole[:, 1:3, 1:3, 3 : 3 + width],
        whole[:1, :, :1, :width],
        whole.mT[..., :4],
    )
    return [view.detach().requires_grad_() for view in views]


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16)]
)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(level, dtype, weight_dtype, width):
    for x in slices(dtype, width):
        weight = torch.randn(x.shape[-1]).to(weight_dtype).requires_grad_()
        assert_matches_float64(lambda x, w: ops.rms_norm(x, w, 1e-2), (x, weight), dtype)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("width", WIDTHS)
def test_gate(level, dtype, width):
    for x in slices(dtype, width):
        assert_matches_float64(ops.swiglu, (x,), dtype)
    large = (torch.randn(6, 2 * width) * 60).to(dtype).requires_grad_()
    assert_matches_float64(ops.swiglu, (large,), dtype)


@pytest.mark.parametrize(
    ("dtype", "table_dtype"),
    [(FLOAT32, FLOAT32), (FLOAT32, BFLOAT16), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16)],
)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_rotation(level, dtype, table_dtype, interleaved, width):
    for x in slices(dtype, width):
        if x.dim() < 4:
            continue
        for batch in (1, x.shape[0]):
            tables = rotation_tables(batch, x.shape[1], x.shape[3], interleaved)
            cos, sin = (table.to(table_dtype) for table in tables)
            out_dtype = torch.promote_types(dtype, table_dtype)

            def turn(x, cos=cos, sin=sin):
                # In float64, tables that are not would be the ones that round.
                cos, sin = (t.double() if x.dtype == torch.float64 else t for t in (cos, sin))
                return ops.rotate(x, cos, sin, interleaved=interleaved)

            assert_matches_float64(turn, (x,), out_dtype)


def test_bits_depend_on_neither_threads_nor_neighbours():
    x, weight = torch.randn(999, 96), torch.randn(96)
    grad = torch.randn(999, 96)

    def everything(threads, rows=slice(None)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaves: Any = [x[rows].clone().requires_grad_(), weight.clone().requires_grad_()]
            out = ops.rms_norm(*leaves, 1e-6)  # pyright: ignore[reportCallIssue]
            gate = ops.swiglu(leaves[0])
            (out * grad[rows]).sum().backward(retain_graph=True)
            gate.square().sum().backward()
            return [out.detach(), gate.detach(), *(leaf.grad for leaf in leaves)]
        finally:
            torch.set_num_threads(before)

    one, two = everything(1), everything(2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    alone = everything(1, slice(500, 501))
    assert all(torch.equal(a[500:501], b) for a, b in zip(one[:3], alone[:3], strict=True))


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_norm_gives_only_the_gradient_that_is_wanted(frozen):
    tensors = {"x": torch.randn(40, 24), "weight": torch.randn(24)}
    both = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    one = {name: t.clone().requires_grad_(name != frozen) for name, t in tensors.items()}
    for leaves in (both, one):
        ops.rms_norm(leaves["x"], leaves["weight"], 1e-6).square().sum().backward()
    assert one[frozen].grad is None
    wanted = "weight" if frozen == "x" else "x"
    assert both[wanted].grad is not None
    torch.testing.assert_close(one[wanted].grad, both[wanted].grad, rtol=0, atol=0)


def test_without_gradients_nothing_is_recorded():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    with torch.no_grad():
        assert ops.rms_norm(x, weight, 1e-6).grad_fn is None
        assert ops.swiglu(x).grad_fn is None
    assert ops.rms_norm(x.detach(), weight.detach(), 1e-6).grad_fn is None


def test_gradients_of_sums_have_strides_of_zero_and_are_right():
    x, weight = torch.randn(9, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    for op in (ops.swiglu, lambda x: ops.rms_norm(x, weight, 1e-6)):
        (got,) = torch.autograd.grad(op(x).sum(), x)
        with ops.use("reference"):
            (want,) = torch.autograd.grad(op(x).sum(), x)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_bad_row_stays_alone(dtype):
    x = torch.randn(4, 40).to(dtype)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    out = ops.rms_norm(x, torch.ones(40), 1e-6)
    assert out.isnan().any(-1).tolist() == [False, True, True, False]
    assert out[1].isnan().all()
    gate = torch.randn(2, 40).to(dtype)
    gate[1, 3] = float("nan")
    assert ops.swiglu(gate).isnan().nonzero().tolist() == [[1, 3]]


def test_what_does_not_fit_is_refused():
    x = torch.randn(2, 3, 4, 8)
    table = torch.randn(1, 3, 1, 8)
    with pytest.raises(ValueError, match=r"x \[2, 3, 4, 8\], weight \[7\]"):
        ops.rms_norm(x, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16, must be float32 or"):
        ops.rms_norm(x, torch.ones(8).bfloat16(), 1e-6)
    with pytest.raises(ValueError, match=r"x torch.float16: must be"):
        ops.rms_norm(x.half(), torch.ones(8).half(), 1e-6)
    with pytest.raises(ValueError, match=r"gate_up \[2, 7\]"):
        ops.swiglu(torch.randn(2, 7))
    for cos, sin in ((table[:, :2], table[:, :2]), (table, table[..., :4]), (table[0], table[0])):
        with pytest.raises(ValueError, match="shapes do not fit"):
            ops.rotate(x, cos, sin, interleaved=True)
    with pytest.raises(ValueError, match="must be one dtype"):
        ops.rotate(x, table, table.bfloat16(), interleaved=True)
