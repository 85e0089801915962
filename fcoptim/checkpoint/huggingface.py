"""The small files of a Hugging Face model folder: configuration, generation settings, tokenizer."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def model_files(model: nn.Module | None, tokenizer: Any, dtype: str) -> dict[str, bytes]:
    """Collect the small files that belong beside a model's weights.

    Args:
        model: A transformers model, any other, or None.
        tokenizer: What has ``save_pretrained`` (a tokenizer or processor), or None: then the tokenizer files are taken
            from the local folder that the model was loaded from, if it has any.
        dtype: What the configuration is to say of the weights.

    Returns:
        Contents by file name; empty for a model without a configuration.
    """
    files: dict[str, bytes] = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        files.update(_saved_by(_with_dtype(config, model, dtype).save_pretrained))
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            files.update(_saved_by(generation.save_pretrained))
    if tokenizer is not None:
        files.update(_saved_by(tokenizer.save_pretrained))
    elif files:
        files.update(_beside(getattr(config, "_name_or_path", "")))
    return files


def _with_dtype(config: Any, model: Any, dtype: str) -> Any:
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
    return config


def _saved_by(save: Callable[[str], Any]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def _beside(origin: Any) -> dict[str, bytes]:
    """Tokenizer files in the folder that a model came from."""
    if not isinstance(origin, str) or not origin or not Path(origin).is_dir():
        return {}
    return {name: (Path(origin) / name).read_bytes() for name in TOKENIZER_FILES if (Path(origin) / name).is_file()}
