"""Many processes: sharded parameters (DTensors), agreement between ranks, global figures, reduction of gradients."""

from .reduction import reduce_in_fp32

__all__ = ["reduce_in_fp32"]
