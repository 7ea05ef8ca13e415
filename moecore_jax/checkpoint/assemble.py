"""Turns published tensors into our arrays by the rules of a family's key map."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from moecore_jax.checkpoint.template import BANK_NAMES, expert_groups
from moecore_jax.families.keymap import KeyMap, Path
from moecore_jax.models.experts import bank_layout
from moecore_jax.quantization.formats import expert_bytes, pack
from moecore_jax.specs import ExpertFormat, ModelSpec

MIN_CHUNK_BYTES = 16 << 20
MAX_CHUNK_BYTES = 256 << 20

ReadTensor = Callable[[str], np.ndarray]
"""Reads one published tensor by its key; the implementation checks dtype, shape and finiteness."""


class ExpertRow(NamedTuple):
  """One routed expert, in NumPy and the published dtype.

  Attributes:
    bank: "experts" or "mtp_experts".
    group: index of the expert group.
    row: row of the group's bank.
    gate_up: [D, 2F].
    down: [F, D].
  """

  bank: str
  group: int
  row: int
  gate_up: np.ndarray
  down: np.ndarray


def dense_leaves(keymap: KeyMap, read: ReadTensor) -> Iterator[tuple[Path, np.ndarray]]:
  """Yields (path, array in the published dtype) of the dense parameters, one at a time."""
  for rule in keymap.dense:
    yield rule.target, rule.make(*map(read, rule.sources))


def dense_params(keymap: KeyMap, read: ReadTensor) -> dict[str, Any]:
  """Returns the dense parameters as a nested dict of NumPy arrays in the published dtype."""
  params: dict = {}
  for path, array in dense_leaves(keymap, read):
    node = params
    for part in path[:-1]:
      node = node.setdefault(part, {})
    node[path[-1]] = array
  return params


def expert_rows(keymap: KeyMap, read: ReadTensor) -> Iterator[ExpertRow]:
  """Yields the routed experts, one at a time, bank by bank in row order."""
  for rule in sorted(keymap.experts, key=lambda r: (r.bank, r.group, r.row)):
    gate_up, down = rule.make(*map(read, rule.sources))
    yield ExpertRow(rule.bank, rule.group, rule.row, gate_up, down)


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


def expert_chunks(
  keymap: KeyMap, read: ReadTensor, spec: ModelSpec, fmt: ExpertFormat
) -> Iterator[BankChunk]:
  """Yields all banks in the given format, chunk by chunk; a chunk belongs to its receiver."""
  experts = expert_rows(keymap, read)
  for bank in BANK_NAMES:
    for g, group in enumerate(expert_groups(spec, bank)):
      layout = bank_layout(group, fmt)
      row_bytes = expert_bytes(group.embed_dim, group.expert_dim, fmt)
      step = rows_per_chunk(group.num_rows, row_bytes)
      for start in range(0, group.num_rows, step):
        count = min(step, group.num_rows - start)
        arrays = {
          name: np.empty((count, *shape[1:]), dtype) for name, (shape, dtype) in layout.items()
        }
        for i in range(count):
          expert = next(experts)
          if (expert.bank, expert.group, expert.row) != (bank, g, start + i):
            raise AssertionError(f"rule {expert[:3]} follows {(bank, g, start + i - 1)}")
          arrays["gate_up"][i] = pack(expert.gate_up, fmt)
          arrays["down"][i] = pack(expert.down, fmt)
          del expert
        yield BankChunk(bank, g, start, arrays)
        del arrays
