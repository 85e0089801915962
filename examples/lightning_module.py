"""A LightningModule: configure_optimizers returns the optimizer; checkpoints carry masters. Run it as a script."""

import lightning
import tiny
import torch
from torch.utils.data import DataLoader

from fcoptim import FairCastOptimizer, unwrap


class Policy(lightning.LightningModule):
    """A causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.model()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Next-token loss, computed on the served weights."""
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> dict:
        """AdamW on fp32 masters, under the model that Lightning trains."""
        opt = FairCastOptimizer(self.model, torch.optim.AdamW, lr=1e-4, rounding="error_feedback")
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.LinearLR(opt, total_iters=4)}


def trainer(epochs: int) -> lightning.Trainer:
    """A quiet trainer on the CPU."""
    return lightning.Trainer(accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False)


ids = tiny.tokenizer()(tiny.sentences(32), padding=True, return_tensors="pt")["input_ids"]
first = trainer(epochs=1)
first.fit(Policy(), DataLoader(ids, batch_size=8))
first.save_checkpoint("policy.ckpt")

resumed = trainer(epochs=2)
resumed.fit(Policy(), DataLoader(ids, batch_size=8), ckpt_path="policy.ckpt")
opt = unwrap(resumed.optimizers[0])
print(f"{resumed.global_step} steps, error {opt.cast_stats().error_rms:.2f} ulp, {next(iter(opt.served_state_dict()))}")
