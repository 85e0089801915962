import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # they import each other, as scripts of one folder do


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """An untrained transformer for the addition task, on the bf16 grid, with its tokenizer."""
    import small

    folder = tmp_path_factory.mktemp("base")
    small.transformer("addition", seed=0, width=24, layers=1).bfloat16().save_pretrained(folder)
    small.tokenizer("addition").save_pretrained(folder)
    return str(folder)
