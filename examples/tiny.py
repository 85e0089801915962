"""A tiny language model, a tokenizer trained in memory, and data, so that every example runs offline on a CPU."""

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_ALL = "zero one two three four five six seven eight nine plus minus is and or not the sum of a b c d e f g"
WORDS = _ALL.split()
VOCABULARY = 64


def tokenizer() -> PreTrainedTokenizerFast:
    """Words to numbers, trained on ``WORDS``."""
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<eos>"]
    made.train_from_iterator(
        [" ".join(WORDS)], trainers.WordLevelTrainer(vocab_size=VOCABULARY, special_tokens=special)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model(seed: int = 0, **options: Any) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with random fp32 weights, the same for the same seed; embeddings are tied."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=1,
        eos_token_id=2,
        **options,
    )
    return Qwen3ForCausalLM(config)


def sentences(count: int = 32) -> list[str]:
    """Sums in words."""
    return [f"{WORDS[i % 10]} plus {WORDS[(i * 7 + 3) % 10]} is {WORDS[(i * 8 + 3) % 10]}" for i in range(count)]


def texts(count: int = 32) -> Dataset:
    """Sentences under "text", as SFTTrainer takes them."""
    return Dataset.from_dict({"text": sentences(count)})


def prompts(count: int = 32) -> Dataset:
    """Openings of sentences under "prompt", as GRPOTrainer takes them."""
    return Dataset.from_dict({"prompt": [text[: text.index(" is ") + 3] for text in sentences(count)]})


def tokenized(count: int = 32) -> Dataset:
    """Token ids and labels of one length, as Trainer takes them."""
    encode = tokenizer()
    ids = [encode(text)["input_ids"] for text in sentences(count)]
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(i) for i in ids], "labels": ids})


def reward(completions: list[str], **_: Any) -> list[float]:
    """How many different letters a completion holds: it varies between completions, so GRPO has a gradient."""
    return [float(len(set(text))) for text in completions]
