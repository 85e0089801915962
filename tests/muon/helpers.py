"""Matrices, references and comparisons that Muon's tests share."""

import torch


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal noise that depends on shape and seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def polynomial_of(matrix: torch.Tensor, triples, margin: float = 1.0) -> torch.Tensor:
    """What an iteration comes to in exact arithmetic: its polynomials on the singular values, in fp64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (s.norm() * margin)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u * s @ vh


def polar_factor(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T of the SVD U S V^T, in fp64."""
    u, _, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ vh
