"""Lightning: ``configure_optimizers`` returns the optimizer; Trainer, its checkpoints, and Fabric."""

import warnings
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from fcoptim import FairCastOptimizer, unwrap

from . import tiny
from .trainers import assert_same_bits, lies_on_grid, pair, snapshot

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


class Module(lightning.LightningModule):
    """The tiny model, trained as a language model."""

    def __init__(self, storage: str, rounding: str, seed: int = 0, on_nonfinite: str = "allow") -> None:
        super().__init__()
        self.model = tiny.model(seed)
        self.options = {"storage": storage, "rounding": rounding, "on_nonfinite": on_nonfinite}

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        opt = FairCastOptimizer(self.model, torch.optim.AdamW, lr=1e-3, **self.options)
        return {
            "optimizer": opt,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.LinearLR(opt), "interval": "step"},
        }


def batches(count: int) -> torch.Tensor:
    return torch.randint(3, 30, (4 * count, 8), generator=torch.Generator().manual_seed(0))


def fit(module: Module, steps: int, folder: Any, **options: Any) -> FairCastOptimizer:
    """Train up to this many steps; returns the optimizer."""
    checkpoint, data = options.pop("ckpt_path", None), options.pop("data", None)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")],
        **options,
    )
    trainer.fit(module, DataLoader(batches(8) if data is None else data, batch_size=4), ckpt_path=checkpoint)
    return unwrap(trainer.optimizers[0])


def by_hand(storage: str, rounding: str, steps: int) -> FairCastOptimizer:
    model, opt = pair(storage, rounding)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt)
    for batch in batches(steps).split(4):
        model(input_ids=batch, labels=batch).loss.backward()
        opt.step()
        scheduler.step()
        opt.zero_grad()
    return opt


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dither", "error_feedback"])
def test_trap_16_a_fit_is_the_plain_loop(rounding, storage, tmp_path):
    """Trap 16: Lightning hands a closure to every step; masters and served weights are those of the plain loop."""
    opt = fit(Module(storage, rounding), 3, tmp_path)
    assert_same_bits(snapshot(opt), snapshot(by_hand(storage, rounding, 3)))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("rounding", ["stochastic", "error_feedback"])
def test_resumes_from_its_checkpoint(rounding, precision, storage, tmp_path):
    """A checkpoint after two steps, new objects, two more steps: bit for bit four in a row; without a warning."""
    # Every batch is the same: Lightning resumes inside an epoch with the epoch's first batch.
    options = {"precision": precision, "data": batches(1).repeat(8, 1)}
    whole = fit(Module(storage, rounding), 4, tmp_path, **options)
    file = str(tmp_path / "step=2.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rewritten from the state")
        resumed = fit(Module(storage, rounding, seed=1), 4, tmp_path / "2", ckpt_path=file, **options)
    assert_same_bits(snapshot(whole), snapshot(resumed))
    assert all(lies_on_grid(p) for p in resumed.served_model.parameters())


def test_accumulates_and_clips(tmp_path):
    """``accumulate_grad_batches`` casts once for each step; ``gradient_clip_val`` reaches the masters."""
    opt = fit(Module("float32", "stochastic"), 2, tmp_path, accumulate_grad_batches=2, gradient_clip_val=1e-3)
    assert all(int(opt.state[p]["cast_count"]) == 2 for p in opt.served_model.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_trap_7_fabric(precision, storage):
    """Trap 7: Fabric's wrapper copies our ``__dict__`` and calls our methods on itself; nothing is lost."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    model, opt = pair(storage, on_nonfinite="skip")
    model, wrapped = fabric.setup(model, opt)
    assert unwrap(wrapped) is opt
    for step, batch in enumerate(batches(3).split(4)):
        fabric.backward(model(input_ids=batch, labels=batch).loss)
        if step == 1:
            next(model.parameters()).grad[0, 0] = float("nan")
        wrapped.step()
        wrapped.zero_grad()
    assert opt.cast_stats().skipped_steps == 1
    assert all(int(opt.state[p]["cast_count"]) == 2 for p in opt.served_model.parameters())
    assert opt.cast_stats().changed > 0


@pytest.mark.parametrize("rounding", ["stochastic", "error_feedback"])
def test_fabric_resumes(rounding, storage, tmp_path):
    """``fabric.save`` and ``fabric.load`` of model and optimizer together, into new objects."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)

    def steps(model: Any, opt: Any, ids: torch.Tensor) -> None:
        for batch in ids.split(4):
            fabric.backward(model(input_ids=batch, labels=batch).loss)
            opt.step()
            opt.zero_grad()

    model, opt = fabric.setup(*pair(storage, rounding))
    steps(model, opt, batches(4)[:8])
    fabric.save(tmp_path / "state.ckpt", {"model": model, "opt": opt})
    steps(model, opt, batches(4)[8:])
    again, resumed = fabric.setup(*pair(storage, rounding))
    fabric.load(tmp_path / "state.ckpt", {"model": again, "opt": resumed})
    steps(again, resumed, batches(4)[8:])
    assert_same_bits(snapshot(opt), snapshot(resumed))
