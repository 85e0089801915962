"""Sparse weight sync: ship only the served weights whose bits changed, version by version."""

from .files import latest_version, read_file, write_file
from .patches import SparseWeightPatch, to_patches
from .receiver import Receiver
from .sender import Sender
from .update import Publication, SyncError, TensorUpdate, Update

__all__ = [
    "Publication",
    "Receiver",
    "Sender",
    "SparseWeightPatch",
    "SyncError",
    "TensorUpdate",
    "Update",
    "latest_version",
    "read_file",
    "to_patches",
    "write_file",
]
