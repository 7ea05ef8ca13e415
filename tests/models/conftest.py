"""Compilation in half the time, where a test compiles much and computes little."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation():
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
