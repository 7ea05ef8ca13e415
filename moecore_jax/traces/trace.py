"""A routing trace: which experts every token of a run chose, and what is needed to run residency on
it again.

Tokens lie sequence after sequence, within a sequence by position. `step` and `row` tell how the
engine ran them: tokens of one step ran in one call of a program, in the order (position, row).

Vocabulary: a *sequence* is one request, prompt and output; a *step* is one call of a compiled
program, a prefill chunk or a decode step; a *call number* is its place among all calls since the
engine was built, those without tokens included.
"""

import dataclasses
import enum
from typing import Any, Self

import numpy as np

from moecore_jax.runtime.state import NO_EXPERT
from moecore_jax.specs import ResidencySpec

PER_TOKEN = ("experts", "phase", "step", "row")
OPTIONAL_PER_TOKEN = ("accepted", "staged", "scores", "weights", "predicted")


class Phase(enum.IntEnum):
  """What a token's step was."""

  PREFILL = 0
  DECODE = 1


class EventKind(enum.IntEnum):
  """What happened to the cache. ADMISSION: a prompt came. WARM_START: while its layers were staged,
  their slots were filled and their signals started anew. RESET: tables and signals were emptied.
  """

  ADMISSION = 0
  WARM_START = 1
  RESET = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Events:
  """What happened between steps, in order.

  Attributes:
    step: int32 [E], call number that the event comes right before.
    kind: uint8 [E], see EventKind.
    row: uint16 [E], batch row that it concerns, 65535 for all.
  """

  step: np.ndarray
  kind: np.ndarray
  row: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
  """A trace of T tokens in S sequences through L MoE layers, in host memory.

  Attributes:
    experts: uint16 [T, L, A], chosen experts in top-k order, 65535 for none; A is the largest
      fan-out.
    sequence_offsets: int64 [S + 1], sequence s is the tokens `offsets[s]:offsets[s + 1]`.
    phase: uint8 [T], see Phase.
    step: int32 [T], call number of each token's step.
    row: uint16 [T], its batch row.
    num_experts: int32 [L], routed experts of each layer; the largest is N.
    top_k: int32 [L], fan-out of each layer.
    expert_bytes: int64 [L], stored bytes of one expert; 0 where unknown.
    accepted: bool [T], False for drafted tokens that verification rejected.
    staged: bool [T, L], tokens whose layer ran from a staging buffer, apart from the cache.
    scores: float32 [T, L, N], selection scores, -inf where masked or beyond a layer's experts.
    weights: float16 or float32 [T, L, A], mixing weights.
    predicted: uint16 [T, L, A], experts that the layer before predicted, in top-k order.
    domain: str [S], domain of each sequence, "" for none.
    events: what happened between steps.
    residency: the policy and its settings that the run had.
    seed: seed of the engine's random key.
    meta: anything else, in JSON types.

  Raises:
    ValueError: an array has another shape, type or content than stated.
  """

  experts: np.ndarray
  sequence_offsets: np.ndarray
  phase: np.ndarray
  step: np.ndarray
  row: np.ndarray
  num_experts: np.ndarray
  top_k: np.ndarray
  expert_bytes: np.ndarray
  accepted: np.ndarray | None = None
  staged: np.ndarray | None = None
  scores: np.ndarray | None = None
  weights: np.ndarray | None = None
  predicted: np.ndarray | None = None
  domain: np.ndarray | None = None
  events: Events | None = None
  residency: ResidencySpec | None = None
  seed: int | None = None
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    _check(self)

  @property
  def num_tokens(self) -> int:
    return self.experts.shape[0]

  @property
  def num_layers(self) -> int:
    return self.experts.shape[1]

  def head(self, num_tokens: int) -> Self:
    """Returns the first tokens in stored order; the last sequence may be cut."""
    return self.select(np.arange(self.num_tokens) < num_tokens)

  def select(self, keep: np.ndarray) -> Self:
    """Returns the tokens where `keep` (bool [T]) holds; sequences that lose all of them go."""
    kept = np.append(0, np.cumsum(keep))[self.sequence_offsets]
    stays = np.diff(kept) > 0
    per_token = {
      name: value[keep]
      for name in (*PER_TOKEN, *OPTIONAL_PER_TOKEN)
      if (value := getattr(self, name)) is not None
    }
    return dataclasses.replace(
      self,
      **per_token,
      sequence_offsets=np.append(0, kept[1:][stays]).astype(np.int64),
      domain=None if self.domain is None else self.domain[stays],
    )


def layer_groups(trace: Trace) -> list[np.ndarray]:
  """Returns the indices of layers with equal experts and fan-out, group by group."""
  shapes = np.stack([trace.num_experts, trace.top_k], axis=1)
  _, group = np.unique(shapes, axis=0, return_inverse=True)
  return [np.flatnonzero(group.reshape(-1) == g) for g in range(group.max() + 1)]


def _check(trace: Trace) -> None:
  """Raises a ValueError that names the first array that is not as `Trace` states."""
  for name in ("experts", "sequence_offsets", "num_experts"):
    if not isinstance(getattr(trace, name), np.ndarray):
      raise ValueError(f"{name} is {type(getattr(trace, name)).__name__}, expected an array")
  of_choice = trace.experts.shape
  if len(of_choice) != 3 or not all(of_choice[1:]):
    raise ValueError(f"experts has shape {list(of_choice)}, expected [tokens, layers, k]")
  tokens, layers, width = of_choice
  sequences = max(trace.sequence_offsets.size - 1, 0)
  largest = int(trace.num_experts.max(initial=0))
  expected = {
    "experts": ("uint16", of_choice),
    "sequence_offsets": ("int64", (sequences + 1,)),
    "phase": ("uint8", (tokens,)),
    "step": ("int32", (tokens,)),
    "row": ("uint16", (tokens,)),
    "num_experts": ("int32", (layers,)),
    "top_k": ("int32", (layers,)),
    "expert_bytes": ("int64", (layers,)),
    "accepted": ("bool", (tokens,)),
    "staged": ("bool", (tokens, layers)),
    "scores": ("float32", (tokens, layers, largest)),
    "weights": ("float16 float32", of_choice),
    "predicted": ("uint16", of_choice),
  }
  for name, (dtypes, shape) in expected.items():
    if (value := getattr(trace, name)) is not None:
      _check_array(name, value, dtypes, shape)
  num_experts, top_k = trace.num_experts, trace.top_k
  if (num_experts < 1).any() or (num_experts >= NO_EXPERT).any():
    raise ValueError(f"num_experts has {num_experts.tolist()}, expected 1..{NO_EXPERT - 1}")
  if (top_k < 1).any() or (top_k > np.minimum(num_experts, width)).any():
    raise ValueError(
      f"top_k has {top_k.tolist()}, expected 1..{width} and no more than the layer's experts"
    )
  for name in ("experts", "predicted"):
    if (ids := getattr(trace, name)) is not None:
      _check_ids(name, ids, num_experts, top_k)
  _check_order(trace)
  if (trace.expert_bytes < 0).any():
    raise ValueError(f"expert_bytes has {trace.expert_bytes.min()}, expected numbers >= 0")
  domain, residency = trace.domain, trace.residency
  if domain is not None and (domain.dtype.kind != "U" or domain.shape != (sequences,)):
    raise ValueError(f"domain is {domain.dtype}{list(domain.shape)}, expected str [{sequences}]")
  if trace.events is not None:
    _check_events(trace.events)
  if residency is not None and len(residency.slots) != layers:
    raise ValueError(f"residency has {len(residency.slots)} slots, expected {layers}, the layers")


def _check_array(name: str, value: Any, dtypes: str, shape: tuple[int, ...]) -> None:
  is_array = isinstance(value, np.ndarray)
  if not is_array or value.dtype.name not in dtypes.split() or value.shape != shape:
    got = f"{value.dtype}{list(value.shape)}" if is_array else type(value).__name__
    raise ValueError(f"{name} is {got}, expected {' or '.join(dtypes.split())}{list(shape)}")


def _check_ids(name: str, ids: np.ndarray, num_experts: np.ndarray, top_k: np.ndarray) -> None:
  is_none = ids == NO_EXPERT
  wrong = ~is_none & (ids >= num_experts[:, None])
  if wrong.any():
    token, layer, rank = np.argwhere(wrong)[0]
    raise ValueError(
      f"{name}[{token}, {layer}, {rank}] is {ids[token, layer, rank]}, expected 0.."
      f"{num_experts[layer] - 1} or {NO_EXPERT}"
    )
  beyond = ~is_none & (np.arange(ids.shape[2]) >= top_k[:, None])
  if beyond.any():
    token, layer, rank = np.argwhere(beyond)[0]
    raise ValueError(
      f"{name}[{token}, {layer}, {rank}] names an expert, top_k of the layer is {top_k[layer]}"
    )
  in_order = np.sort(ids, axis=2)
  twice = (in_order[:, :, 1:] == in_order[:, :, :-1]) & (in_order[:, :, 1:] != NO_EXPERT)
  if twice.any():
    token, layer, _ = np.argwhere(twice)[0]
    raise ValueError(f"{name}[{token}, {layer}] names an expert twice")


def _check_order(trace: Trace) -> None:
  """Sequences cover the tokens, their steps do not go back, and a step has one phase."""
  offsets, step, phase = trace.sequence_offsets, trace.step, trace.phase
  tokens = len(step)
  if offsets.size < 1 or offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) < 0).any():
    raise ValueError(f"sequence_offsets do not rise from 0 to {tokens}, the number of tokens")
  if (phase > max(Phase)).any():
    raise ValueError(f"phase has {phase.max()}, expected 0 (prefill) or 1 (decode)")
  begins = np.isin(np.arange(tokens), offsets)
  if (step < 0).any() or ((np.diff(step) < 0) & ~begins[1:]).any():
    raise ValueError("step is negative, or goes back within a sequence")
  order = np.argsort(step, kind="stable")
  is_same = np.diff(step[order]) == 0
  if (is_same & (phase[order][1:] != phase[order][:-1])).any():
    raise ValueError("phase differs among the tokens of a step")


def _check_events(events: Events) -> None:
  count = np.size(events.step)
  for name, dtype in (("step", "int32"), ("kind", "uint8"), ("row", "uint16")):
    _check_array(f"event_{name}", getattr(events, name), dtype, (count,))
  if (events.kind > max(EventKind)).any() or (np.diff(events.step) < 0).any():
    raise ValueError("event_kind is unknown, or event_step goes back")
