"""The replacement policies under the names that a configuration uses."""

from moecore_jax.residency import fifo, lfu, lru, random, rhac, static
from moecore_jax.residency.base import Policy
from moecore_jax.specs import PolicyName, ResidencySpec, RhacSpec

__all__ = ["Policy", "make_policy"]


def make_policy(spec: ResidencySpec | PolicyName, rhac_spec: RhacSpec | None = None) -> Policy:
  """Returns the policy of a residency spec, or of a name and, for `rhac`, its settings.

  Raises:
    ValueError: unknown name, or settings outside their range.
  """
  if isinstance(spec, ResidencySpec):
    return make_policy(spec.policy, spec.rhac)
  factories = {
    "rhac": lambda: rhac.rhac(rhac_spec or RhacSpec()),
    "lru": lru.lru,
    "lfu": lfu.lfu,
    "fifo": fifo.fifo,
    "random": random.random,
    "static": static.static,
  }
  if spec not in factories:
    raise ValueError(f"policy is {spec!r}, expected one of {', '.join(factories)}")
  return factories[spec]()
