"""Muon, a torch optimizer that also runs inside ``FairCastOptimizer``, and the orthogonalisation it is made of."""

from .optimizer import Muon
from .orthogonalize import orthogonalize

__all__ = ["Muon", "orthogonalize"]
