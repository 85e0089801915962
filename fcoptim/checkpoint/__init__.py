"""Checkpoints: fp32 masters, served model, optimizer state and extras as one folder, whole or absent.

``layout.py`` says what a folder holds; ``plan.py`` and ``writing.py`` make it, ``folder.py`` puts it in place;
``team.py`` and ``joint.py`` let several ranks do so; ``opened.py`` reads one.
"""

from .interop import from_torch, to_torch
from .layout import CheckpointError
from .load import load_checkpoint
from .save import Saving, save_checkpoint

__all__ = ["CheckpointError", "Saving", "from_torch", "load_checkpoint", "save_checkpoint", "to_torch"]
