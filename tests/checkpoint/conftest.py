"""Fixtures of the checkpoints' tests."""

from tests.optimizer.conftest import one_thread, rounding, storage  # noqa: F401
