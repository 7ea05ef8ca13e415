"""Static residency: what a warm start or the first misses put into the slots stays there."""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from moecore_jax.residency import base


def static() -> base.Policy:
  """Returns the policy that never evicts: with no slot empty, a miss runs from a transient row.

  The state is float32 [N] zeros, there to tell the number of experts.
  """

  def init(num_experts: int) -> Float32[Array, "N"]:
    return jnp.zeros(num_experts, jnp.float32)

  def priority(state: Float32[Array, "N"], key: Array) -> Float32[Array, "N"]:
    del key
    return state

  return base.Policy(
    init, lambda state, *step: state, lambda state, expert: state, priority, evicts=False
  )
