"""For ``transformers.Trainer``: a mixin where it makes the optimizer itself, and a callback that logs the casts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..meter import LagMeter
from ..optimizer import FairCastOptimizer
from .checks import check_setup, find


class FairCastCallback(TrainerCallback):  # type: ignore[misc]
    """Check the set-up when training begins, measure each step, and log the figures whenever the trainer logs.

    Logged are those of ``LagMeter`` and of ``CastStats``, as ``fcoptim/tracked``, ``fcoptim/error_rms`` and so on. They
    are in the trainer's log history, and in what it reports to (TensorBoard, W&B) if the callback stands before the
    reporters, where ``attach`` puts it.

    Args:
        meter: A ``LagMeter`` of one's own, None for none, or True (default) to make one when training begins. Its
            displacements are counted from there, also in a resumed run.

    Examples:
        >>> FairCastCallback().attach(trainer)  # doctest: +SKIP
    """

    def __init__(self, meter: LagMeter | bool | None = True) -> None:
        self.meter = meter
        self._figures: dict[str, float] = {}

    def attach(self, trainer: Any) -> FairCastCallback:
        """Put the callback before the trainer's reporters, so that they see its values; returns itself."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse or warn of a set-up that would defeat the purpose; see ``check_setup``."""
        ours = check_setup(kwargs["model"], kwargs["optimizer"], autocast=autocast_dtype(args))
        if self.meter is True:
            self.meter = LagMeter(ours)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure what the step did."""
        if isinstance(self.meter, LagMeter):
            self._figures = self.meter.update()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the figures to a training step's logs and to the trainer's history."""
        ours = find(kwargs.get("optimizer"))
        if ours is None or logs is None or "loss" not in logs:
            return
        exact = {f"fcoptim/{name}": value for name, value in asdict(ours.cast_stats()).items()}
        values = {**self._figures, **exact}
        logs.update(values)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(values)


def autocast_dtype(args: Any) -> torch.dtype | None:
    """The dtype in which a trainer with these arguments computes under autocast, or None."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


class FairCastMixin:
    """Give a ``transformers.Trainer``, or a subclass, a ``create_optimizer`` that wraps what the trainer makes.

    For the cases where a trainer refuses or can't use ``optimizers=(opt, None)``: FSDP, a model given by name or by
    ``model_init``, adapters that it makes from a ``peft_config``. The optimizer inside is what the arguments ask for
    (``optim``, ``learning_rate``, ``weight_decay``, ``optimizer_cls_and_kwargs``), with the trainer's own param groups.

    Args:
        *args: For the trainer.
        fair_cast: Options of ``FairCastOptimizer``: ``{"rounding": "dither", "storage": "float32"}``. Default: its
            own defaults.
        **kwargs: For the trainer.

    Raises:
        ValueError: DeepSpeed, which keeps its own masters; FSDP 1, whose flat parameters have lost names and shapes.

    Examples:
        >>> class FairTrainer(FairCastMixin, Trainer):  # doctest: +SKIP
        ...     pass
        >>> FairTrainer(model, args, fair_cast={"rounding": "dither"})  # doctest: +SKIP
    """

    optimizer: Any
    model: Any
    args: Any
    accelerator: Any

    def __init__(self, *args: Any, fair_cast: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._fair_cast = dict(fair_cast or {})
        super().__init__(*args, **kwargs)
        FairCastCallback().attach(self)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer that the arguments ask for, and wrap it; called by the trainer.

        Args:
            model: The model to train; the trainer's own if None.
        """
        self._refuse_engines()
        args = () if model is None else (model,)
        made: torch.optim.Optimizer = super().create_optimizer(*args)  # type: ignore[misc]
        if find(made) is None:
            target = self.model if model is None else model
            made = self.optimizer = FairCastOptimizer(target, made, **self._fair_cast)
        return made

    def _refuse_engines(self) -> None:
        if getattr(self, "is_deepspeed_enabled", False):
            raise ValueError(
                "DeepSpeed keeps its own fp32 masters and casts inside, where no optimizer wrapper can reach. Train "
                "with the plain trainer, and give the rollout engine fcoptim.Exporter's cast of the gathered weights"
            )
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if getattr(self, "is_fsdp_enabled", False) and getattr(plugin, "fsdp_version", 2) == 1:
            raise ValueError(
                "FSDP 1 flattens parameters, which then have neither names nor shapes; set fsdp_version: 2 in "
                "fsdp_config or in accelerate's configuration"
            )
