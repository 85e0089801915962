"""A pool of processes that the tests of this folder share: each job is a process group of its own, over gloo."""

import pytest

from .pool import Pool


@pytest.fixture(scope="package")
def ranks():
    """``ranks(world, function, *args)`` runs ``function(*args)`` on every rank and returns the results by rank."""
    pool = Pool(4)
    yield pool.run
    pool.close()
