"""Published weights as their families store them: plain floats, FP8 with scales for blocks, or FP4
with scales for groups. Reading gives the values that they stand for.

    KEY                                  float32, float16, bfloat16
    KEY with KEY_scale_inv               FP8 (E4M3), a float32 scale for each block of 128 x 128
    X.weight with X.scale                FP8 with E8M0 scales for blocks of 128 x 128; or FP4
                                         (E2M1), two a byte, with an E8M0 scale for each 32 inputs
    KEY_blocks with KEY_scales           FP4 of experts [N, out, in / 32, 16] with E8M0 scales
                                         [N, out, in / 32], for a weight [N, in, out]

An FP4 byte holds the earlier value in its low bits.

Source: OCP Microscaling formats (2023); the published checkpoints of DeepSeek-V3, DeepSeek-V4 and
gpt-oss.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from moecore_jax.checkpoint.safetensors_file import (
  BYTE_DTYPES,
  DTYPES,
  ID_DTYPES,
  Entry,
  read_tensor,
)

BLOCK = 128
GROUP = 32
_FP8, _BYTES, _E8M0 = "F8_E4M3", ("U8", "I8"), ("F8_E8M0", "U8")
_FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4_VALUES, -_FP4_VALUES])

Tensors = Mapping[str, Entry]


class Source(Protocol):
  """A published weight.

  Attributes:
    keys: tensors that it is read from.
    shape: of the weight.
    dtype: in which its values are exact.
  """

  @property
  def keys(self) -> tuple[str, ...]: ...
  @property
  def shape(self) -> tuple[int, ...]: ...
  @property
  def dtype(self) -> np.dtype: ...

  def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Returns rows start .. stop - 1 in NumPy, `dtype`; all that follow if stop is None.

    Raises:
      ValueError: they cannot be read, or a value is NaN or infinite.
    """
    ...


def find(key: str, tensors: Tensors, num_ids: int | None = None) -> Source | None:
  """Returns the weight of a key as it is stored, None where it is not.

  Args:
    key: its published name.
    tensors: all of the checkpoint.
    num_ids: it holds ids 0 .. num_ids - 1; None: numbers.

  Raises:
    ValueError: it is stored in a way that is not one of the above.
  """
  if (blocks := tensors.get(f"{key}_blocks")) is not None:
    return _FusedFloat4(key, blocks, _scales(f"{key}_scales", tensors, blocks, _E8M0))
  entry = tensors.get(key)
  if entry is None:
    return None
  if num_ids is not None:
    if entry.dtype not in ID_DTYPES:
      raise ValueError(_wrong_dtype(key, entry, ", ".join(ID_DTYPES)))
    return _Ids(key, entry, num_ids)
  if entry.dtype in DTYPES:
    return _Plain(key, entry)
  if f"{key}_scale_inv" in tensors and entry.dtype == _FP8:
    return _BlockFloat8(key, entry, *_scales(f"{key}_scale_inv", tensors, entry, ("F32",)))
  scale = key.removesuffix(".weight") + ".scale"
  if scale in tensors and entry.dtype == _FP8:
    return _BlockFloat8(key, entry, *_scales(scale, tensors, entry, ("F32", *_E8M0)))
  if scale in tensors and entry.dtype in _BYTES:
    return _Float4(key, entry, *_scales(scale, tensors, entry, _E8M0))
  raise ValueError(
    _wrong_dtype(key, entry, f"{', '.join(DTYPES)}, or {_FP8} or FP4 bytes and {scale}")
  )


def _scales(key: str, tensors: Tensors, of: Entry, dtypes: tuple[str, ...]) -> tuple[str, Entry]:
  entry = tensors.get(key)
  if entry is None:
    raise ValueError(f"{of.file}: tensor {key} is missing, the scales of a quantised weight")
  if entry.dtype not in dtypes:
    raise ValueError(_wrong_dtype(key, entry, " or ".join(dtypes)))
  return key, entry


def _wrong_dtype(key: str, entry: Entry, expected: str) -> str:
  return f"{entry.file}: tensor {key}: dtype is {entry.dtype}, expected {expected}"


class _Plain(NamedTuple):
  key: str
  entry: Entry

  @property
  def keys(self) -> tuple[str, ...]:
    return (self.key,)

  @property
  def shape(self) -> tuple[int, ...]:
    return self.entry.shape

  @property
  def dtype(self) -> np.dtype:
    return DTYPES[self.entry.dtype]

  def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
    return read_tensor(self.key, self.entry, start, stop)


class _Ids(NamedTuple):
  """A table of ids 0 .. num_ids - 1."""

  key: str
  entry: Entry
  num_ids: int

  @property
  def keys(self) -> tuple[str, ...]:
    return (self.key,)

  @property
  def shape(self) -> tuple[int, ...]:
    return self.entry.shape

  @property
  def dtype(self) -> np.dtype:
    return ID_DTYPES[self.entry.dtype]

  def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
    ids = read_tensor(self.key, self.entry, start, stop, ID_DTYPES)
    if ids.size and not 0 <= ids.min() <= ids.max() < self.num_ids:
      raise ValueError(
        f"{self.entry.file}: tensor {self.key}: has ids {ids.min()}..{ids.max()}, expected "
        f"0..{self.num_ids - 1}"
      )
    return ids


class _BlockFloat8(NamedTuple):
  """FP8 [out, in] with a scale for each block of 128 x 128."""

  key: str
  entry: Entry
  scale_key: str
  scales: Entry

  @property
  def keys(self) -> tuple[str, ...]:
    return self.key, self.scale_key

  @property
  def shape(self) -> tuple[int, ...]:
    blocks = tuple(-(-n // BLOCK) for n in _matrix(self.key, self.entry))
    return _checked(self.entry.shape, self.scale_key, self.scales, blocks)

  @property
  def dtype(self) -> np.dtype:
    is_exact = self.scales.dtype in _E8M0
    return np.dtype(ml_dtypes.bfloat16 if is_exact else np.float32)

  def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
    stop = self.entry.shape[0] if stop is None else stop
    values = _raw(self.key, self.entry, start, stop).view(ml_dtypes.float8_e4m3fn)
    first, last = start // BLOCK, -(-stop // BLOCK)
    scales = _read_scales(self.scale_key, self.scales, first, last)
    scales = np.repeat(scales, BLOCK, axis=0)[start - first * BLOCK :][: stop - start]
    scales = np.repeat(scales, BLOCK, axis=1)[:, : values.shape[1]]
    return _finite(self.key, self.entry, self.dtype, values.astype(np.float32) * scales)


class _Float4(NamedTuple):
  """FP4 [out, in / 2] bytes with a scale for each 32 inputs."""

  key: str
  entry: Entry
  scale_key: str
  scales: Entry

  @property
  def keys(self) -> tuple[str, ...]:
    return self.key, self.scale_key

  @property
  def shape(self) -> tuple[int, ...]:
    rows, half = _matrix(self.key, self.entry, GROUP // 2)
    groups = (rows, 2 * half // GROUP)
    return _checked((rows, 2 * half), self.scale_key, self.scales, groups)

  @property
  def dtype(self) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16)

  def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
    values = _float4(_raw(self.key, self.entry, start, stop))
    scales = _read_scales(self.scale_key, self.scales, start, stop)
    return _finite(self.key, self.entry, self.dtype, values * np.repeat(scales, GROUP, axis=-1))


class _FusedFloat4(NamedTuple):
  """FP4 experts [N, out, in / 32, 16] bytes, of a weight [N, in, out]."""

  key: str
  blocks: Entry
  scales: tuple[str, Entry]

  @property
  def keys(self) -> tuple[str, ...]:
    return f"{self.key}_blocks", self.scales[0]

  @property
  def shape(self) -> tuple[int, ...]:
    if len(self.blocks.shape) != 4 or self.blocks.shape[-1] != GROUP // 2:
      raise ValueError(
        f"{self.blocks.file}: tensor {self.keys[0]}: shape is {self.blocks.shape}, expected "
        f"[experts, outputs, groups, {GROUP // 2}]"
      )
    count, outputs, groups, _ = self.blocks.shape
    return _checked((count, groups * GROUP, outputs), *self.scales, self.blocks.shape[:3])

  @property
  def dtype(self) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16)

  def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
    values = _float4(_raw(self.keys[0], self.blocks, start, stop))  # [n, out, groups, 32]
    values = values * _read_scales(*self.scales, start, stop)[..., None]
    values = values.reshape((*values.shape[:2], -1)).swapaxes(1, 2)
    return _finite(self.keys[0], self.blocks, self.dtype, values)


def _matrix(key: str, entry: Entry, columns: int = 1) -> tuple[int, int]:
  """Returns the shape of a quantised matrix that has a multiple of so many columns."""
  if len(entry.shape) != 2 or entry.shape[1] % columns:
    raise ValueError(
      f"{entry.file}: tensor {key}: shape is {entry.shape}, expected a matrix with a multiple of "
      f"{columns} columns of {entry.dtype}"
    )
  return entry.shape[0], entry.shape[1]


def _checked(
  shape: tuple[int, ...], key: str, scales: Entry, wanted: tuple[int, ...]
) -> tuple[int, ...]:
  if scales.shape != wanted:
    raise ValueError(f"{scales.file}: tensor {key}: shape is {scales.shape}, expected {wanted}")
  return shape


def _raw(key: str, entry: Entry, start: int, stop: int | None) -> np.ndarray:
  """Returns rows as bytes."""
  return read_tensor(key, entry, start, stop, BYTE_DTYPES)


def _read_scales(key: str, entry: Entry, start: int, stop: int | None) -> np.ndarray:
  if entry.dtype == "F32":
    return read_tensor(key, entry, start, stop)
  return _raw(key, entry, start, stop).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def _float4(data: np.ndarray) -> np.ndarray:
  """Returns float32 [..., 2 n] of bytes [..., n]."""
  both = np.stack([data & np.uint8(15), data >> np.uint8(4)], axis=-1)
  return _FP4[both.reshape((*data.shape[:-1], -1))]


def _finite(key: str, entry: Entry, dtype: np.dtype, values: np.ndarray) -> np.ndarray:
  if not np.isfinite(values).all():
    raise ValueError(f"{entry.file}: tensor {key}: has NaN or infinite values")
  return values.astype(dtype)
