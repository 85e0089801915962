"""A bare accelerate loop: prepare, accumulation, clipping, a checkpoint; figures go to W&B (offline here).

Run: python examples/accelerate_loop.py.
"""

import os

import tiny
import torch
from accelerate import Accelerator

from fcoptim import FairCastOptimizer, LagMeter

os.environ.setdefault("WANDB_MODE", "offline")
accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2, log_with="wandb")
accelerator.init_trackers("fcoptim", config={"rounding": "stochastic"})

model = tiny.model()
opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-4, rounding="stochastic")
scheduler = torch.optim.lr_scheduler.LinearLR(opt, total_iters=4)
model, opt, scheduler = accelerator.prepare(model, opt, scheduler)
meter = LagMeter(opt)  # finds the FairCastOptimizer inside what accelerate has put around it

ids = tiny.tokenizer()(tiny.sentences(32), padding=True, return_tensors="pt")["input_ids"]
for step, batch in enumerate(ids.split(4)):
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        scheduler.step()
        opt.zero_grad()
    if accelerator.sync_gradients:
        accelerator.log({"loss": loss.item(), **meter.update()}, step=step)

accelerator.save_state("checkpoint")  # model and optimizer: masters, counts, moments
accelerator.load_state("checkpoint")
accelerator.end_training()
print(f"loss {loss.item():.2f}, {accelerator.unwrap_model(model).lm_head.weight.dtype} weights served")
