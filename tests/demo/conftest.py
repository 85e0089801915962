"""Fixtures of the demo's tests: a language model small enough to do by hand, with a real tokenizer."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;->()?'\"\nABCDEFGHIJKLMNOPQRSTUVWXYZ"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """One token for each character, built in memory."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(["<unk>", "<end>", *ALPHABET])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def tiny(tokenizer):
    """A function that makes a random Llama with 2 layers: ``tiny(dtype)``."""

    def make(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.4,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
        return transformers.LlamaForCausalLM(config).to(dtype).eval()

    return make
