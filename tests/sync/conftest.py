"""Fixtures of the sync tests."""

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """The tensors here are tiny; a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
