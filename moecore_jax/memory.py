"""Memory kinds, placements in them, and their limits.

Two kinds of memory matter: the device's own, and host memory that the device reads directly
("pinned_host"). An array's kind is part of its type: operations never mix kinds, and data crosses
only by `jax.device_put` inside a program.
"""

import contextlib
import ctypes
import functools
import math
import os
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

MemoryKind = Literal["device", "pinned_host"]

CUDA_HOST_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
CUDA_HOST_LIMIT_DEFAULT_GB = 64

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # names of malloc.h


def placement(kind: MemoryKind, device: jax.Device | None = None) -> SingleDeviceSharding:
  """Returns the sharding of arrays in one kind of memory of a device (None: the default one)."""
  return SingleDeviceSharding(device or default_device(), memory_kind=kind)


def default_device() -> jax.Device:
  """Returns the device on which programs run when nothing else is asked for."""
  configured = jax.config.jax_default_device  # pyrefly: ignore[missing-attribute]
  return configured or jax.local_devices()[0]


def num_bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
  """Returns the bytes of an array."""
  return math.prod(shape) * np.dtype(dtype).itemsize


@functools.partial(jax.jit, static_argnums=1)
def first_rows(rows: jax.Array, num_rows: int) -> jax.Array:
  """Allocates an array in pinned host memory and writes its first rows.

  Both are in one program because XLA allocates host memory only for what it is written into: zeros
  alone would be made on the device and copied. The placement is made inside the program, because
  what `jit(out_shardings=...)` returns has a type that says device memory.

  Args:
    rows: [n, ...], on the host or on the device.
    num_rows: static, R >= n.

  Returns:
    [R, ...] in pinned host memory; undefined from row n on, until `write_rows` writes it.
  """
  whole = jnp.zeros((num_rows, *rows.shape[1:]), rows.dtype)
  whole = jax.device_put(whole, jax.memory.Space.Host)
  rows = jax.device_put(rows, jax.memory.Space.Host)
  return lax.dynamic_update_slice_in_dim(whole, rows, 0, axis=0)


@functools.partial(jax.jit, donate_argnums=0)
def write_rows(bank: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
  """Overwrites rows of an array in pinned host memory, in place.

  Args:
    bank: [R, ...] in pinned host memory; donated.
    rows: [n, ...] of the same dtype, on the host or on the device.
    start: int32 scalar, the first row to write; start + n <= R.

  Returns:
    bank with rows start .. start + n - 1 replaced, in pinned host memory.
  """
  rows = jax.device_put(rows, jax.memory.Space.Host)
  return lax.dynamic_update_slice_in_dim(bank, rows, start, axis=0)


@contextlib.contextmanager
def returning_freed_blocks() -> Iterator[None]:
  """Lets freed blocks of 4 MB and more go back to the system at once, within the context.

  glibc keeps blocks of up to 32 MB for reuse, in an arena of each thread: several chunks of a bank
  that is streamed by a pool of threads. Smaller blocks are kept: to get their pages anew for each
  tensor that is read takes longer than to read it. Another C library is left as it is. Afterwards
  blocks are kept again, for programs that allocate the same temporaries at every step.
  """
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is None:
    yield
    return
  mallopt(_M_MMAP_THRESHOLD, 4 << 20)
  mallopt(_M_TRIM_THRESHOLD, 64 << 20)
  try:
    yield
  finally:
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def check_host_limit(needed_bytes: int, backend: str | None = None) -> None:
  """Checks that pinned host memory of this backend can hold an allocation.

  On CUDA it is a pool whose cap is set by an environment variable before the process starts.

  Args:
    needed_bytes: bytes of everything that will be put there.
    backend: name of the platform; None: the default one.

  Raises:
    ValueError: the pool is too small; names the variable and the value it needs.
  """
  if (backend or jax.default_backend()) not in ("gpu", "cuda"):
    return
  text = os.environ.get(CUDA_HOST_LIMIT_VARIABLE, str(CUDA_HOST_LIMIT_DEFAULT_GB))
  try:
    limit_gb = float(text)
  except ValueError:
    raise ValueError(
      f"environment variable {CUDA_HOST_LIMIT_VARIABLE}: got {text!r}, expected a number of GB"
    ) from None
  if needed_bytes > limit_gb * 1e9:
    raise ValueError(
      f"the expert bank needs {needed_bytes / 1e9:.1f} GB of pinned host memory, CUDA's pool is "
      f"capped at {limit_gb:g} GB; before starting, set "
      f"{CUDA_HOST_LIMIT_VARIABLE}={math.ceil(needed_bytes * 1.05 / 1e9)}"
    )
