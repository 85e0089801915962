"""Unbiased export of fp32 master weights to the bf16 served copy, for RL post-training.

``FairCastOptimizer`` wraps any torch optimizer; ``Exporter`` casts masters that something else keeps.
"""

from . import lag
from .cast import cast_, parameter_key, start_accumulator_
from .checkpoint import CheckpointError, from_torch, load_checkpoint, save_checkpoint, to_torch
from .configured import FairCastAdamW, FairCastMuon, FairCastSGD
from .exporter import Exporter
from .meter import LagMeter
from .muon import Muon
from .optimizer import FairCastOptimizer, unwrap
from .stats import CastStats

__version__ = "0.1.0"

__all__ = [
    "CastStats",
    "CheckpointError",
    "Exporter",
    "FairCastAdamW",
    "FairCastMuon",
    "FairCastOptimizer",
    "FairCastSGD",
    "LagMeter",
    "Muon",
    "cast_",
    "from_torch",
    "lag",
    "load_checkpoint",
    "parameter_key",
    "save_checkpoint",
    "start_accumulator_",
    "to_torch",
    "unwrap",
]
