"""For TRL's trainers: the mixin of ``transformers.Trainer``, and what is particular about TRL's weight sync."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from . import transformers
from .transformers import FairCastCallback

__all__ = ["FairCastCallback", "FairCastMixin"]


class FairCastMixin(transformers.FairCastMixin):
    """Give a TRL trainer a ``create_optimizer`` that wraps the optimizer it makes.

    TRL's trainers take ``optimizers=(opt, None)`` where they are given a model object. Use this where they make the
    model themselves (given by name, or adapters from ``peft_config``) or run under FSDP.

    Args:
        *args: For the trainer.
        fair_cast: Options of ``FairCastOptimizer``.
        **kwargs: For the trainer.

    Raises:
        ValueError: As ``fcoptim.integrations.transformers.FairCastMixin``.

    Warns:
        UserWarning: vLLM gets merged adapters, whose merge is rounded to nearest.

    Examples:
        >>> class FairGRPOTrainer(FairCastMixin, GRPOTrainer):  # doctest: +SKIP
        ...     pass
        >>> FairGRPOTrainer("Qwen/Qwen3-0.6B", reward, args, train_dataset=data)  # doctest: +SKIP
    """

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer that the arguments ask for, and wrap it; called by the trainer.

        Args:
            model: The model to train; the trainer's own if None.
        """
        made = super().create_optimizer(model)
        warn_of_merge(self)
        return made


def warn_of_merge(trainer: Any) -> None:
    """Warn that adapters are merged for vLLM outside the optimizer.

    Args:
        trainer: A TRL trainer.
    """
    if getattr(trainer, "use_vllm", False) and hasattr(trainer.model, "merge_adapter"):
        warnings.warn(
            "TRL merges the adapters into the base weights for vLLM, rounding the sum to nearest, whatever the "
            "optimizer does: small changes of the adapters do not reach the rollouts. To serve a fair cast, give the "
            "engine fcoptim.Exporter's cast of the fp32 merged state, or the adapters themselves",
            stacklevel=3,
        )
