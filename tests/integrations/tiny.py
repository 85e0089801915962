"""The examples' tiny model, tokenizer and data, for the tests."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny import VOCABULARY, WORDS, model, prompts, reward, sentences, texts, tokenized, tokenizer  # noqa: E402

__all__ = [
    "EXAMPLES",
    "VOCABULARY",
    "WORDS",
    "model",
    "prompts",
    "reward",
    "sentences",
    "texts",
    "tokenized",
    "tokenizer",
]
