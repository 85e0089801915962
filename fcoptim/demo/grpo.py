"""Group-relative policy optimisation without a reference model: rollouts, advantages, loss.

For each prompt the policy samples a group of completions. A completion's advantage is its reward, less the
group's mean, over the group's standard deviation (Shao et al., "DeepSeekMath", 2024, section 4.1); the loss is
the policy gradient on the completion's tokens, averaged over all tokens of the step. Each batch is used for
one update, so the importance ratio is 1 and nothing is clipped.

Prompts are run once per group, not once per completion: their keys and values are computed by one forward
and repeated, in the rollout and, with gradients, in the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass
class Rollout:
    """Sampled completions.

    Attributes:
        prompt: Token ids, int64 of shape ``(prompts, longest prompt)``, padded on the left.
        prompt_mask: bool of the same shape; False on padding.
        completion: Token ids, int64 of shape ``(prompts, group, longest completion)``, padded on the right.
        completion_mask: bool of the same shape; True up to and including the end-of-turn token.
    """

    prompt: torch.Tensor
    prompt_mask: torch.Tensor
    completion: torch.Tensor
    completion_mask: torch.Tensor

    def take(self, rows: Sequence[int]) -> Rollout:
        """Return the rollout of some prompts only."""
        index = torch.as_tensor(list(rows), device=self.prompt.device)
        return Rollout(*(t[index] for t in (self.prompt, self.prompt_mask, self.completion, self.completion_mask)))


def pad_left(prompts: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack token lists into ids and a mask, both of shape ``(prompts, longest)``."""
    if not prompts or min(len(p) for p in prompts) == 0:
        raise ValueError(f"every prompt needs a token; got lengths {[len(p) for p in prompts]}")
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros((len(prompts), width), dtype=torch.bool)
    for row, tokens in enumerate(prompts):
        ids[row, width - len(tokens) :] = torch.tensor(list(tokens))
        mask[row, width - len(tokens) :] = True
    return ids, mask


def _cache_name(model: Any) -> str:
    """How this model's forward calls its key-value cache: transformers renamed it in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _run_prompts(model: Any, ids: torch.Tensor, mask: torch.Tensor, group: int) -> tuple[torch.Tensor, Any]:
    """Run prompts once; return the logits of the first completion token and a cache, both repeated ``group`` times."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=True, logits_to_keep=1)
    cache = getattr(out, _cache_name(model))
    cache.batch_repeat_interleave(group)
    return out.logits[:, -1].repeat_interleave(group, 0), cache


def _run_on(model: Any, tokens: torch.Tensor, attention: torch.Tensor, position: torch.Tensor, cache: Any) -> Any:
    """Run further tokens behind a cache, which grows; return their logits."""
    kwargs = {_cache_name(model): cache}
    return model(input_ids=tokens, attention_mask=attention, position_ids=position, **kwargs).logits


@torch.no_grad()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    group: int,
    max_new_tokens: int,
    end: int,
    generator: torch.Generator,
    temperature: float = 1.0,
) -> Rollout:
    """Sample a group of completions for each prompt.

    Args:
        model: A causal language model with the interface of ``transformers``, in eval mode.
        prompts: Token ids of each prompt.
        group: Completions for each prompt.
        max_new_tokens: Where a completion is cut off.
        end: Id of the end-of-turn token; also used for padding.
        generator: Source of all randomness, on the model's device; torch's global one is not touched.
        temperature: Divides the logits. Default 1.0.
    """
    ids, mask = (tensor.to(model.device) for tensor in pad_left(prompts, end))
    logits, cache = _run_prompts(model, ids, mask, group)
    attention = mask.repeat_interleave(group, 0).long()
    position = attention.sum(1, keepdim=True)
    running = torch.ones(len(attention), dtype=torch.bool, device=ids.device)
    tokens, masks = [], []
    for step in range(max_new_tokens):
        chances = torch.softmax(logits.float() / temperature, -1)
        token = torch.multinomial(chances, 1, generator=generator)[:, 0]
        token = torch.where(running, token, end)
        tokens.append(token)
        masks.append(running)
        running = running & (token != end)
        if step + 1 == max_new_tokens or not bool(running.any()):
            break
        attention = F.pad(attention, (0, 1), value=1)
        logits = _run_on(model, token[:, None], attention, position, cache)[:, -1]
        position = position + 1
    shape = (len(prompts), group, len(tokens))
    return Rollout(ids, mask, torch.stack(tokens, 1).view(shape), torch.stack(masks, 1).view(shape))


def completion_logits(model: Any, rollout: Rollout) -> torch.Tensor:
    """Return the logits that each completion token is drawn from, with gradients.

    Args:
        model: As in ``sample``.
        rollout: What was sampled.

    Returns:
        The model's dtype, of shape ``(prompts * group, longest completion, vocabulary)``.
    """
    prompts, group, length = rollout.completion.shape
    first, cache = _run_prompts(model, rollout.prompt, rollout.prompt_mask, group)
    logits = first[:, None]
    if length > 1:
        tokens = rollout.completion.reshape(prompts * group, length)
        mask = rollout.prompt_mask.repeat_interleave(group, 0).long()
        position = mask.sum(1, keepdim=True) + torch.arange(length - 1, device=mask.device)
        attention = F.pad(mask, (0, length - 1), value=1)
        logits = torch.cat([logits, _run_on(model, tokens[:, :-1], attention, position, cache)], 1)
    return logits


def log_probs(model: Any, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """Return the log probability of each completion token, with gradients.

    Args:
        model: As in ``sample``.
        rollout: What was sampled.
        temperature: As in ``sample``, so that these are the probabilities the tokens were drawn with.

    Returns:
        fp32 of shape ``(prompts, group, longest completion)``; meaningless where the mask is False.
    """
    logits = completion_logits(model, rollout).flatten(0, 1).float() / temperature
    flat = F.cross_entropy(logits, rollout.completion.flatten(), reduction="none")
    return -flat.view(rollout.completion.shape)


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Normalise rewards within their groups.

    Args:
        rewards: Shape ``(prompts, group)``.

    Returns:
        fp32 of the same shape: ``(reward - mean) / standard deviation`` of the group. Exactly 0 for a group of
        equal rewards, which says nothing about what to prefer.
    """
    wide = rewards.double()
    flat = (wide == wide[:, :1]).all(1, keepdim=True)
    spread = wide.std(1, correction=0, keepdim=True)
    scaled = (wide - wide.mean(1, keepdim=True)) / torch.where(flat, torch.ones_like(spread), spread)
    return torch.where(flat, torch.zeros_like(scaled), scaled).float()


def policy_gradient(
    model: Any, rollout: Rollout, advantage: torch.Tensor, *, temperature: float = 1.0, max_tokens: int = 4096
) -> float:
    """Add the gradient of the loss to the model's parameters, group by group.

    The loss is ``-sum(advantage * log p) / tokens`` over all completion tokens of the rollout. A group without
    advantages adds nothing and is not run. A parameter that nothing reached gets a gradient of zeros, which is
    what the gradient of a step without signal is.

    Args:
        model: As in ``sample``.
        rollout: What was sampled.
        advantage: fp32 of shape ``(prompts, group)``.
        temperature: As in ``sample``.
        max_tokens: Tokens, padding included, that are run at once (never less than one group). Default 4096.

    Returns:
        The loss.
    """
    total = int(rollout.completion_mask.sum())
    rows = [row for row in range(len(advantage)) if bool(advantage[row].any())]
    group_tokens = rollout.prompt.shape[1] + rollout.completion[0].numel()
    at_once = max(1, max_tokens // group_tokens)
    loss = 0.0
    for first in range(0, len(rows), at_once):
        chosen = rows[first : first + at_once]
        part = rollout.take(chosen)
        weight = advantage[chosen][..., None] * part.completion_mask / total
        part_loss = -(weight * log_probs(model, part, temperature)).sum()
        part_loss.backward()  # type: ignore[no-untyped-call]
        loss += float(part_loss.detach())
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return loss
