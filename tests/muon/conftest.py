"""Fixtures of Muon's tests."""

import pytest


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request) -> str:
    """Each dtype of the iteration in turn."""
    return request.param


@pytest.fixture(params=["newton_schulz", "polar_express"])
def method(request) -> str:
    """Each named method in turn."""
    return request.param
