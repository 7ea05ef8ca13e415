"""Random replacement: any resident leaves, all with the same chance."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from moecore_jax.residency import base


def random() -> base.Policy:
  """Returns the random policy.

  The state is float32 [N] zeros, there to tell the number of experts. Whoever asks for priorities
  gives a fresh key for each victim.
  """

  def init(num_experts: int) -> Float32[Array, "N"]:
    return jnp.zeros(num_experts, jnp.float32)

  def priority(state: Float32[Array, "N"], key: Array) -> Float32[Array, "N"]:
    return jax.random.uniform(key, state.shape)

  return base.Policy(init, lambda state, *step: state, lambda state, expert: state, priority)
