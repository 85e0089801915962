"""Fixtures of the lag's tests."""

import pytest
import torch

from .helpers import LAGS, RULES


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """The models here are tiny; a second thread only waits, for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=RULES)
def rounding(request) -> str:
    """Each of the four rules in turn."""
    return request.param


@pytest.fixture(params=LAGS)
def lag(request):
    """Each of the lags in turn, made anew."""
    return LAGS[request.param]()


@pytest.fixture(params=["bfloat16", "float32"])
def storage(request) -> str:
    """Each of the two storages in turn."""
    return request.param
