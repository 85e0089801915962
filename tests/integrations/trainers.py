"""Build, run and compare the three trainers, each on the tiny model."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from fcoptim import FairCastOptimizer, unwrap

from . import tiny

KINDS = ("Trainer", "SFTTrainer", "GRPOTrainer")
COMMON = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "gradient_checkpointing": False,
    "learning_rate": 1e-3,
}
CLASSES = {
    "Trainer": (Trainer, TrainingArguments, {}),
    "SFTTrainer": (SFTTrainer, SFTConfig, {"max_length": 32}),
    "GRPOTrainer": (GRPOTrainer, GRPOConfig, {"num_generations": 4, "max_completion_length": 6}),
}


def trainer(kind: str, folder: Path, model: Any, mixin: type | None = None, **options: Any) -> Any:
    """One of the three, on data of its own kind.

    Args:
        kind: Its class's name.
        folder: Where it writes.
        model: A model, or a name.
        mixin: A class to mix in, or None.
        **options: For the trainer if it takes them, else for its arguments.
    """
    cls, config, extra = CLASSES[kind]
    known = ("optimizers", "callbacks", "peft_config", "fair_cast", "eval_dataset", "optimizer_cls_and_kwargs")
    own = {key: options.pop(key) for key in known if key in options}
    args = config(output_dir=str(folder), **{**COMMON, **extra, "max_steps": 3, "save_strategy": "no", **options})
    if kind == "GRPOTrainer":
        own |= {"reward_funcs": tiny.reward, "train_dataset": tiny.prompts()}
    else:
        own["train_dataset"] = tiny.texts() if kind == "SFTTrainer" else tiny.tokenized()
    if mixin is not None:
        cls = type(f"Fair{kind}", (mixin, cls), {})
    return cls(model=model, args=args, processing_class=tiny.tokenizer(), **own)


def pair(
    storage: str = "bfloat16", rounding: str = "stochastic", **options: Any
) -> tuple[nn.Module, FairCastOptimizer]:
    """The tiny model under FairCastOptimizer."""
    model = tiny.model()
    return model, FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3, rounding=rounding, storage=storage, **options)


def snapshot(opt: Any) -> dict[str, torch.Tensor]:
    """Copies of masters, moments and served weights."""
    opt = unwrap(opt)
    copies = {f"master of {name}": master.clone() for name, master in opt.named_masters()}
    copies |= {f"served {name}": value.clone() for name, value in opt.served_state_dict().items()}
    for group in opt.param_groups:
        for name, param in zip(group["param_names"], group["params"]):
            copies |= {f"{k} of {name}": v.clone() for k, v in opt.state[param].items() if isinstance(v, torch.Tensor)}
    return copies


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        other = b[name]
        assert value.dtype == other.dtype, f"{name}: {value.dtype} against {other.dtype}"
        assert torch.equal(value, other), f"{name} differs by at most {(value.double() - other.double()).abs().max()}"


def lies_on_grid(tensor: torch.Tensor) -> bool:
    """Whether every value of a tensor is a bfloat16 value."""
    return torch.equal(tensor.float(), tensor.to(torch.bfloat16).float())
