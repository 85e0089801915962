"""What a rank does in test_trainers.py: a trainer of its own library, under FSDP2 or DDP, on the CPU."""

import contextlib
import importlib
import os
from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fcoptim import unwrap

FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"], "state_dict_type": "SHARDED_STATE_DICT"}


@contextlib.contextmanager
def launched():
    """The environment that torchrun gives; transformers and accelerate read it, though the process group is there."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names |= {
        "ACCELERATE_USE_CPU": "true",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    os.environ.update(names)
    try:
        yield
    finally:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        for name in [*names, *(name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_")))]:
            os.environ.pop(name, None)


def on_cpu(mixin: type) -> type:
    """Accelerate chooses FSDP for accelerators alone; what it does then works on a CPU as well."""

    class OnCpu(mixin):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.choose_fsdp()

        def train(self, *args, **kwargs):
            self.choose_fsdp()  # again: TRL's GRPOTrainer makes accelerate look anew
            return super().train(*args, **kwargs)

        def choose_fsdp(self):
            from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

            if self.args.fsdp_plugin_args is not None:
                plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
                plugin.set_mixed_precision("bf16")
                state = self.accelerator.state
                state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
                self.is_fsdp_enabled = True

    return OnCpu


def whole(opt):
    """Masters and served weights, gathered."""
    full = lambda t: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()  # noqa: E731
    return {name: full(master) for name, master in opt.named_masters()}, {
        name: full(param).float() for name, param in opt.served_model.named_parameters()
    }


def train(kind: str, how: str, folder: str, steps: int, resume: str | None):
    """Train; return losses, masters, served weights, and what the parameters are."""
    from tests.integrations import tiny, trainers

    module = "transformers" if kind == "Trainer" else "trl"
    mixin = importlib.import_module(f"fcoptim.integrations.{module}").FairCastMixin
    with launched():
        settings = {"fsdp": True, "fsdp_config": FSDP} if how == "fsdp" else {}
        made = trainers.trainer(
            kind,
            Path(folder),
            tiny.model(),
            on_cpu(mixin),
            max_steps=steps,
            save_strategy="steps",
            save_steps=2,
            per_device_train_batch_size=2,
            bf16=how == "fsdp",
            ddp_backend="gloo",
            **settings,
        )
        made.train(resume_from_checkpoint=resume)
        opt = unwrap(made.optimizer)
        masters, served = whole(opt)
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        kinds = {type(param.data).__name__ + " " + str(param.dtype) for param in opt.served_model.parameters()}
    return losses, masters, served, kinds
