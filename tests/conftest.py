"""Strictness for every test: four host devices, no silent dtype or rank promotion; and programs are
dropped before they are too many."""

import gc
import os
import pathlib

_FLAG = "--xla_force_host_platform_device_count=4"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

import jax  # noqa: E402  the flags above must be set first
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

_MAX_MAPPINGS = 16_000
"""The kernel allows 65,530 memory mappings a process by default; a compiled CPU program takes about
a thousand, and XLA crashes when they run out."""


@pytest.fixture(autouse=True)
def _few_programs():
  yield
  mappings = pathlib.Path("/proc/self/maps")
  if mappings.exists() and mappings.read_bytes().count(b"\n") > _MAX_MAPPINGS:
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def quick_compilation():
  """Compiles in half the time, for modules that compile much and compute little; not for those that
  look at what the compiler made."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
