"""Groups of packed matrices, by the reference and at every instruction level here."""

import pytest
import torch
from torch import Tensor

from headrace import ops
from headrace.ops import PackedMatrices, packed_grouped_linear, packed_linear
from headrace.ops.native import build
from headrace.ops.packed import KINDS

LEVELS = (
    build.LEVELS[: build.LEVELS.index(build.level()) + 1]
    if build.unavailable_reason() is None
    else ()
)
DTYPES = (torch.float32, torch.bfloat16)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_the_bits_of_a_product_by_itself(level, kind, dtype):
    for outputs, inputs in ((33, 31), (64, 200)):
        matrices = PackedMatrices.pack(randn(4, outputs, inputs), kind)
        for counts in ([0, 3, 17, 1], [1, 0, 0, 0], [0, 0, 0, 0], [20, 40, 33, 16]):
            x = randn(sum(counts), inputs, dtype=dtype, seed=1)
            out = packed_grouped_linear(x, matrices, counts)
            assert out.shape == (len(x), outputs)
            assert out.dtype == dtype
            assert torch.equal(out, packed_grouped_linear(x, matrices, torch.tensor(counts)))
            groups = torch.repeat_interleave(torch.arange(4), torch.tensor(counts)).tolist()
            for row, (group, got) in enumerate(zip(groups, out, strict=True)):
                assert torch.equal(got, packed_linear(x[row : row + 1], matrices[group])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_threads(level, kind, threads):
    # Few large groups, whose panels are shared out, and many, of which each goes to one thread.
    for count in (2, 40):
        matrices = PackedMatrices.pack(randn(count, 300, 200), kind)
        x = randn(count * 5, 200, dtype=torch.bfloat16, seed=1)
        results = []
        for number in (1, 2, 3):
            threads(number)
            results.append(packed_grouped_linear(x, matrices, [5] * count))
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_repack_follows_the_weights_in_place(kind):
    with torch.inference_mode():
        matrices = PackedMatrices.pack(randn(3, 45, 70, dtype=torch.bfloat16), kind)
    place, size = matrices.data.data_ptr(), matrices.nbytes
    for weights in (randn(3, 45, 70, seed=1), randn(3, 70, 45, seed=2).transpose(1, 2)):
        assert matrices.repack_(weights) is matrices
        fresh = PackedMatrices.pack(weights.contiguous(), kind)
        assert torch.equal(matrices.data, fresh.data)
        assert torch.equal(matrices.unpack(), fresh.unpack())
        if kind == "float32":
            assert torch.equal(matrices.unpack(), weights)
    assert (matrices.data.data_ptr(), matrices.nbytes, len(matrices)) == (place, size, 3)
    assert matrices.to("cpu") is matrices
    assert matrices.to("meta").data.device.type == "meta"


def test_no_gradient_and_strided_rows(level):
    matrices = PackedMatrices.pack(randn(2, 5, 7).requires_grad_(), "float32")
    x = randn(7, 4).T.requires_grad_()
    out = packed_grouped_linear(x, matrices, [1, 3])
    assert out.grad_fn is None
    assert torch.equal(out, packed_grouped_linear(x.detach().contiguous(), matrices, [1, 3]))


def test_what_does_not_fit_is_refused():
    matrices = PackedMatrices.pack(randn(2, 4, 8), "bfloat16")
    for shape in ((4, 8), (0, 4, 8), (2, 0, 8)):
        with pytest.raises(ValueError, match="matrices, outputs, inputs"):
            PackedMatrices.pack(torch.zeros(shape), "float32")
    for shape in ((3, 4, 8), (4, 8)):
        with pytest.raises(ValueError, match=r"must be \[2, 4, 8\]"):
            matrices.repack_(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"must be \[rows, 8\]"):
        packed_grouped_linear(randn(2, 7), matrices, [1, 1])
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        packed_grouped_linear(randn(2, 8).double(), matrices, [1, 1])
    for counts in ([2], [1, 2], [3, -1], [1, 1, 0]):
        with pytest.raises(ValueError, match="must be 2 numbers >= 0 that sum to 2"):
            packed_grouped_linear(randn(2, 8), matrices, counts)
    with pytest.raises(ValueError, match="x is on cpu, but the matrices are on meta"):
        packed_grouped_linear(randn(2, 8), matrices.to("meta"), [1, 1])
