"""Reads one safetensors file by plain reads, so that nothing stays mapped in the process.

Layout: eight bytes, the little-endian length of a JSON header; the header, {key: {dtype, shape,
data_offsets}} with offsets counted from its own end; the data, without gaps. Nothing else is
accepted, and nothing is ever unpickled.

Source: the safetensors format description.
"""

import collections
import dataclasses
import errno
import json
import math
import os
import pathlib
import re
import stat
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from moecore_jax.families.config_reader import shown

DTYPES: dict[str, np.dtype] = {
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes of weights that are read, by their safetensors names."""

ID_DTYPES: dict[str, np.dtype] = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}
"""Dtypes of tables of ids, likewise."""

BYTE_DTYPES = dict.fromkeys(("F8_E4M3", "F8_E8M0", "U8", "I8"), np.dtype(np.uint8))
"""Dtypes that are read as bytes, likewise."""

JSON_LIMIT_BYTES = 100_000_000
"""Bytes of the largest header, config or index that is read."""

_MAX_KEY, _MAX_DIMS, _MAX_DIM = 500, 16, 2**53
_EXPONENT_BITS = {
  "F32": (np.uint32, 0x7F800000),
  "F16": (np.uint16, 0x7C00),
  "BF16": (np.uint16, 0x7F80),
}


@dataclasses.dataclass(frozen=True)
class Entry:
  """Where one tensor lies: bytes start .. start + num_bytes - 1 of a file."""

  file: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  start: int
  num_bytes: int


def read_header(file: pathlib.Path) -> dict[str, Entry]:
  """Reads and checks the header of a file.

  Returns:
    {key: Entry}.

  Raises:
    ValueError: the file is missing, truncated, or not in this format; names file and tensor.
  """
  try:
    with open_regular(file) as f:
      size = os.fstat(f.fileno()).st_size
      length, header = _header(file, f.read(8), f, size)
  except FileNotFoundError:
    raise ValueError(f"{file}: the file is missing; download the checkpoint again") from None
  except OSError as error:
    raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
  header.pop("__metadata__", None)
  base, end, entries = 8 + length, 0, {}
  for key, fields in sorted(header.items(), key=lambda item: _begin(file, *item)):
    entry = _entry(file, key, fields, base)
    if entry.start != base + end:
      raise ValueError(f"{file}: tensor {key}: starts at byte {entry.start}, expected {base + end}")
    end += entry.num_bytes
    entries[key] = entry
  if size != base + end:
    what = "truncated" if size < base + end else "longer than its header says"
    raise ValueError(
      f"{file}: the file is {what}: {size} bytes, expected {base + end}; download it again"
    )
  return entries


def open_regular(file: pathlib.Path) -> BinaryIO:
  """Opens a file to read; a pipe or a device would be read for ever.

  Raises:
    OSError: it cannot be opened, or is none.
  """
  if not stat.S_ISREG(os.stat(file).st_mode):
    raise OSError(errno.EINVAL, "it is not a regular file")
  return open(file, "rb")


def parse_json(data: bytes) -> Any:
  """Parses JSON in which no object has a key twice.

  Raises:
    ValueError: says what is wrong.
  """
  try:
    return json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
  except RecursionError:
    raise ValueError("it is nested too deeply") from None


def read_tensor(
  key: str,
  entry: Entry,
  start: int = 0,
  stop: int | None = None,
  dtypes: Mapping[str, np.dtype] = DTYPES,
) -> np.ndarray:
  """Reads one tensor, or some of its rows.

  Args:
    key: its name.
    entry: where it lies.
    start: first row.
    stop: end of the rows; None: all that follow.
    dtypes: those that it may have, by their safetensors names.

  Returns:
    Array of the published dtype and the rows' shape.

  Raises:
    ValueError: the dtype is not one of `dtypes`, the file has become shorter, or a value is NaN or
      infinite.
  """
  if entry.dtype not in dtypes:
    raise ValueError(
      f"{entry.file}: tensor {key}: dtype is {entry.dtype}, expected one of {', '.join(dtypes)}"
    )
  shape, offset = entry.shape, 0
  if shape:
    rows = range(shape[0])[start:stop]
    shape, offset = (len(rows), *shape[1:]), rows.start * (entry.num_bytes // max(1, shape[0]))
  data = np.empty(shape, dtypes[entry.dtype])
  _read_into(memoryview(data.reshape(-1).view(np.uint8)), key, entry, offset)
  if entry.dtype in _EXPONENT_BITS and not _is_finite(data, entry.dtype):
    raise ValueError(f"{entry.file}: tensor {key}: has NaN or infinite values")
  return data


def first_bytes(key: str, entry: Entry, count: int) -> bytes:
  """Reads the first bytes of a tensor, all if it has fewer.

  Raises:
    ValueError: the file has become shorter.
  """
  data = bytearray(min(count, entry.num_bytes))
  _read_into(memoryview(data), key, entry, 0)
  return bytes(data)


def _read_into(data: memoryview, key: str, entry: Entry, offset: int) -> None:
  try:
    with open(entry.file, "rb", buffering=0) as f:
      f.seek(entry.start + offset)
      got = 0
      while got < len(data):
        count = f.readinto(data[got:])
        if not count:
          got += offset
          raise ValueError(
            f"{entry.file}: tensor {key}: the file ends after {got} of {entry.num_bytes} bytes"
          )
        got += count
  except OSError as error:
    raise ValueError(f"{entry.file}: tensor {key}: cannot be read: {error.strerror}") from None


def _is_finite(data: np.ndarray, dtype: str) -> bool:
  word, exponent = _EXPONENT_BITS[dtype]
  words, step = data.reshape(-1).view(word), 1 << 22  # in pieces, for their temporaries
  return not any(
    ((words[i : i + step] & word(exponent)) == word(exponent)).any()
    for i in range(0, words.size, step)
  )


def _header(file: pathlib.Path, prefix: bytes, f: Any, size: int) -> tuple[int, dict[str, Any]]:
  if prefix[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
    raise ValueError(f"{file}: is a pickle, which is never read; expected safetensors")
  length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
  if not 2 <= length <= JSON_LIMIT_BYTES:
    raise ValueError(f"{file}: is not a safetensors file: its header has {length} bytes")
  if size < 8 + length:
    raise ValueError(f"{file}: the file is truncated: it ends within its header; download it again")
  try:
    header = parse_json(f.read(length))
  except ValueError as error:
    raise ValueError(f"{file}: is not a safetensors file: its header is corrupt: {error}") from None
  if not isinstance(header, dict):
    raise ValueError(f"{file}: is not a safetensors file: its header is not an object")
  return length, header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  result = dict(pairs)
  if len(result) < len(pairs):
    [(key, _)] = collections.Counter(key for key, _ in pairs).most_common(1)
    raise ValueError(f"{shown(key)} is listed twice")
  return result


def _begin(file: pathlib.Path, key: str, fields: Any) -> tuple[int, int]:
  if not key.isprintable() or len(key) > _MAX_KEY:
    raise ValueError(f"{file}: is not a safetensors file: {shown(key)} is no name of a tensor")
  offsets = fields.get("data_offsets") if isinstance(fields, dict) else None
  if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int]:
    raise ValueError(f"{file}: tensor {key}: its header entry is corrupt")
  return offsets[0], offsets[1]


def _entry(file: pathlib.Path, key: str, fields: dict[str, Any], base: int) -> Entry:
  begin, end = _begin(file, key, fields)
  dtype, shape = fields.get("dtype"), fields.get("shape")
  if (
    not isinstance(dtype, str)
    or not re.fullmatch(r"\w{1,16}", dtype, re.ASCII)
    or not isinstance(shape, list)
    or len(shape) > _MAX_DIMS
    or not all(type(n) is int and 0 <= n < _MAX_DIM for n in shape)
    or not 0 <= begin <= end
  ):
    raise ValueError(f"{file}: tensor {key}: its header entry is corrupt")
  known = (DTYPES | ID_DTYPES | BYTE_DTYPES).get(dtype)
  if known is not None and math.prod(shape) * known.itemsize != end - begin:
    raise ValueError(
      f"{file}: tensor {key}: shape {shape} of {dtype} does not fill its {end - begin} bytes"
    )
  return Entry(file, dtype, tuple(shape), base + begin, end - begin)
