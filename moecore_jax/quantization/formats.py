"""Storage formats of expert weights: float32 as it is, every other format in uint32 words.

One expert is two stored arrays, `gate_up` [D, 2F] (gate columns first) and `down` [F, D], both
applied as `x @ w`. A packed array packs the output axis in planes: with p values a word, word j of
a row holds columns j, j + W, .., j + (p - 1) W, lowest bits first, where W = columns / p. Unpacking
is shifts and one concatenation, which every backend fuses, and the word array is an integer array,
which no backend converts or re-lays as a whole.

Below the rows of the weight an array holds what belongs to it, so that one transfer brings all:

    float32, bfloat16   the bias, one row in the same format, where there is one
    w4a8, w8a8          a float32 scale for each column and group of rows, then the bias in float32;
                        bit-cast to words, p rows of W words each

`w4a8` is symmetric int4 with one group of all rows; `w4a8_g128` has groups of 128 rows, and so on;
`w8a8` is symmetric int8. Activations are quantised when they meet the weight, see
`quantization.matmul`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from moecore_jax.quantization import integers
from moecore_jax.specs import ExpertFormat


def bits(fmt: ExpertFormat) -> int:
  """Returns the bits of a stored value."""
  return {"float32": 32, "bfloat16": 16, "w8a8": 8}.get(fmt, 4)


def is_integer(fmt: ExpertFormat) -> bool:
  """Returns whether a format quantises weights and activations to integers."""
  return bits(fmt) <= 8


def group_rows(fmt: ExpertFormat, rows: int) -> int:
  """Returns the rows of a weight that share a scale.

  Raises:
    ValueError: the rows do not fill whole groups.
  """
  _, _, size = fmt.partition("_g")
  count = int(size) if size else rows
  if rows % count:
    raise ValueError(f"a weight of {rows} rows does not fill {fmt} groups of {count}; use w4a8")
  return count


def storage_dtype(fmt: ExpertFormat) -> np.dtype:
  """Returns the dtype of stored arrays: float32, or uint32 words."""
  return np.dtype(np.float32 if fmt == "float32" else np.uint32)


def storage_shape(
  rows: int, columns: int, fmt: ExpertFormat, has_bias: bool = False
) -> tuple[int, int]:
  """Returns the stored shape of a [rows, columns] weight and its bias.

  Raises:
    ValueError: the columns do not fill whole words, or the rows whole groups.
  """
  values = 32 // bits(fmt)
  if columns % values:
    raise ValueError(
      f"a weight of {columns} columns does not fill {fmt} words of {values} values; use float32"
    )
  extra = int(has_bias)
  if is_integer(fmt):
    extra = values * (rows // group_rows(fmt, rows) + has_bias)
  return rows + extra, columns // values


def narrowed(weight: np.ndarray, dtype: DTypeLike) -> np.ndarray:
  """Returns a finite host weight in another dtype.

  Raises:
    ValueError: a number is too large for it.
  """
  with np.errstate(over="ignore"):
    result = weight.astype(dtype, copy=False)
  if result.dtype.itemsize < weight.dtype.itemsize and not np.isfinite(result).all():
    raise ValueError(f"a weight is too large for {result.dtype}; use float32")
  return result


def pack(weight: np.ndarray, fmt: ExpertFormat, has_bias: bool = False) -> np.ndarray:
  """Packs a host weight.

  Args:
    weight: [..., rows, columns] float32 or bfloat16 (ml_dtypes), in NumPy; the last row is the bias
      where there is one.
    fmt: target format; bfloat16 rounds to nearest even, integers to the nearest step.
    has_bias: there is one.

  Returns:
    [..., *storage_shape] in NumPy.
  """
  if fmt == "float32":
    return np.ascontiguousarray(weight, np.float32)
  rows = weight.shape[-2] - has_bias
  storage_shape(rows, weight.shape[-1], fmt, has_bias)
  if is_integer(fmt):
    weight = np.asarray(weight, np.float32)
    kernel, bias = np.split(weight, [rows], axis=-2)
    return integers.pack(kernel, bias, bits(fmt), group_rows(fmt, rows))
  halves = narrowed(np.asarray(weight), jnp.bfloat16).view(np.uint16)
  low, high = np.split(halves, 2, axis=-1)
  return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def unpack(
  stored: jax.Array, fmt: ExpertFormat, dtype: jnp.dtype, has_bias: bool = False
) -> jax.Array:
  """Unpacks stored weights inside a program: the values that they stand for.

  Args:
    stored: [..., *storage_shape], device memory.
    fmt: format of `stored`.
    dtype: float type of the result.
    has_bias: the last row of the result is a bias.

  Returns:
    dtype [..., rows (+ 1), columns].
  """
  if fmt == "float32":
    return stored.astype(dtype)
  if is_integer(fmt):
    rows = _weight_rows(stored.shape[-2], fmt, has_bias)
    return integers.dequantize(stored, bits(fmt), rows, group_rows(fmt, rows)).astype(dtype)
  low = lax.bitcast_convert_type(stored << jnp.uint32(16), jnp.float32)
  high = lax.bitcast_convert_type(stored & jnp.uint32(0xFFFF0000), jnp.float32)
  return jnp.concatenate([low, high], axis=-1).astype(dtype)


def unpack_host(stored: np.ndarray, fmt: ExpertFormat, has_bias: bool = False) -> np.ndarray:
  """Unpacks host weights: the values that they stand for; the exact inverse of `pack` for float
  formats.

  Returns:
    [..., rows (+ 1), columns] in NumPy, float32, or bfloat16 (ml_dtypes) for that format.
  """
  if fmt == "float32":
    return stored
  if is_integer(fmt):
    rows = _weight_rows(stored.shape[-2], fmt, has_bias)
    return integers.dequantize_host(stored, bits(fmt), rows, group_rows(fmt, rows))
  low, high = stored.astype(np.uint16), (stored >> np.uint32(16)).astype(np.uint16)
  return np.concatenate([low, high], axis=-1).view(jnp.bfloat16)


def _weight_rows(stored_rows: int, fmt: ExpertFormat, has_bias: bool) -> int:
  """Returns the rows of the weight in a stored array of so many, of an integer format."""
  per_word, (_, _, size) = 32 // bits(fmt), fmt.partition("_g")
  rows = stored_rows - per_word * has_bias
  return rows * int(size) // (int(size) + per_word) if size else rows - per_word
