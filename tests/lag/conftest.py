"""Fixtures of the lag's tests."""

import pytest

from .helpers import LAGS


@pytest.fixture(params=LAGS)
def lag(request):
    """Each of the lags in turn, made anew."""
    return LAGS[request.param]()
