"""The orthogonalisation by itself: against the SVD, for its scale, its edge cases, and what it leaves alone."""

import pytest
import torch

from fcoptim.muon import orthogonalize
from fcoptim.muon.coefficients import METHODS, best_quintic, polar_express, read_coefficients
from fcoptim.muon.orthogonalize import MARGINS, floor_flops, make_plan, plain_flops

from .helpers import noise, polar_factor, polynomial_of, relative_error

SHAPES = [(16, 16), (8, 32), (32, 8), (1, 5), (5, 1), (24, 160), (160, 24), (130, 700), (400, 390), (384, 1200)]
# Rounding of the iteration against exact arithmetic, in the Frobenius norm.
TOLERANCE = {"bfloat16": 3e-2, "float32": 2e-5}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_its_polynomials_on_the_singular_values(shape, method, dtype):
    """Whatever products are joined, left out or turned, the result is that of the polynomials in fp64."""
    matrix = noise(*shape)
    expected = polynomial_of(matrix, read_coefficients(method, None, None), MARGINS[method])
    # The only singular value of a vector is its norm, at the end of the interval, where Polar Express is steep.
    tolerance = TOLERANCE[dtype] * (4 if 1 in shape else 1)
    assert relative_error(orthogonalize(matrix, method, dtype=dtype), expected) < tolerance


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16)], ids=str)
def test_polar_express_converges_to_the_polar_factor(shape):
    """With enough steps every singular value is 1: the SVD's U V^T."""
    matrix = noise(*shape)
    got = orthogonalize(matrix, "polar_express", steps=12, dtype="float32")
    assert relative_error(got, polar_factor(matrix)) < 1e-4


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16), (192, 576)], ids=str)
def test_five_steps_are_near_the_polar_factor(shape, method, dtype):
    """Singular values within a factor of 10 come out between 0.68 and 1.2, or 0.87 and 1.13 with Polar Express."""
    u, _, vh = torch.linalg.svd(noise(*shape).double(), full_matrices=False)
    values = torch.logspace(-1, 0, min(shape), dtype=torch.float64)
    matrix = (u * values @ vh).float()
    got = orthogonalize(matrix, method, dtype=dtype)
    low, high = (0.65, 1.20) if method == "newton_schulz" else (0.84, 1.16)
    found = torch.linalg.svdvals(got.double())
    assert found.min() > low and found.max() < high


@pytest.mark.parametrize("spread", [10.0, 100.0, 1000.0])
def test_the_default_is_the_more_accurate_method(spread, dtype):
    """At five steps each, Polar Express ends nearer to the polar factor, whatever the singular values' spread."""
    u, _, vh = torch.linalg.svd(noise(48, 96).double(), full_matrices=False)
    matrix = (u * torch.logspace(0, -float(torch.tensor(spread).log10()), 48, dtype=torch.float64) @ vh).float()
    errors = [relative_error(orthogonalize(matrix, m, dtype=dtype), u @ vh) for m in METHODS]
    assert relative_error(orthogonalize(matrix, dtype=dtype), u @ vh) == min(errors)
    assert min(errors) < 0.8 * max(errors)


@pytest.mark.parametrize("exponent", [-20, -10, -3, 0, 4, 10, 15])
def test_scale_free(exponent, method, dtype):
    """The same direction at any scale gives the same update; a power of two gives the same bits."""
    matrix = noise(24, 40)
    expected = orthogonalize(matrix, method, dtype=dtype)
    assert relative_error(orthogonalize(matrix * 10.0**exponent, method, dtype=dtype), expected) < TOLERANCE[dtype] / 2
    scaled = matrix * 2.0 ** round(exponent / 0.30103)
    assert torch.equal(orthogonalize(scaled, method, dtype=dtype), expected)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype_is_read_and_left_alone(given, method, dtype):
    """Field report 31: the input keeps its bits, in the dtype of the iteration too."""
    matrix = noise(12, 20, dtype=given)
    before = matrix.clone()
    got = orthogonalize(matrix, method, dtype=dtype)
    assert torch.equal(matrix, before)
    assert got.dtype is getattr(torch, dtype) and got.data_ptr() != matrix.data_ptr()


def edge_cases(rows, cols):
    zero_row = noise(rows, cols)
    zero_row[rows // 2] = 0
    return {
        "zero": torch.zeros(rows, cols),
        "rank 1": noise(rows, 1, seed=1) @ noise(1, cols, seed=2),
        "ones": torch.ones(rows, cols),
        "zero row": zero_row,
        "one element": torch.zeros(rows, cols).index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(3.0)),
        "subnormal": torch.full((rows, cols), 1e-41),
        "smallest normal": torch.full((rows, cols), 1.2e-38),
        "largest": torch.full((rows, cols), 3.4e38),
    }


@pytest.mark.parametrize("case", edge_cases(4, 4))
@pytest.mark.parametrize("shape", [(16, 24), (24, 16)], ids=str)
def test_edge_cases_are_finite(case, shape, method, dtype):
    """Field report 17: zero, rank-1 and zero-row matrices are finite, zeros stay zeros, and no value is above 1.3."""
    matrix = edge_cases(*shape)[case]
    got = orthogonalize(matrix, method, dtype=dtype)
    assert torch.isfinite(got).all()
    assert torch.equal(got[(matrix == 0).all(1)], torch.zeros_like(got[(matrix == 0).all(1)]))
    assert torch.linalg.matrix_norm(got.float(), 2) < 1.3
    if case in ("rank 1", "ones", "one element", "smallest normal", "largest"):
        assert torch.linalg.matrix_norm(got.float(), 2) > 0.65


def test_batch_equals_its_matrices(method, dtype):
    """Matrices of a batch do not touch each other, a zero and a non-finite one among them."""
    batch = noise(5, 20, 30)
    batch[1] = 0
    batch[3, 4, 5] = float("nan")
    got = orthogonalize(batch, method, dtype=dtype)
    assert torch.isnan(got[3]).all() and (got[1] == 0).all()
    for number in (0, 1, 2, 4):
        single = orthogonalize(batch[number], method, dtype=dtype)
        assert torch.allclose(got[number].float(), single.float(), atol=1e-2 if dtype == "bfloat16" else 1e-6)


def test_transposed_and_strided_input(method, dtype):
    """A transposed view gives the transposed result; strides do not matter."""
    matrix = noise(20, 44)
    expected = orthogonalize(matrix, method, dtype=dtype)
    assert relative_error(orthogonalize(matrix.mT, method, dtype=dtype).mT, expected) < TOLERANCE[dtype]
    assert torch.equal(
        orthogonalize(noise(20, 88)[:, ::2], method, dtype=dtype),
        orthogonalize(noise(20, 88)[:, ::2].clone(), method, dtype=dtype),
    )


def test_empty_matrices():
    assert orthogonalize(torch.zeros(0, 4)).shape == (0, 4)
    assert orthogonalize(torch.zeros(3, 4, 0)).shape == (3, 4, 0)


@pytest.mark.parametrize("interval", [(0.024, 1.0), (0.3, 1.7), (0.9, 1.1)], ids=str)
def test_remez_finds_the_best_quintic(interval):
    """Four points of equal error with alternating sign: by Chebyshev's theorem no odd quintic does better."""
    low, high = interval
    a, b, c = best_quintic(low, high)
    x = torch.linspace(low, high, 200_001, dtype=torch.float64)
    error = a * x + b * x**3 + c * x**5 - 1
    largest = error.abs().max()
    peaks = [float(part[part.abs().argmax()]) for part in torch.tensor_split(error, _sign_changes(error))]
    assert len(peaks) == 4
    assert all(abs(abs(peak) - largest) < 1e-6 for peak in peaks)


def _sign_changes(values):
    return torch.nonzero(values[1:].sign() != values[:-1].sign()).flatten() + 1


def test_polar_express_equals_the_published_table():
    """The first five and the limit, against the table of arXiv 2505.16932 (before its safety factor)."""
    published = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    ]
    for number, (found, expected) in enumerate(zip(polar_express(9), published)):
        unstretched = [value * 1.01**power for value, power in zip(found, (1, 3, 5))]
        assert unstretched == pytest.approx(expected, rel=1e-6), number
    assert polar_express(9)[8] == pytest.approx((1.875, -1.25, 0.375))


@pytest.mark.parametrize("shape", [(576, 576), (192, 576), (1536, 576), (64, 64), (576, 4096)], ids=str)
def test_operations_are_counted_and_saved(shape):
    """The plan never costs more than the iteration as it is written down, and counts what that is known to cost."""
    side, length = min(shape), max(shape)
    assert plain_flops(*shape, 5) == 5 * (4 * side**2 * length + 2 * side**3)
    for symmetric in (True, False):
        assert make_plan(*shape, 5, symmetric).flops <= plain_flops(*shape, 5)
    assert floor_flops(*shape, 5) <= make_plan(*shape, 5, True).flops
    assert floor_flops(*shape, 5) >= 0.5 * plain_flops(*shape, 5) or side < length
    assert sum(make_plan(*shape, 5, True).chains) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "svd"}, "orthogonalize must be one of 'newton_schulz', 'polar_express', got 'svd'"),
        ({"steps": 0}, "steps must be an integer from 1 to 100, got 0"),
        ({"steps": 2.5}, "got 2.5"),
        ({"steps": True}, "got True"),
        ({"dtype": "float16"}, "dtype must be one of 'auto', 'bfloat16', 'float32', got 'float16'"),
        ({"coefficients": (1.0, 2.0)}, r"triple \(a, b, c\).*got \(1.0, 2.0\)"),
        ({"coefficients": [(1.0, 2.0, float("nan"))]}, "nan"),
        ({"coefficients": "abc"}, "got 'abc'"),
        ({"coefficients": []}, "coefficients is empty"),
    ],
)
def test_wrong_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(noise(3, 4), **arguments)


@pytest.mark.parametrize("matrices", [torch.zeros(3), torch.zeros(2, 2, 2, 2), torch.zeros(2, 2, dtype=torch.int64)])
def test_wrong_tensors(matrices):
    with pytest.raises(ValueError, match="orthogonalize takes a floating-point tensor of shape"):
        orthogonalize(matrices)


@pytest.mark.parametrize(
    ("custom", "steps", "expected"),
    [
        ((1.5, -0.5, 0.0), None, [(1.5, -0.5, 0.0)] * 5),
        ([(1.5, -0.5, 0.0)], 2, [(1.5, -0.5, 0.0)] * 2),
        ([(3, -4, 2), (2, -1.5, 0.5)], None, [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5)]),
        ([(3, -4, 2), (2, -1.5, 0.5)], 3, [(3.0, -4.0, 2.0), (2.0, -1.5, 0.5), (2.0, -1.5, 0.5)]),
        ([(3, -4, 2), (2, -1.5, 0.5)], 1, [(3.0, -4.0, 2.0)]),
    ],
)
def test_custom_coefficients(custom, steps, expected):
    """One triple is used for all steps; of several the last is repeated, and as many steps are made as asked."""
    assert list(read_coefficients("newton_schulz", steps, custom)) == expected
    matrix = noise(8, 12)
    got = orthogonalize(matrix, steps=steps, coefficients=custom, dtype="float32")
    assert relative_error(got, polynomial_of(matrix, expected)) < 1e-5
