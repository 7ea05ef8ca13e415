"""Storage formats of expert rows: float32 as it is, narrower formats packed in uint32 words.

One expert is two arrays, `gate_up` [D, 2F] (gate columns first) and `down` [F, D], both applied as
`x @ w`. A packed array keeps its first dimension and packs the output axis in planes: with p values
a word, word j of a row holds columns j, j + W, .., j + (p - 1) W, lowest bits first, where W =
columns / p. Unpacking is shifts and one concatenation, which every backend fuses, and the word
array is an integer array, which no backend converts or re-lays as a whole.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moecore_jax.specs import ExpertFormat

VALUES_PER_WORD: dict[str, int] = {"float32": 1, "bfloat16": 2}


def storage_dtype(fmt: ExpertFormat) -> np.dtype:
  """Returns the dtype of stored rows: float32, or uint32 words."""
  return np.dtype(np.float32 if fmt == "float32" else np.uint32)


def storage_shape(rows: int, columns: int, fmt: ExpertFormat) -> tuple[int, int]:
  """Returns the stored shape of a [rows, columns] weight.

  Raises:
    ValueError: the columns do not fill whole words.
  """
  values = VALUES_PER_WORD[fmt]
  if columns % values:
    raise ValueError(
      f"a weight of {columns} columns does not fill {fmt} words of {values} values; use float32"
    )
  return rows, columns // values


def pack(weight: np.ndarray, fmt: ExpertFormat) -> np.ndarray:
  """Packs a host weight.

  Args:
    weight: [..., rows, columns] float32 or bfloat16 (ml_dtypes), in NumPy.
    fmt: target format; bfloat16 rounds to nearest even.

  Returns:
    float32 [..., rows, columns] or uint32 [..., rows, columns / 2], in NumPy.
  """
  if fmt == "float32":
    return np.ascontiguousarray(weight, np.float32)
  storage_shape(weight.shape[-2], weight.shape[-1], fmt)
  halves = np.asarray(weight).astype(jnp.bfloat16).view(np.uint16)
  low, high = np.split(halves, 2, axis=-1)
  return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def unpack(stored: jax.Array, fmt: ExpertFormat, dtype: jnp.dtype) -> jax.Array:
  """Unpacks one stored weight inside a program.

  Args:
    stored: float32 [..., rows, columns] or uint32 words, device memory.
    fmt: format of `stored`.
    dtype: float type of the result.

  Returns:
    dtype [..., rows, columns].
  """
  if fmt == "float32":
    return stored.astype(dtype)
  low = lax.bitcast_convert_type(stored << jnp.uint32(16), jnp.float32)
  high = lax.bitcast_convert_type(stored & jnp.uint32(0xFFFF0000), jnp.float32)
  return jnp.concatenate([low, high], axis=-1).astype(dtype)


def unpack_host(stored: np.ndarray, fmt: ExpertFormat) -> np.ndarray:
  """Unpacks host weights: the exact inverse of `pack`.

  Args:
    stored: float32 [..., rows, columns] or uint32 words, in NumPy.
    fmt: format of `stored`.

  Returns:
    [..., rows, columns] in NumPy, float32 or bfloat16 (ml_dtypes).
  """
  if fmt == "float32":
    return stored
  low, high = stored.astype(np.uint16), (stored >> np.uint32(16)).astype(np.uint16)
  return np.concatenate([low, high], axis=-1).view(jnp.bfloat16)


def expert_bytes(embed_dim: int, expert_dim: int, fmt: ExpertFormat) -> int:
  """Returns the stored bytes of one expert."""
  words = 3 * embed_dim * expert_dim // VALUES_PER_WORD[fmt]
  return words * 4
