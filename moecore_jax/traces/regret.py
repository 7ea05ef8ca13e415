"""How far a policy is from the best that any could do: between LRU and Belady on one trace."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from moecore_jax.specs import RhacSpec
from moecore_jax.traces.replay import Counting, ReplayPolicy, hit_rates
from moecore_jax.traces.trace import Trace


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Hit rates of a policy beside its bounds, float64 [L, S] for S numbers of slots.

  Attributes:
    slots: slots of each layer, S numbers.
    policy, lru, belady: hit rates.
    requests: int64 [L], experts that were asked for.
  """

  slots: tuple[int, ...]
  policy: np.ndarray
  lru: np.ndarray
  belady: np.ndarray
  requests: np.ndarray

  def mean(self, rates: np.ndarray) -> np.ndarray:
    """Returns the hit rate over all layers' requests, float64 [S]."""
    return self.requests @ rates / max(self.requests.sum(), 1)

  @property
  def regret(self) -> np.ndarray:
    """float64 [S], hit rate that Belady has and the policy lacks."""
    return self.mean(self.belady) - self.mean(self.policy)

  @property
  def gap_closed_frac(self) -> np.ndarray:
    """float64 [S], share of the way from LRU to Belady; not a number where they are equal."""
    gap = self.mean(self.belady) - self.mean(self.lru)
    gain = self.mean(self.policy) - self.mean(self.lru)
    return np.divide(gain, gap, out=np.full_like(gap, np.nan), where=gap > 0)


def compare(
  trace: Trace,
  policy: ReplayPolicy,
  slots: Sequence[int],
  counting: Counting = "protected",
  rhac: RhacSpec | None = None,
) -> Comparison:
  """Replays a trace from a cold start under a policy, LRU and Belady.

  Args:
    trace: the trace; each token counts as a generated one.
    policy: the policy.
    slots: numbers of slots of every layer.
    counting: "protected" or "sequential".
    rhac: settings of the policy "rhac".

  Raises:
    ValueError: as in `replay`.
  """
  names: tuple[ReplayPolicy, ...] = (policy, "lru", "belady")
  rates = {
    name: hit_rates(trace, slots, name, counting=counting, rhac=rhac)
    for name in dict.fromkeys(names)
  }
  requests = np.sum(trace.experts < trace.num_experts[:, None], axis=(0, 2))
  return Comparison(tuple(slots), rates[policy], rates["lru"], rates["belady"], requests)
