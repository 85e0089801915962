"""SFTTrainer that loads its model by name: a mixin wraps the optimizer. Figures go to TensorBoard.

Run: python examples/trainer_sft.py, then tensorboard --logdir sft.
"""

import os

import tiny
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from fcoptim.integrations.trl import FairCastMixin

tiny.model().save_pretrained("sft/model")  # in earnest: the name of a model
tiny.tokenizer().save_pretrained("sft/model")
os.environ["TENSORBOARD_LOGGING_DIR"] = "sft/runs"


class FairSFTTrainer(FairCastMixin, SFTTrainer):
    """SFTTrainer, its optimizer wrapped."""


args = SFTConfig(
    output_dir="sft",
    bf16=True,
    use_cpu=True,
    report_to=["tensorboard"],
    max_steps=4,
    per_device_train_batch_size=4,
    learning_rate=1e-4,
    logging_steps=1,
)

# Without peft_config everything is trained; with it only the adapters have masters.
for peft_config in (None, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")):
    trainer = FairSFTTrainer(
        "sft/model", args, train_dataset=tiny.texts(), peft_config=peft_config, fair_cast={"seed": 1}
    )
    trainer.train()
    entry = next(entry for entry in reversed(trainer.state.log_history) if "fcoptim/tracked" in entry)
    print(f"{entry['fcoptim/elements']:,} weights with masters, tracked {entry['fcoptim/tracked']:.2f}")
