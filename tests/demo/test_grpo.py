"""Rollouts, advantages and the loss against plain versions of themselves."""

import math

import pytest
import torch

from fcoptim.demo import grpo

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
END = 1


def draw(model, *, group=4, length=6, seed=0, prompts=PROMPTS, temperature=1.0):
    generator = torch.Generator().manual_seed(seed)
    return grpo.sample(
        model,
        prompts,
        group=group,
        max_new_tokens=length,
        end=END,
        generator=generator,
        temperature=temperature,
    )


def plain_log_probs(model, prompt, completion, temperature=1.0):
    """One sequence, no padding, no cache."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float() / temperature
    chosen = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return chosen[torch.arange(len(completion)), torch.tensor(completion)]


class TestAdvantages:
    def test_by_hand(self):
        rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
        root = math.sqrt(3)
        expected = torch.tensor([[1.0, -1.0, -1.0, 1.0], [root, -1 / root, -1 / root, -1 / root]])
        torch.testing.assert_close(grpo.advantages(rewards), expected)

    @pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1.0])
    def test_equal_rewards_give_exactly_zero(self, value):
        assert torch.equal(grpo.advantages(torch.full((2, 7), value)), torch.zeros(2, 7))

    def test_a_tiny_difference_counts_fully(self):
        advantage = grpo.advantages(torch.tensor([[0.5, 0.5 + 1e-12]], dtype=torch.float64))
        torch.testing.assert_close(advantage, torch.tensor([[-1.0, 1.0]]), atol=1e-3, rtol=0)


class TestSample:
    def test_masks_end_with_the_first_end_token(self, tiny):
        rollout = draw(tiny(), group=16, length=40)
        assert rollout.completion.shape == rollout.completion_mask.shape
        assert rollout.completion.shape[:2] == (3, 16)
        ended = 0
        for tokens, mask in zip(rollout.completion.flatten(0, 1), rollout.completion_mask.flatten(0, 1)):
            length = int(mask.sum())
            assert mask[:length].all() and length >= 1
            assert (tokens[: length - 1] != END).all()
            assert (tokens[length:] == END).all()
            if length < len(tokens):
                assert tokens[length - 1] == END
                ended += 1
        assert ended > 0

    def test_same_seed_same_tokens_and_no_global_randomness(self, tiny):
        model = tiny()
        state = torch.get_rng_state()
        first, second, other = draw(model), draw(model), draw(model, seed=1)
        assert torch.equal(first.completion, second.completion)
        assert not torch.equal(first.completion, other.completion)
        assert torch.equal(state, torch.get_rng_state())

    @pytest.mark.parametrize("temperature", [1.0, 2.0])
    def test_tokens_come_with_the_models_probabilities(self, tiny, temperature):
        """The second token's distribution, given the first, from prompts of different lengths: within 5 sigma."""
        model, count = tiny(torch.float32), 4000
        rollout = draw(model, group=count, length=2, prompts=PROMPTS[:2], temperature=temperature)
        for row, prompt in enumerate(PROMPTS[:2]):
            first, counts = rollout.completion[row, :, 0].unique(return_counts=True)
            common = int(first[counts.argmax()])
            follows = rollout.completion[row, rollout.completion[row, :, 0] == common, 1]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, common]])).logits[0, -1]
            chance = (logits.double() / temperature).softmax(-1)
            seen = torch.bincount(follows, minlength=len(chance)).double()
            sigma = (len(follows) * chance * (1 - chance)).sqrt()
            big = len(follows) * chance > 20
            assert big.sum() >= 3
            assert ((seen - len(follows) * chance).abs()[big] < 5 * sigma[big]).all()

    def test_empty_prompt_is_refused(self, tiny):
        with pytest.raises(ValueError, match=r"lengths \[2, 0\]"):
            draw(tiny(), prompts=[[3, 4], []])


class TestLogProbs:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_equal_one_sequence_at_a_time(self, tiny, temperature):
        model = tiny(torch.float32)
        rollout = draw(model, length=7)
        found = grpo.log_probs(model, rollout, temperature)
        for row, prompt in enumerate(PROMPTS):
            for member in range(4):
                length = int(rollout.completion_mask[row, member].sum())
                tokens = rollout.completion[row, member, :length].tolist()
                expected = plain_log_probs(model, prompt, tokens, temperature)
                torch.testing.assert_close(found[row, member, :length], expected, atol=2e-5, rtol=1e-5)

    def test_one_token_completions(self, tiny):
        model = tiny(torch.float32)
        rollout = draw(model, length=1)
        found = grpo.log_probs(model, rollout)
        expected = plain_log_probs(model, PROMPTS[1], rollout.completion[1, 2].tolist())
        torch.testing.assert_close(found[1, 2], expected, atol=2e-5, rtol=1e-5)


class TestPolicyGradient:
    ADVANTAGE = torch.tensor([[1.0, -1.0, 0.5, -0.5], [0.0] * 4, [-1.0, 1.0, 1.0, -1.0]])

    def expected(self, model, rollout):
        loss = torch.zeros(())
        for row, prompt in enumerate(PROMPTS):
            for member in range(4):
                length = int(rollout.completion_mask[row, member].sum())
                tokens = rollout.completion[row, member, :length].tolist()
                loss = loss - self.ADVANTAGE[row, member] * plain_log_probs(model, prompt, tokens).sum()
        loss = loss / rollout.completion_mask.sum()
        return float(loss.detach()), torch.autograd.grad(loss, list(model.parameters()))

    @pytest.mark.parametrize("max_tokens", [1, 40, 4096])
    def test_equals_the_plain_loss_however_it_is_split(self, tiny, max_tokens):
        model = tiny(torch.float32)
        rollout = draw(model)
        loss, gradients = self.expected(model, rollout)
        found = grpo.policy_gradient(model, rollout, self.ADVANTAGE, max_tokens=max_tokens)
        assert found == pytest.approx(loss, rel=1e-4, abs=1e-6)
        for parameter, gradient in zip(model.parameters(), gradients):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-3)

    def test_no_signal_gives_gradients_of_exactly_zero(self, tiny):
        model = tiny()
        assert grpo.policy_gradient(model, draw(model), torch.zeros(3, 4)) == 0.0
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())

    def test_a_step_makes_good_completions_likelier(self, tiny):
        model = tiny(torch.float32)
        rollout = draw(model, group=8)
        advantage = torch.ones(3, 8)
        advantage[:, 4:] = -1
        mask = rollout.completion_mask

        def gap() -> float:
            with torch.no_grad():
                total = (grpo.log_probs(model, rollout) * mask).sum(-1)
            return float((total * advantage).sum())

        before = gap()
        grpo.policy_gradient(model, rollout, advantage)
        torch.optim.SGD(model.parameters(), lr=1e-2).step()
        assert gap() > before
