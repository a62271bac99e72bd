"""Packed matrices and their products, by the reference and at every instruction level here."""

import pytest
import torch
from torch import Tensor

from headrace import ops
from headrace.ops import PackedMatrix, packed_linear
from headrace.ops.native import build
from headrace.ops.packed import KINDS

LEVELS = (
    build.LEVELS[: build.LEVELS.index(build.level()) + 1]
    if build.unavailable_reason() is None
    else ()
)
DTYPES = (torch.float32, torch.bfloat16)
SIZES = [(1, 1), (5, 3), (31, 33), (32, 64), (65, 130), (96, 1100)]


@pytest.fixture(params=("reference", *LEVELS))
def level(request):
    """Run the test with the reference and at each level."""
    if request.param == "reference":
        with ops.use("reference"):
            yield request.param
    else:
        with build.use_level(request.param):
            yield request.param


@pytest.fixture
def threads():
    """Sets the number of threads, and afterwards the one before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def assert_close(got: Tensor, want: Tensor) -> None:
    """Within 1e-5 of the largest, after a rounding to bfloat16 within half of its step."""
    assert got.shape == want.shape
    slack = 1e-5 if got.dtype == torch.float32 else 2**-8
    assert (got.double() - want).abs().max() <= slack * want.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_floats_against_float64(level, kind, size, dtype):
    outputs, inputs = size
    weight, bias = randn(outputs, inputs), randn(outputs, seed=1)
    matrix = PackedMatrix.pack(weight, kind)
    rounded = weight if kind == "float32" else weight.bfloat16()
    for rows in (1, 2, 7, 16, 17, 50):
        x = randn(rows, inputs, dtype=dtype, seed=rows)
        exact = x.double() if kind == "float32" else x.bfloat16().double()
        want = exact @ rounded.double().T
        assert_close(packed_linear(x, matrix), want)
        assert_close(packed_linear(x, matrix, bias), want + bias)
        assert_close(packed_linear(x, matrix, bias.bfloat16()), want + bias.bfloat16())
        assert packed_linear(x, matrix).dtype == dtype


def integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers [N, D] and what one of them is worth in each row, float32 [N, 1]."""
    scales = x.float().abs().amax(1, keepdim=True) / 127
    steps = x.float() / scales.masked_fill(scales == 0, 1.0)
    return steps.round().clamp(-127, 127).long(), scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [*SIZES, (33, 4000)], ids=str)
def test_int8_is_exact(level, size, dtype):
    outputs, inputs = size
    weight, bias = randn(outputs, inputs), randn(outputs, seed=1)
    weight[-1] = 0.0
    matrix = PackedMatrix.pack(weight, "int8")
    columns, worth = integers(weight)
    assert torch.equal(matrix.unpack(), columns * worth)
    for rows in (1, 3, 16, 17, 40):
        x = randn(rows, inputs, dtype=dtype, seed=rows) * 3
        x[-1] = 0.0
        # Halves, which go to the even number, and the largest sums there are.
        x[0] = torch.arange(inputs).remainder(9) * 0.5
        x[0, 0] = 127.0
        x[rows // 2] = weight[0].sign().to(dtype)
        left, scales = integers(x)
        want = (left @ columns.T).float() * worth[:, 0] * scales
        assert torch.equal(packed_linear(x, matrix), want.to(dtype))
        assert torch.equal(packed_linear(x, matrix, bias), (want + bias).to(dtype))


def test_int8_sums_do_not_overflow(level):
    ones = torch.ones(2, 1 << 17)
    matrix = PackedMatrix.pack(ones * torch.tensor([[1.0], [-1.0]]), "int8")
    want = torch.tensor([[127.0**2 * ones.shape[1]]])
    scale = torch.tensor(1.0) / 127
    assert torch.equal(
        packed_linear(ones, matrix), torch.cat((want, -want), 1) * scale * scale * torch.ones(2, 1)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_others(level, kind, dtype):
    # In several blocks of rows, in part of a tile and of a panel.
    for outputs, inputs in ((70, 90), (40, 2100)):
        matrix = PackedMatrix.pack(randn(outputs, inputs), kind)
        bias = randn(outputs, seed=1)
        x = randn(70, inputs, seed=2)
        x[::3] *= 1000
        x = x.to(dtype)
        whole = packed_linear(x, matrix, bias)
        step = 1 if inputs == 90 else 23
        for rows in range(1, 70, step):
            start = (rows * 7) % (71 - rows)
            part = packed_linear(x[start : start + rows], matrix, bias)
            assert torch.equal(bits(part), bits(whole[start : start + rows]))
        generator = torch.Generator().manual_seed(3)
        for rows in (1, 5, 16, 40, 100):
            chosen = torch.randint(0, 70, (rows,), generator=generator)
            assert torch.equal(bits(packed_linear(x[chosen], matrix, bias)), bits(whole[chosen]))


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_threads(level, kind, threads):
    matrix = PackedMatrix.pack(randn(1000, 600), kind)
    x = randn(90, 600, dtype=torch.bfloat16, seed=1)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append([packed_linear(x[:rows], matrix) for rows in (1, 90)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_lie_apart(level, kind):
    matrix = PackedMatrix.pack(randn(40, 30), kind)
    wide = randn(9, 100, seed=1)
    for x in (wide[:, 20:50], wide[::2, 3:33], randn(30, 9, seed=2).T, wide[:1, :30].expand(5, 30)):
        assert torch.equal(packed_linear(x, matrix), packed_linear(x.contiguous(), matrix))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_row(level, kind):
    x, weight = randn(20, 40), torch.rand(50, 40, generator=torch.Generator().manual_seed(1)) + 1
    matrix = PackedMatrix.pack(weight, kind)
    before = packed_linear(x, matrix)
    x[3, 7], x[9, 39], x[18, 0] = torch.nan, torch.inf, -torch.inf
    out = packed_linear(x, matrix)
    assert out[3].isnan().all()
    if kind == "int8":
        assert out[[9, 18]].isnan().all()
    else:
        assert (out[9] == torch.inf).all()
        assert (out[18] == -torch.inf).all()
    good = [row for row in range(20) if row not in (3, 9, 18)]
    assert torch.equal(out[good], before[good])
    # In the weight: its output, in every row.
    weight[5, 2], weight[49, 0] = torch.nan, torch.inf
    out = packed_linear(x[good].abs(), PackedMatrix.pack(weight, kind))
    assert out[:, 5].isnan().all()
    assert (out[:, 49].isnan() if kind == "int8" else out[:, 49] == torch.inf).all()
    assert out[:, [*range(5), *range(6, 49)]].isfinite().all()


def test_very_small_rows_of_int8(level):
    matrix = PackedMatrix.pack(torch.eye(3), "int8")
    tiny = torch.tensor([[1e-45, 0.0, 0.0], [1e-43, -3e-44, 0.0], [1e-36, -1e-36, 0.0]])
    out = packed_linear(tiny, matrix)
    assert (out[0] == 0).all()
    with ops.use("reference"):
        assert torch.equal(out, packed_linear(tiny, matrix))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_and_no_gradient(level, kind):
    matrix = PackedMatrix.pack(randn(5, 7).requires_grad_(), kind)
    assert packed_linear(torch.zeros(0, 7), matrix).shape == (0, 5)
    assert packed_linear(randn(2, 7).requires_grad_(), matrix).grad_fn is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = packed_linear(randn(2, 7), matrix, torch.ones(5))
    assert torch.equal(inside, packed_linear(randn(2, 7), matrix, torch.ones(5)))


@pytest.mark.parametrize("kind", KINDS)
def test_repack_follows_the_weight_in_place(level, kind):
    with torch.inference_mode():
        matrix = PackedMatrix.pack(randn(45, 70, dtype=torch.bfloat16), kind)
    place, size = matrix.data.data_ptr(), matrix.nbytes
    for weight in (
        randn(45, 70, seed=1),
        randn(70, 45, seed=2).T,
        randn(90, 80, seed=3)[::2, 7:77],
    ):
        assert matrix.repack_(weight) is matrix
        with ops.use("reference"):
            fresh = PackedMatrix.pack(weight.contiguous(), kind)
        assert torch.equal(matrix.data, fresh.data)
        x = randn(4, 70, seed=2)
        assert torch.equal(packed_linear(x, matrix), packed_linear(x, fresh))
    assert (matrix.data.data_ptr(), matrix.nbytes) == (place, size)
    assert matrix.to("cpu") is matrix
    assert matrix.to("meta").data.device.type == "meta"


def test_unpack_and_size():
    weight = randn(45, 70)
    assert torch.equal(PackedMatrix.pack(weight, "float32").unpack(), weight)
    assert torch.equal(PackedMatrix.pack(weight.T, "float32").unpack(), weight.T)
    assert torch.equal(PackedMatrix.pack(weight, "bfloat16").unpack(), weight.bfloat16())
    quantised = PackedMatrix.pack(weight, "int8").unpack()
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((quantised - weight).abs() <= 0.5001 * step).all()
    sizes = {kind: PackedMatrix.pack(randn(64, 128), kind).nbytes for kind in KINDS}
    assert sizes == {"float32": 64 * 512, "bfloat16": 64 * 256, "int8": 64 * 128 + 64 * 4}


def test_what_does_not_fit_is_refused():
    matrix = PackedMatrix.pack(randn(4, 8), "bfloat16")
    with pytest.raises(ValueError, match=r'"int4".*float32, bfloat16, int8'):
        PackedMatrix.pack(randn(4, 8), "int4")  # pyright: ignore[reportArgumentType]
    for shape in ((4,), (0, 8), (4, 0), (2, 2, 2)):
        with pytest.raises(ValueError, match="outputs, inputs"):
            PackedMatrix.pack(torch.zeros(shape), "float32")
    with pytest.raises(ValueError, match=r"weight is torch\.float16"):
        PackedMatrix.pack(randn(4, 8).half(), "float32")
    with pytest.raises(ValueError, match="at most 131072"):
        PackedMatrix.pack(torch.zeros(1, (1 << 17) + 1), "int8")
    with pytest.raises(ValueError, match=r"weight \[8, 4\] must be \[4, 8\]"):
        matrix.repack_(randn(8, 4))
    for shape in ((8,), (2, 7), (1, 2, 8)):
        with pytest.raises(ValueError, match=r"must be \[rows, 8\]"):
            packed_linear(torch.zeros(shape), matrix)
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        packed_linear(randn(2, 8).double(), matrix)
    with pytest.raises(ValueError, match=r"bias \[3\] on cpu must be \[4\]"):
        packed_linear(randn(2, 8), matrix, torch.zeros(3))
    with pytest.raises(ValueError, match=r"bias is torch\.int64"):
        packed_linear(randn(2, 8), matrix, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="x is on cpu, but the matrix is on meta"):
        packed_linear(randn(2, 8), matrix.to("meta"))
