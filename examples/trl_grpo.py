"""TRL's GRPOTrainer on served weights: the optimizer goes in as it is. Run: python examples/trl_grpo.py."""

import tiny
import torch
from trl import GRPOConfig, GRPOTrainer

from fcoptim import FairCastOptimizer
from fcoptim.integrations.trl import FairCastCallback

# In earnest: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), its tokenizer, and use_vllm=True below.
model, tokenizer = tiny.model(), tiny.tokenizer()

opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-5, rounding="dither")

args = GRPOConfig(
    output_dir="grpo",
    bf16=True,
    use_cpu=True,
    report_to=[],
    max_steps=4,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    logging_steps=1,
    lr_scheduler_type="constant",
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=tiny.reward,
    args=args,
    train_dataset=tiny.prompts(),
    processing_class=tokenizer,
    optimizers=(opt, None),
)
FairCastCallback().attach(trainer)
trainer.train()
trainer.save_model("grpo/served")  # the bf16 policy, as the rollouts see it

last = [entry for entry in trainer.state.log_history if "fcoptim/tracked" in entry][-1]
print(f"tracked {last['fcoptim/tracked']:.2f}, changed {last['fcoptim/changed']:.2%} of the served weights")
