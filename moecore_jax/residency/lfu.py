"""LFU: the expert that was selected least often since it entered its slot leaves."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from moecore_jax.residency import base


def lfu() -> base.Policy:
  """Returns the least-frequently-used policy.

  The state is one count per expert, float32 [N]: the tokens that selected it, beginning with 1 for
  the token it was loaded for.
  """

  def init(num_experts: int) -> Float32[Array, "N"]:
    return jnp.zeros(num_experts, jnp.float32)

  def observe(
    counts: Float32[Array, "N"],
    topk_ids: Int32[Array, "T A"],
    scores: Float32[Array, "T N"],
    valid: Bool[Array, "T"],
  ) -> Float32[Array, "N"]:
    del scores
    selected = base.selections(topk_ids, valid, counts.shape[0])
    return jnp.minimum(counts + jnp.sum(selected, axis=0, dtype=jnp.float32), base.MAX_COUNT)

  def placed(counts: Float32[Array, "N"], expert: Int32[Array, ""]) -> Float32[Array, "N"]:
    return jnp.where(base.matches(expert, counts.shape[0]), 1.0, counts)

  def priority(counts: Float32[Array, "N"], key: Array) -> Float32[Array, "N"]:
    del key
    return counts

  return base.Policy(init, observe, placed, priority)
