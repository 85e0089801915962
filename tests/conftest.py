"""Fixtures of all tests."""

import pytest
import torch

from .optimizer.helpers import RULES


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Models here are tiny and tests run side by side; a second thread only waits, for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=RULES)
def rounding(request) -> str:
    """Each of the four rules in turn."""
    return request.param


@pytest.fixture(params=["bfloat16", "float32"])
def storage(request) -> str:
    """Each of the two storages in turn."""
    return request.param
