"""Symmetric int4 weights with a float32 scale for each column and group of rows, in uint32 words.

A stored array has, from top to bottom, the rows of the weight, the scales of each group of rows,
and the bias if there is one: [rows + 8 (groups + biases), columns / 8]. A row of float32 numbers
takes 8 rows of words, in order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

VALUES_PER_WORD = 8
ROWS_OF_FLOATS = 8
"""Rows of words that a row of float32 numbers takes."""
_LARGEST = 7  # of -7..7


class Parts(NamedTuple):
  """What a stored array holds.

  Attributes:
    values: int8 [..., rows, columns], -7..7.
    scales: float32 [..., groups, columns].
    bias: float32 [..., 0 or 1, columns].
  """

  values: jax.Array
  scales: jax.Array
  bias: jax.Array


def pack(kernel: np.ndarray, bias: np.ndarray, group_rows: int) -> np.ndarray:
  """Quantises and packs host weights.

  Args:
    kernel: float32 [..., rows, columns].
    bias: float32 [..., 0 or 1, columns].
    group_rows: consecutive rows that share a scale.

  Returns:
    uint32 [..., stored rows, columns / 8].
  """
  *lead, rows, columns = kernel.shape
  grouped = kernel.reshape((*lead, rows // group_rows, group_rows, columns))
  scales = np.abs(grouped).max(axis=-2) / np.float32(_LARGEST)
  steps = np.where(scales > 0, scales, np.float32(1))[..., None, :]
  values = np.rint(grouped / steps).astype(np.int8).reshape(kernel.shape)
  planes = np.split(values.view(np.uint8) & np.uint8(15), VALUES_PER_WORD, axis=-1)
  words = np.zeros((*lead, rows, columns // VALUES_PER_WORD), np.uint32)
  for place, plane in enumerate(planes):
    words |= plane.astype(np.uint32) << np.uint32(4 * place)
  floats = np.concatenate([scales, bias], axis=-2)
  below = np.ascontiguousarray(floats).view(np.uint32)
  return np.concatenate([words, below.reshape((*lead, -1, words.shape[-1]))], axis=-2)


def unpack(stored: jax.Array, rows: int, group_rows: int) -> Parts:
  """Unpacks stored weights inside a program.

  Args:
    stored: uint32 [..., stored rows, columns / 8], device memory.
    rows: of the weight.
    group_rows: rows that share a scale.
  """
  words, below = jnp.split(stored, [rows], axis=-2)
  planes = [
    # The highest of 4 bits is the sign.
    lax.bitcast_convert_type(words << jnp.uint32(28 - 4 * place), jnp.int32) >> 28
    for place in range(VALUES_PER_WORD)
  ]
  values = jnp.concatenate(planes, axis=-1).astype(jnp.int8)
  columns = values.shape[-1]
  floats = lax.bitcast_convert_type(below, jnp.float32)
  floats = floats.reshape((*stored.shape[:-2], -1, columns))
  return Parts(values, *jnp.split(floats, [rows // group_rows], axis=-2))


def dequantize(stored: jax.Array, rows: int, group_rows: int) -> jax.Array:
  """Returns the values that stored weights stand for, float32 [..., rows (+ 1), columns]."""
  values, scales, bias = unpack(stored, rows, group_rows)
  grouped = values.reshape((*scales.shape[:-1], -1, scales.shape[-1])).astype(jnp.float32)
  kernel = (grouped * scales[..., None, :]).reshape(values.shape)
  return jnp.concatenate([kernel, bias], axis=-2)


def dequantize_host(stored: np.ndarray, rows: int, group_rows: int) -> np.ndarray:
  """The same in NumPy."""
  *lead, _, width = stored.shape
  words, below = np.split(stored, [rows], axis=-2)
  planes = [
    (words << np.uint32(28 - 4 * place)).view(np.int32) >> 28 for place in range(VALUES_PER_WORD)
  ]
  columns = width * VALUES_PER_WORD
  floats = np.ascontiguousarray(below).view(np.float32).reshape((*lead, -1, columns))
  scales, bias = np.split(floats, [rows // group_rows], axis=-2)
  values = np.concatenate(planes, axis=-1).astype(np.float32)
  grouped = values.reshape((*scales.shape[:-1], -1, columns)) * scales[..., None, :]
  return np.concatenate([grouped.reshape(values.shape), bias], axis=-2)
