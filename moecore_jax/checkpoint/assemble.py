"""Turns published tensors into our arrays by the rules of a family's key map, in parts of bounded
size.

What is read and written at a time is planned from shapes alone (`dense_cuts`, `bank_cuts`), so that
a run can be told which parts it still has to make.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from moecore_jax.checkpoint.template import BANK_NAMES, expert_groups
from moecore_jax.families.keymap import DenseRule, KeyMap, Path
from moecore_jax.models.experts import bank_layout, expert_bytes
from moecore_jax.quantization.formats import pack
from moecore_jax.specs import ExpertFormat, ModelSpec

MIN_CHUNK_BYTES = 16 << 20
MAX_CHUNK_BYTES = 256 << 20
MAX_PIECE_BYTES = 64 << 20
_CACHE_LINE_BYTES = 64

ReadTensor = Callable[..., np.ndarray]
"""Called with a key, reads a published tensor; with a key, start and stop, rows start .. stop - 1
of it. The implementation checks dtype, shape and finiteness."""


class DenseCut(NamedTuple):
  """Entries start .. stop - 1 of a dense parameter."""

  rule: DenseRule
  start: int
  stop: int

  def read(self, keymap: KeyMap, read: ReadTensor) -> np.ndarray:
    """Returns the entries in NumPy and the published dtype."""
    parts, first, rows = [], 0, self.rule.entry_rows
    for key in self.rule.sources:
      count = keymap.shapes[key][0] // rows
      start, stop = max(self.start - first, 0), min(self.stop - first, count)
      if start < stop:
        parts.append(self.rule.make(read(key, start * rows, stop * rows)))
      first += count
    dtype = common_dtype(part.dtype for part in parts)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, self.rule.axis, dtype=dtype)


class DensePiece(NamedTuple):
  """Consecutive entries of a dense parameter, often all of them.

  Attributes:
    path: of the parameter.
    axis: along which they lie.
    start: the first.
    array: in NumPy.
  """

  path: Path
  axis: int
  start: int
  array: np.ndarray


def num_entries(keymap: KeyMap, rule: DenseRule) -> int:
  """Returns the length of a dense parameter along its rule's axis."""
  return sum(keymap.shapes[key][0] for key in rule.sources) // rule.entry_rows


def dense_cuts(keymap: KeyMap) -> Iterator[DenseCut]:
  """Yields all dense parameters, cut so that a cut reads at most 64 MB, were it float32."""
  for rule in keymap.dense:
    row = max(math.prod(keymap.shapes[key][1:]) for key in rule.sources)
    step = max(1, MAX_PIECE_BYTES // max(1, 4 * rule.entry_rows * row))
    length = num_entries(keymap, rule)
    for start in range(0, length, step):
      yield DenseCut(rule, start, min(start + step, length))


def dense_pieces(keymap: KeyMap, read: ReadTensor) -> Iterator[DensePiece]:
  """Yields the dense parameters in the published dtype, a piece at a time."""
  for cut in dense_cuts(keymap):
    yield DensePiece(cut.rule.target, cut.rule.axis, cut.start, cut.read(keymap, read))


class BankCut(NamedTuple):
  """Rows start .. stop - 1 of one bank.

  Attributes:
    bank: "experts" or "mtp_experts".
    group: index of the expert group.
    start: first row.
    stop: end of the rows.
  """

  bank: str
  group: int
  start: int
  stop: int


class BankChunk(NamedTuple):
  """Consecutive rows of one bank, as stored.

  Attributes:
    bank: "experts" or "mtp_experts".
    group: index of the expert group.
    start: first row.
    arrays: {"gate_up", "down"}, each [rows, ...] of the bank's storage dtype, in NumPy.
  """

  bank: str
  group: int
  start: int
  arrays: dict[str, np.ndarray]


def rows_per_chunk(rows: int, row_bytes: int) -> int:
  """Returns how many rows move together: 1/128 of the bank, 16 to 256 MB, at least a row.

  A load has a few chunks in memory beside the bank itself, so that this bounds its peak.
  """
  target = min(max(rows * row_bytes // 128, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
  return min(rows, max(1, target // row_bytes))


def bank_cuts(spec: ModelSpec, fmt: ExpertFormat) -> Iterator[BankCut]:
  """Yields all banks in rows that move together, bank by bank in row order."""
  for bank in BANK_NAMES:
    for g, group in enumerate(expert_groups(spec, bank)):
      row_bytes = expert_bytes(group, fmt)
      step = rows_per_chunk(group.num_rows, row_bytes)
      for start in range(0, group.num_rows, step):
        yield BankCut(bank, g, start, min(start + step, group.num_rows))


@contextlib.contextmanager
def telling(key: str) -> Iterator[None]:
  """Lets a fault that is found within say the published key."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"{key}: {error}") from error


def common_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
  """Returns the one dtype of all, or float32: NumPy has no common one for bfloat16 and float16."""
  given = set(dtypes)
  return given.pop() if len(given) == 1 else np.dtype(np.float32)


class ExpertReader:
  """Reads rows of banks.

  Args:
    keymap: rules of the checkpoint.
    read: reads its tensors.
    spec: the model.
    fmt: format of the rows.
  """

  def __init__(self, keymap: KeyMap, read: ReadTensor, spec: ModelSpec, fmt: ExpertFormat):
    self._rules = {(rule.bank, rule.group, rule.row): rule for rule in keymap.experts}
    self._read, self._spec, self._fmt = read, spec, fmt

  def __call__(self, cut: BankCut) -> dict[str, np.ndarray]:
    """Returns {"gate_up", "down"} of some rows, in NumPy and the storage dtype."""
    group, count = expert_groups(self._spec, cut.bank)[cut.group], cut.stop - cut.start
    arrays = {
      name: np.empty((count, *shape[1:]), dtype)
      for name, (shape, dtype) in bank_layout(group, self._fmt).items()
    }
    for i in range(count):
      rule = self._rules[cut.bank, cut.group, cut.start + i]
      sources = [self._source(key, rule.entry) for key in rule.sources]
      dtype = common_dtype(source.dtype for source in sources)
      gate_up, down = rule.make(*(source.astype(dtype, copy=False) for source in sources))
      with telling(rule.sources[0]):
        _copy(arrays["gate_up"][i], pack(gate_up, self._fmt, group.has_bias))
        _copy(arrays["down"][i], pack(down, self._fmt, group.has_bias))
    return arrays

  def _source(self, key: str, entry: int | None) -> np.ndarray:
    return self._read(key) if entry is None else self._read(key, entry, entry + 1)[0]


def _copy(target: np.ndarray, source: np.ndarray) -> None:
  """Copies a matrix, a transposed one in strips of a cache line: as a whole it takes thrice as
  long.
  """
  step = target.shape[1] if source.flags.c_contiguous else _CACHE_LINE_BYTES // target.itemsize
  for i in range(0, target.shape[1], step):
    target[:, i : i + step] = source[:, i : i + step]


def bank_chunks(
  keymap: KeyMap, read: ReadTensor, spec: ModelSpec, fmt: ExpertFormat
) -> Iterator[BankChunk]:
  """Yields all banks in the given format, chunk by chunk; a chunk belongs to its receiver."""
  read_experts = ExpertReader(keymap, read, spec, fmt)
  for cut in bank_cuts(spec, fmt):
    yield BankChunk(cut.bank, cut.group, cut.start, read_experts(cut))
