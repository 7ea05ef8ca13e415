"""Symmetric integer weights of 4 or 8 bits with a float32 scale for each column and group of rows,
in uint32 words.

A word holds p = 32 / bits values. A stored array has, from top to bottom, the rows of the weight,
the scales of each group of rows, and the bias if there is one: [rows + p (groups + biases),
columns / p]. A row of float32 numbers takes p rows of words, in order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Parts(NamedTuple):
  """What a stored array holds.

  Attributes:
    values: int8 [..., rows, columns], without the lowest one that the bits allow.
    scales: float32 [..., groups, columns].
    bias: float32 [..., 0 or 1, columns].
  """

  values: jax.Array
  scales: jax.Array
  bias: jax.Array


def pack(kernel: np.ndarray, bias: np.ndarray, bits: int, group_rows: int) -> np.ndarray:
  """Quantises and packs host weights.

  Args:
    kernel: float32 [..., rows, columns].
    bias: float32 [..., 0 or 1, columns].
    bits: 4 or 8.
    group_rows: consecutive rows that share a scale.

  Returns:
    uint32 [..., stored rows, columns / p].
  """
  *lead, rows, columns = kernel.shape
  per_word, largest = 32 // bits, np.float32(2 ** (bits - 1) - 1)
  grouped = kernel.reshape((*lead, rows // group_rows, group_rows, columns))
  scales = np.abs(grouped).max(axis=-2) / largest
  steps = np.where(scales > 0, scales, np.float32(1))[..., None, :]
  values = np.rint(grouped / steps).astype(np.int8).reshape(kernel.shape)
  planes = np.split(values.view(np.uint8) & np.uint8(2**bits - 1), per_word, axis=-1)
  words = np.zeros((*lead, rows, columns // per_word), np.uint32)
  for place, plane in enumerate(planes):
    words |= plane.astype(np.uint32) << np.uint32(bits * place)
  floats = np.concatenate([scales, bias], axis=-2)
  below = np.ascontiguousarray(floats).view(np.uint32)
  return np.concatenate([words, below.reshape((*lead, -1, words.shape[-1]))], axis=-2)


def unpack(stored: jax.Array, bits: int, rows: int, group_rows: int) -> Parts:
  """Unpacks stored weights inside a program.

  Args:
    stored: uint32 [..., stored rows, columns / p], device memory.
    bits: 4 or 8.
    rows: of the weight.
    group_rows: rows that share a scale.
  """
  words, below = jnp.split(stored, [rows], axis=-2)
  planes = [
    # The highest bit is the sign.
    lax.bitcast_convert_type(words << jnp.uint32(32 - bits * (place + 1)), jnp.int32) >> (32 - bits)
    for place in range(32 // bits)
  ]
  values = jnp.concatenate(planes, axis=-1).astype(jnp.int8)
  floats = lax.bitcast_convert_type(below, jnp.float32)
  floats = floats.reshape((*stored.shape[:-2], -1, values.shape[-1]))
  return Parts(values, *jnp.split(floats, [rows // group_rows], axis=-2))


def dequantize(stored: jax.Array, bits: int, rows: int, group_rows: int) -> jax.Array:
  """Returns the values that stored weights stand for, float32 [..., rows (+ 1), columns]."""
  values, scales, bias = unpack(stored, bits, rows, group_rows)
  grouped = values.reshape((*scales.shape[:-1], -1, scales.shape[-1])).astype(jnp.float32)
  kernel = (grouped * scales[..., None, :]).reshape(values.shape)
  return jnp.concatenate([kernel, bias], axis=-2)


def dequantize_host(stored: np.ndarray, bits: int, rows: int, group_rows: int) -> np.ndarray:
  """The same in NumPy."""
  *lead, _, width = stored.shape
  words, below = np.split(stored, [rows], axis=-2)
  planes = [
    (words << np.uint32(32 - bits * (place + 1))).view(np.int32) >> (32 - bits)
    for place in range(32 // bits)
  ]
  columns = width * (32 // bits)
  floats = np.ascontiguousarray(below).view(np.float32).reshape((*lead, -1, columns))
  scales, bias = np.split(floats, [rows // group_rows], axis=-2)
  values = np.concatenate(planes, axis=-1).astype(np.float32)
  grouped = values.reshape((*scales.shape[:-1], -1, columns)) * scales[..., None, :]
  return np.concatenate([grouped.reshape(values.shape), bias], axis=-2)
