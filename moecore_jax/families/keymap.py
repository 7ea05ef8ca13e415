"""How a published checkpoint maps to our arrays: explicit rules from published keys, never a guess
from a shape.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

Path = tuple[str | int, ...]
"""Path of a parameter in the pure dict of the dense parameters, e.g. ("layers", 3, "mlp_norm",
"scale").
"""


@dataclasses.dataclass(frozen=True)
class DenseRule:
  """One dense parameter, made so that any run of its entries needs only some rows of its sources.

  Attributes:
    target: where it goes.
    sources: published keys whose parts follow one another along `axis`.
    make: maps whole entries of one source, rows of it, to their part of the parameter.
    axis: of the parameter, along which entries lie.
    entry_rows: source rows that make one entry.
  """

  target: Path
  sources: tuple[str, ...]
  make: Callable[[np.ndarray], np.ndarray]
  axis: int = 0
  entry_rows: int = 1


@dataclasses.dataclass(frozen=True)
class ExpertRule:
  """One routed expert.

  Attributes:
    bank: "experts" or "mtp_experts".
    group: index of the expert group.
    row: row of the group's bank.
    sources: published keys it is made of.
    make: maps the sources' arrays, in order, to (gate_up [D, 2F], down [F, D]), each with its bias
      as one more row where there are biases.
    entry: its place along the first axis of the sources, None where they are its own.
  """

  bank: str
  group: int
  row: int
  sources: tuple[str, ...]
  make: Callable[..., tuple[np.ndarray, np.ndarray]]
  entry: int | None = None


@dataclasses.dataclass(frozen=True)
class KeyMap:
  """All rules of one checkpoint.

  Attributes:
    dense: rules of the dense parameters, each target once.
    experts: rules of the routed experts, each row once.
    skipped: published keys that are known and not needed, with the reason.
    shapes: expected shape of every source key.
    id_tables: {key: n} of the source keys that hold ids 0 .. n - 1.
  """

  dense: tuple[DenseRule, ...]
  experts: tuple[ExpertRule, ...]
  skipped: Mapping[str, str]
  shapes: Mapping[str, tuple[int, ...]]
  id_tables: Mapping[str, int] = dataclasses.field(default_factory=dict)


def keep(x: np.ndarray) -> np.ndarray:
  """The parameter as published."""
  return x


def transpose(x: np.ndarray) -> np.ndarray:
  """A published [out, in] matrix as our [in, out] kernel."""
  return x.T


def stack_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
  """Published gate and up [F, D] as one kernel [D, 2F]."""
  return np.concatenate([gate, up], axis=0).T


def expert_arrays(
  gate: np.ndarray, up: np.ndarray, down: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Published gate, up [F, D] and down [D, F] as (gate_up [D, 2F], down [F, D])."""
  return stack_gate_up(gate, up), down.T
