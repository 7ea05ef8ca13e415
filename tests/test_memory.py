"""Memory kinds of what is allocated, and the limit of CUDA's pinned host pool."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax import memory


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.uint32])
@pytest.mark.parametrize("first", [1, 3, 5])
def test_rows_are_written_in_place_in_pinned_host_memory(dtype, first):
  rows = np.arange(30, dtype=dtype).reshape(5, 2, 3)
  bank = memory.first_rows(rows[:first], 5)
  for start in range(first, 5, 2):
    before = bank
    bank = memory.write_rows(before, rows[start : start + 2], np.int32(start))
    assert before.is_deleted()
  assert bank.sharding.memory_kind == "pinned_host"
  assert jax.typeof(bank).memory_space == jax.memory.Space.Host
  np.testing.assert_array_equal(bank, rows)


@pytest.mark.parametrize("num_rows", [4, 8])
def test_a_bank_does_not_share_memory_with_the_rows_it_was_made_of(num_rows):
  rows = np.ones((4, 8, 16), np.uint32)
  bank = memory.first_rows(rows, num_rows).block_until_ready()
  bank = memory.write_rows(bank, rows, np.int32(num_rows - 4)).block_until_ready()
  rows[:] = 7
  np.testing.assert_array_equal(bank, np.ones((num_rows, 8, 16), np.uint32))


def test_writing_needs_no_second_bank():
  """Temporary bytes of a write follow the rows written, not the bank."""
  mesh = jax.sharding.Mesh(np.array([memory.default_device()]), ("x",))
  on_host = jax.NamedSharding(mesh, jax.P(), memory_kind="pinned_host")
  temps = []
  for bank_rows in (64, 1024):
    bank = jax.ShapeDtypeStruct((bank_rows, 64, 64), np.uint32, sharding=on_host)
    rows = jax.ShapeDtypeStruct((4, 64, 64), np.uint32)
    start = jax.ShapeDtypeStruct((), np.int32)
    analysis = memory.write_rows.lower(bank, rows, start).compile().memory_analysis()
    temps.append(analysis.temp_size_in_bytes)
  assert temps[0] == temps[1] <= 4 * 64 * 64 * 4


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_placement(kind):
  x = jax.device_put(np.ones(3, np.float32), memory.placement(kind))
  assert x.sharding.memory_kind == kind
  assert x.devices() == {memory.default_device()}


def test_num_bytes():
  assert memory.num_bytes((3, 4), jnp.bfloat16) == 24
  assert memory.num_bytes((), np.float32) == 4


@pytest.mark.parametrize(
  ("setting", "needed_gb", "words"),
  [
    (None, 64.5, r"needs 64\.5 GB .* capped at 64 GB.*XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=68"),
    ("100", 100.5, r"capped at 100 GB.*XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=106"),
    ("lots", 1, "got 'lots', expected a number of GB"),
  ],
)
def test_a_bank_beyond_the_cuda_pool_is_refused(monkeypatch, setting, needed_gb, words):
  monkeypatch.delenv(memory.CUDA_HOST_LIMIT_VARIABLE, raising=False)
  if setting is not None:
    monkeypatch.setenv(memory.CUDA_HOST_LIMIT_VARIABLE, setting)
  with pytest.raises(ValueError, match=words):
    memory.check_host_limit(int(needed_gb * 1e9), "gpu")


def test_a_bank_within_the_pool_or_on_another_backend_is_accepted(monkeypatch):
  monkeypatch.setenv(memory.CUDA_HOST_LIMIT_VARIABLE, "700")
  memory.check_host_limit(int(699e9), "gpu")
  memory.check_host_limit(int(9999e9), "cpu")
  memory.check_host_limit(int(9999e9), "tpu")


_FREES_BLOCKS = """
import os
import numpy as np
from moecore_jax import memory

def resident_bytes():
  with open("/proc/self/statm") as f:
    return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

with memory.returning_freed_blocks():
  blocks = [np.ones(4 << 20, np.uint8) for _ in range(16)]
  held = resident_bytes()
  del blocks
  print(held - resident_bytes())
assert np.ones(4 << 20, np.uint8).all()
"""


def test_freed_blocks_are_returned():
  """Within the context a freed block leaves the process; afterwards memory works as before.

  In a process of its own: other tests' free memory would serve the blocks.
  """
  done = subprocess.run(
    [sys.executable, "-c", _FREES_BLOCKS], capture_output=True, text=True, check=True
  )
  assert int(done.stdout) >= 60 << 20
