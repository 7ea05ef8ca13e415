"""Turns published tensors into our arrays by the rules of a family's key map."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from moecore_jax.families.keymap import KeyMap

ReadTensor = Callable[[str], np.ndarray]
"""Reads one published tensor by its key; the implementation checks dtype, shape and finiteness."""


class ExpertRow(NamedTuple):
  """One routed expert: bank name, group, row of the group's bank, gate_up [D, 2F] and down [F, D] in the published dtype."""

  bank: str
  group: int
  row: int
  gate_up: np.ndarray
  down: np.ndarray


def dense_params(keymap: KeyMap, read: ReadTensor) -> dict[str, Any]:
  """Returns the dense parameters as a nested dict of NumPy arrays in the published dtype."""
  params: dict = {}
  for rule in keymap.dense:
    node = params
    for part in rule.target[:-1]:
      node = node.setdefault(part, {})
    node[rule.target[-1]] = rule.make(*map(read, rule.sources))
  return params


def expert_rows(keymap: KeyMap, read: ReadTensor) -> Iterator[ExpertRow]:
  """Yields the routed experts, one at a time, bank by bank in row order."""
  for rule in sorted(keymap.experts, key=lambda r: (r.bank, r.group, r.row)):
    gate_up, down = rule.make(*map(read, rule.sources))
    yield ExpertRow(rule.bank, rule.group, rule.row, gate_up, down)
