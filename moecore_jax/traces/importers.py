"""Routing traces of other tools: told apart by content, turned into a `Trace`.

Three formats are read beside our own:

* an npz archive of `experts` [T, L, A], `weights` [T, L, A], `offsets` [S + 1];
* an npz archive of `experts` [T, L, A], `probs` [T, L, A], `token_pos` [T], `offsets` [S + 1];
* a CSV file, plain or gzipped, of one choice a line (turn, phase, step, layer, slot, expert,
  weight, ...) behind lines of `# name=value`.

They tell neither batch rows nor programs: every token becomes a step of its own.
"""

import csv
import gzip
import os
import zlib
from collections.abc import Iterator

import numpy as np

from moecore_jax.runtime.state import NO_EXPERT
from moecore_jax.traces import trace_file
from moecore_jax.traces.trace import Phase, Trace

_ROUNDING = 8
_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight")


def load_any(path: str | os.PathLike[str], num_experts: int | None = None) -> Trace:
  """Reads a trace of any format that is known.

  Args:
    path: the file.
    num_experts: routed experts of a layer, for files that do not tell; by default the largest id
      that occurs, plus one, rounded up to a multiple of 8.

  Raises:
    ValueError: the format is unknown, or the content damaged or contradictory.
  """
  with open(path, "rb") as file:
    is_archive = file.read(2) == b"PK"
  if not is_archive:
    return _of_count(_from_csv(path, num_experts), num_experts, path)
  arrays = trace_file.read_npz(path)
  if "version" in arrays:
    return _of_count(trace_file.from_arrays(arrays, str(path)), num_experts, path)
  weights = arrays.get("weights", arrays.get("probs"))
  if weights is None or not {"experts", "offsets"} <= set(arrays):
    raise ValueError(
      f"{path}: has the arrays {', '.join(arrays)}, expected a trace of version "
      f"{trace_file.VERSION}, or experts, offsets and weights or probs"
    )
  return _from_arrays(arrays["experts"], weights, arrays["offsets"], num_experts, str(path))


def _from_arrays(
  experts: np.ndarray,
  weights: np.ndarray,
  offsets: np.ndarray,
  num_experts: int | None,
  source: str,
) -> Trace:
  """Returns a trace of decoded tokens; `source` names the file in errors."""
  if experts.ndim != 3 or not experts.size or experts.dtype.kind not in "iu":
    raise ValueError(f"{source}: experts is {experts.dtype}{list(experts.shape)}, expected ids")
  num_tokens, num_layers, top_k = experts.shape
  largest = int(experts.max())
  if experts.min() < 0 or largest >= NO_EXPERT:
    raise ValueError(f"{source}: experts has {experts.min()}..{largest}, expected 0..65534")
  count = num_experts or _round_up(largest)
  return _checked(
    source,
    experts=experts.astype(np.uint16),
    weights=weights,
    sequence_offsets=offsets,
    phase=np.full(num_tokens, Phase.DECODE, np.uint8),
    num_experts=np.full(num_layers, count, np.int32),
    top_k=np.full(num_layers, top_k, np.int32),
    expert_bytes=np.zeros(num_layers, np.int64),
  )


def _of_count(trace: Trace, num_experts: int | None, path: str | os.PathLike[str]) -> Trace:
  """Returns the trace, if its layers have as many experts as they are said to have."""
  if num_experts and (trace.num_experts != num_experts).any():
    told = ", ".join(map(str, np.unique(trace.num_experts)))
    raise ValueError(
      f"{path}: tells {told} experts a layer, not {num_experts}; leave the number out"
    )
  return trace


def _from_csv(path: str | os.PathLike[str], num_experts: int | None) -> Trace:
  header: dict[str, str] = {}
  layer_bytes: dict[int, int] = {}
  rows = []
  try:
    for line in _lines(path):
      if line.startswith("#"):
        fields = dict(word.split("=", 1) for word in line[1:].split() if "=" in word)
        header |= fields
        if "layer" in fields:
          layer_bytes[int(fields["layer"])] = int(fields.get("expert_bytes", 0))
      else:
        rows.append(line)
    reader = csv.DictReader(rows)
    if not {*_COLUMNS} <= set(reader.fieldnames or ()):
      raise ValueError(f"expected the columns {', '.join(_COLUMNS)}")
    table = np.array([_numbers(row, number) for number, row in enumerate(reader, 1)])
    top_k = int(header["n_expert_used"])
    told = int(header["n_expert"]) if "n_expert" in header else num_experts
  except KeyError as error:
    raise ValueError(f"{path}: its header has no {error.args[0]}=") from error
  except (TypeError, ValueError) as error:
    raise ValueError(f"{path}: is no trace of a known format: {error}") from error
  if not len(table):
    raise ValueError(f"{path}: has no tokens")
  turn, phase, step, layer, rank, expert = table[:, :6].astype(np.int64).T
  (turns, _, phases), token = np.unique([turn, step, phase], axis=1, return_inverse=True)
  layers, index = np.unique(layer, return_inverse=True)
  if (rank < 0).any() or (rank >= top_k).any() or (expert < 0).any():
    raise ValueError(f"{path}: has slots outside 0..{top_k - 1}, or negative experts")
  shape = (len(turns), len(layers), top_k)
  experts, weights = np.full(shape, NO_EXPERT, np.int64), np.zeros(shape, np.float32)
  place = (token.reshape(-1), index, rank)
  if len(np.unique(np.ravel_multi_index(place, shape))) < len(rank):
    raise ValueError(f"{path}: tells a slot of a token and layer twice")
  experts[place], weights[place] = expert, table[:, 6]
  if expert.max() >= NO_EXPERT:
    raise ValueError(f"{path}: has an expert {expert.max()}, expected 0..{NO_EXPERT - 1}")
  return _checked(
    str(path),
    experts=experts.astype(np.uint16),
    weights=weights,
    sequence_offsets=np.searchsorted(turns, [*np.unique(turns), turns[-1] + 1]),
    phase=phases.astype(np.uint8),
    num_experts=np.full(len(layers), told or _round_up(int(expert.max())), np.int32),
    top_k=np.full(len(layers), top_k, np.int32),
    expert_bytes=np.array([layer_bytes.get(int(i), 0) for i in layers], np.int64),
    meta={"model": header["model"]} if "model" in header else {},
  )


def _numbers(row: dict[str, str], number: int) -> list[float]:
  """Returns the columns of a choice, the `number`th of the file."""
  for name in _COLUMNS:
    try:
      float(row[name])
    except (TypeError, ValueError):
      raise ValueError(f"{name} of choice {number} is {row[name]!r}, expected a number") from None
  return [float(row[name]) for name in _COLUMNS]


def _round_up(largest: int) -> int:
  """Returns the number of experts where only the largest id is known."""
  return -(-(largest + 1) // _ROUNDING) * _ROUNDING


def _lines(path: str | os.PathLike[str]) -> Iterator[str]:
  """Yields the lines of a text file, gzipped or not."""
  with open(path, "rb") as file:
    is_gzipped = file.read(2) == b"\x1f\x8b"
  opener = gzip.open if is_gzipped else open
  with opener(path, "rt", encoding="utf-8") as file:
    try:
      yield from file
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as error:
      raise ValueError(f"cannot be read as text: {error}") from error


def _checked(source: str, **arrays) -> Trace:
  """Returns a trace whose tokens are steps of their own, one after the other in row 0."""
  num_tokens = len(arrays["experts"])
  arrays["sequence_offsets"] = np.asarray(arrays["sequence_offsets"]).astype(np.int64)
  try:
    return Trace(
      step=np.arange(num_tokens, dtype=np.int32), row=np.zeros(num_tokens, np.uint16), **arrays
    )
  except ValueError as error:
    raise ValueError(f"{source}: {error}") from error
