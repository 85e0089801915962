"""Unbiased export of fp32 master weights to the bf16 served copy, for RL post-training.

``FairCastOptimizer`` wraps any torch optimizer; ``Exporter`` casts masters that something else keeps.
"""

from .cast import cast_, parameter_key, start_accumulator_
from .configured import FairCastAdamW, FairCastMuon, FairCastSGD
from .exporter import Exporter
from .optimizer import FairCastOptimizer, unwrap
from .stats import CastStats

__version__ = "0.1.0"

__all__ = [
    "CastStats",
    "Exporter",
    "FairCastAdamW",
    "FairCastMuon",
    "FairCastOptimizer",
    "FairCastSGD",
    "cast_",
    "parameter_key",
    "start_accumulator_",
    "unwrap",
]
