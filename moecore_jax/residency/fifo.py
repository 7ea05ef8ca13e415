"""FIFO: the expert that entered its slot first leaves."""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from moecore_jax.residency import base


def fifo() -> base.Policy:
  """Returns the first-in-first-out policy.

  The state is one stamp per expert, float32 [N]: 0 entered last, -n entered n loads before.
  """

  def init(num_experts: int) -> Float32[Array, "N"]:
    return jnp.zeros(num_experts, jnp.float32)

  def observe(
    stamps: Float32[Array, "N"], topk_ids: Array, scores: Array, valid: Array
  ) -> Float32[Array, "N"]:
    del topk_ids, scores, valid
    return stamps

  def priority(stamps: Float32[Array, "N"], key: Array) -> Float32[Array, "N"]:
    del key
    return stamps

  return base.Policy(init, observe, base.newest, priority)
