"""fp32 masters that an engine keeps for itself: the Exporter at the place where it casts for the rollout engine.

Each function stands for one kind of framework; a comment names the line that it replaces. The loop trains a small
model at a learning rate where round-to-nearest serves next to nothing. Run: python examples/exporter_loop.py.
"""

from collections.abc import Iterator

import torch
from torch import nn

from fcoptim import Exporter

Weights = dict[str, torch.Tensor]


def from_state_dict(export: Exporter, fp32_model: nn.Module) -> Weights:
    """torchtitan, prime-rl, verl, NeMo-RL, SkyRL with plain fp32 parameters: a state dict is cast and pushed."""
    # was: {name: value.to(torch.bfloat16) for name, value in fp32_model.state_dict().items()}
    return export(fp32_model.state_dict())


def streamed(export: Exporter, fp32_model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, one tensor at a time: with FSDP2 each is gathered when its turn comes."""
    for name, param in fp32_model.named_parameters():
        full = param.full_tensor() if hasattr(param, "full_tensor") else param.detach()
        # was: yield name, full.to(torch.bfloat16)
        yield name, export({name: full})[name]


def into_model(export: Exporter, masters: Weights, bf16_model: nn.Module) -> None:
    """Megatron (slime): DistributedOptimizer._copy_main_params_to_model_params, where it casts for training too.

    A rank's masters are flat slices. Name each by parameter and slice; every rank keeps its own Exporter state.
    """
    # was: model_param.view(-1)[start:end].copy_(main_param)
    export(masters, out={name: shard_of(bf16_model, name) for name in masters})


def shard_of(model: nn.Module, name: str) -> torch.Tensor:
    """The slice of a parameter that a name like "0.weight[0:128]" means."""
    parameter, bounds = name.rstrip("]").split("[")
    start, end = map(int, bounds.split(":"))
    return model.get_parameter(parameter).detach().view(-1)[start:end]


def train(steps: int, lr: float) -> tuple[nn.Module, Weights, list[Weights]]:
    """A run with fp32 masters and four copies of the weights for rollouts, each exported after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).bfloat16().float()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    exports = [Exporter("dither"), Exporter("stochastic"), Exporter("error_feedback"), Exporter("nearest")]
    policies: list[Weights] = [{}, {}, {}, {}]
    bf16_model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).bfloat16()
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        x = torch.randn(32, 64)
        (model(x) - x[:, :8].sign()).square().mean().backward()
        opt.step()
        opt.zero_grad()
        policies[0] = from_state_dict(exports[0], model)
        policies[1] = dict(streamed(exports[1], model))
        halves = {}
        for name, param in model.named_parameters():
            middle, count = param.numel() // 2, param.numel()
            for first, last in ((0, middle), (middle, count)):  # two ranks
                halves[f"{name}[{first}:{last}]"] = param.detach().view(-1)[first:last]
        into_model(exports[2], halves, bf16_model)
        policies[2] = bf16_model.state_dict()
        policies[3] = exports[3](model.state_dict())
    return model, start, policies


def tracked(model: nn.Module, start: Weights, policy: Weights) -> float:
    """The share of the masters' movement that a policy shows."""
    moved = {name: value - start[name] for name, value in model.state_dict().items()}
    product = sum(((policy[name].float() - start[name]) * d).sum() for name, d in moved.items())
    return float(product / sum(d.square().sum() for d in moved.values()))


if __name__ == "__main__":
    model, start, policies = train(steps=20, lr=2e-6)
    for rule, policy in zip(("dither", "stochastic", "error_feedback", "nearest"), policies):
        print(f"{rule:15} serves {tracked(model, start, policy):6.1%} of what was learned")
