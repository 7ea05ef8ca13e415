"""How many slots each layer gets of one budget, from hit rates measured at several sizes.

`allocate_heuristic` moves slots from layers that hardly miss them to layers that gain most;
`allocate_exact` finds the best allocation of the measured sizes, which the heuristic is judged by.
Both work on the host in NumPy, before an engine is built.

A layer may have every size of its curve between its fan-out k_l and its number of experts N_l.

Source: SPEC section 3.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

EPS_DROP = 0.02
TAU_LOW = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Curves:
  """Hit rates of the MoE layers by number of slots.

  Attributes:
    sizes: int64 [S], ascending numbers of slots.
    hit_rates: float64 [L, S], 0..1; what lies outside a layer's sizes is not read.
    expert_bytes: int64 [L], stored bytes of one expert (S_l).
    num_experts_per_tok: int64 [L], fan-out (k_l), the fewest slots.
    num_experts: int64 [L], experts (N_l), the most slots.
  """

  sizes: Int64[np.ndarray, "S"]
  hit_rates: Float64[np.ndarray, "L S"]
  expert_bytes: Int64[np.ndarray, "L"]
  num_experts_per_tok: Int64[np.ndarray, "L"]
  num_experts: Int64[np.ndarray, "L"]

  def __post_init__(self):
    if (np.diff(self.sizes) <= 0).any():
      raise ValueError(f"sizes is {self.sizes.tolist()}, expected ascending numbers of slots")
    shape = (len(self.expert_bytes), len(self.sizes))
    if self.hit_rates.shape != shape:
      raise ValueError(f"hit_rates is {list(self.hit_rates.shape)}, expected {list(shape)}")
    if not np.isfinite(self.hit_rates[self.is_allowed]).all():
      raise ValueError("hit_rates has a value that is not finite; replay with more tokens")

  @property
  def is_allowed(self) -> np.ndarray:
    """bool [L, S], sizes that a layer may have."""
    least, most = self.num_experts_per_tok[:, None], self.num_experts[:, None]
    return (least <= self.sizes) & (self.sizes <= most)

  def at(self, slots: np.ndarray, otherwise: float) -> np.ndarray:
    """Returns float64 [L], hit rates at int [L] slots; `otherwise` at a size not allowed."""
    column = np.minimum(np.searchsorted(self.sizes, slots), len(self.sizes) - 1)
    layer = np.arange(len(slots))
    is_known = (self.sizes[column] == slots) & self.is_allowed[layer, column]
    return np.where(is_known, self.hit_rates[layer, column], otherwise)

  def num_bytes(self, slots: Sequence[int] | np.ndarray) -> int:
    """Returns the bytes of the slots of all layers."""
    return int(np.dot(np.asarray(slots, np.int64), self.expert_bytes))

  def hit_rate(self, slots: Sequence[int], weights: Sequence[float] | None = None) -> float:
    """Returns the hit rate of all layers.

    Args:
      slots: of each layer, sizes of the curve.
      weights: share of each layer in the requests; None: all alike.
    """
    return float(np.average(self.at(np.asarray(slots), np.nan), weights=weights))


def default_step(uniform_slots: int) -> int:
  """Returns the step in which slots are moved: a fourteenth of the uniform allocation."""
  return max(1, round(uniform_slots / 14))


def candidate_sizes(uniform_slots: int, step: int, least: int, most: int) -> tuple[int, ...]:
  """Returns all sizes within least..most that whole steps from the uniform allocation reach."""
  first = least + (uniform_slots - least) % step
  return tuple(range(first, most + 1, step))


def allocate_heuristic(
  curves: Curves,
  uniform_slots: int,
  budget_bytes: int,
  step: int | None = None,
  eps_drop: float = EPS_DROP,
  tau_low: float = TAU_LOW,
) -> tuple[int, ...]:
  """Moves slots between layers, one transfer after another, from the uniform allocation.

  A donor has a hit rate above the median and loses at most eps_drop with its next step; a receiver
  lies tau_low or more below the median. The donor with the smallest loss gives to the receiver with
  the largest gain, as many steps as pay for one of the receiver's, if that raises the sum of the
  hit rates; where these two cannot, the next donor is asked, then the next receiver served. Ties go
  to the lower layer. Both sets are formed anew after each transfer.

  Args:
    curves: hit rates.
    uniform_slots: slots of each layer at the start.
    budget_bytes: most bytes of all slots.
    step: slots of a step; None: `default_step`.
    eps_drop: largest loss of a donor's step.
    tau_low: smallest distance of a receiver from the median.

  Returns:
    Slots of each layer.

  Raises:
    ValueError: the uniform allocation is not on a curve or does not fit the budget.
  """
  step = default_step(uniform_slots) if step is None else step
  slots = np.full(len(curves.expert_bytes), uniform_slots, np.int64)
  off_curve = np.flatnonzero(np.isnan(curves.at(slots, np.nan)))
  if off_curve.size:
    raise ValueError(
      f"uniform_slots is {uniform_slots}, which is no measured size of MoE layer {off_curve[0]} "
      f"within {curves.num_experts_per_tok[off_curve[0]]}..{curves.num_experts[off_curve[0]]}"
    )
  if curves.num_bytes(slots) > budget_bytes:
    raise ValueError(
      _over_budget(f"{uniform_slots} slots in each layer", curves, slots, budget_bytes)
    )
  while (
    transfer := _next_transfer(curves, slots, budget_bytes, step, eps_drop, tau_low)
  ) is not None:
    donor, receiver, given = transfer
    slots[donor] -= given
    slots[receiver] += step
  return tuple(slots.tolist())


def _next_transfer(
  curves: Curves, slots: np.ndarray, budget: int, step: int, eps_drop: float, tau_low: float
) -> tuple[int, int, int] | None:
  """Returns (donor, receiver, slots that the donor gives), None if there is no transfer."""
  rate = curves.at(slots, np.nan)
  loss = rate - curves.at(slots - step, -np.inf)
  gain = curves.at(slots + step, -np.inf) - rate
  median = np.median(rate)
  donors = np.flatnonzero((rate > median) & (loss <= eps_drop))
  receivers = np.flatnonzero((rate <= median - tau_low) & np.isfinite(gain))
  spare = budget - curves.num_bytes(slots)
  for receiver in receivers[np.argsort(-gain[receivers], kind="stable")]:
    wanted = step * int(curves.expert_bytes[receiver]) - spare
    for donor in donors[np.argsort(loss[donors], kind="stable")]:
      given = step * max(1, -(-wanted // (step * int(curves.expert_bytes[donor]))))
      lost = rate[donor] - curves.at(slots - given, -np.inf)[donor]
      if gain[receiver] > lost:
        return int(donor), int(receiver), given
  return None


def allocate_exact(
  curves: Curves, budget_bytes: int, weights: Sequence[float] | None = None
) -> tuple[int, ...]:
  """Returns the allocation with the highest hit rate that fits the budget.

  Dynamic programming over the layers: of all allocations of the first layers only those are kept
  that no cheaper or equally cheap one reaches. There are at most as many as distinct sums of bytes:
  layers * sizes where all experts are of one size on an even grid, the product over the sizes of
  expert otherwise; time is that times layers * sizes. Among equals the cheaper wins.

  Args:
    curves: hit rates; they may fall.
    budget_bytes: most bytes of all slots.
    weights: share of each layer in the requests; None: all alike.

  Raises:
    ValueError: the smallest sizes do not fit the budget, or a layer has no size at all.
  """
  num_layers = len(curves.expert_bytes)
  share = np.ones(num_layers) if weights is None else np.asarray(weights, np.float64)
  options = [np.flatnonzero(allowed) for allowed in curves.is_allowed]
  for layer, columns in enumerate(options):
    if not columns.size:
      raise ValueError(f"MoE layer {layer} has no measured size between its k and its experts")
  least = np.array([curves.sizes[columns[0]] for columns in options])
  if curves.num_bytes(least) > budget_bytes:
    raise ValueError(_over_budget("the smallest sizes", curves, least, budget_bytes))
  # Bytes that the layers behind each one take at least.
  behind = np.cumsum((least * curves.expert_bytes)[::-1])[::-1] - least * curves.expert_bytes
  used, value = np.zeros(1, np.int64), np.zeros(1)
  steps = []
  for layer, columns in enumerate(options):
    cost = curves.sizes[columns] * curves.expert_bytes[layer]
    worth = share[layer] * curves.hit_rates[layer, columns]
    all_used = (used[:, None] + cost).reshape(-1)
    all_value = (value[:, None] + worth).reshape(-1)
    order = np.lexsort((-all_value, all_used))
    order = order[all_used[order] <= budget_bytes - behind[layer]]
    best_before = np.maximum.accumulate(np.append(-np.inf, all_value[order]))[:-1]
    kept = order[all_value[order] > best_before]
    used, value = all_used[kept], all_value[kept]
    steps.append((kept // len(columns), columns[kept % len(columns)]))
  state, slots = len(value) - 1, []
  for parents, columns in reversed(steps):
    slots.append(int(curves.sizes[columns[state]]))
    state = parents[state]
  return tuple(reversed(slots))


def _over_budget(what: str, curves: Curves, slots: np.ndarray, budget_bytes: int) -> str:
  needed = curves.num_bytes(slots)
  return (
    f"{what} need {needed / 1e9:.3f} GB of expert slots, the budget is {budget_bytes / 1e9:.3f} GB;"
    " lower residency.slots_per_layer, or raise the budget"
  )
