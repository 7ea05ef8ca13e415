"""LRU: the expert that was used longest ago leaves."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from moecore_jax.residency import base


def lru() -> base.Policy:
  """Returns the least-recently-used policy.

  The state is one stamp per expert, float32 [N]: 0 is the newest use, -n lies n uses back. Uses
  follow each other token by token and within a token by rank, so that no two experts share a stamp;
  entering a slot is a use.
  """

  def init(num_experts: int) -> Float32[Array, "N"]:
    return jnp.zeros(num_experts, jnp.float32)

  def observe(
    stamps: Float32[Array, "N"],
    topk_ids: Int32[Array, "T A"],
    scores: Float32[Array, "T N"],
    valid: Bool[Array, "T"],
  ) -> Float32[Array, "N"]:
    del scores
    num_tokens, top_k = topk_ids.shape
    position = jnp.arange(num_tokens, dtype=jnp.int32)
    later = jnp.sum(
      valid[None] & (position[None] > position[:, None]), axis=1, dtype=jnp.int32
    )  # [T]
    rank = jnp.arange(1 - top_k, 1, dtype=jnp.int32)  # [A], the last rank is the newest
    used = (rank[None] - top_k * later[:, None]).astype(jnp.float32)  # [T, A]
    total = (top_k * jnp.sum(valid, dtype=jnp.int32)).astype(jnp.float32)
    hits = base.matches(topk_ids, stamps.shape[0]) & valid[:, None, None]  # [T, A, N]
    last = jnp.max(jnp.where(hits, used[:, :, None], -jnp.inf), axis=(0, 1))
    return jnp.maximum(last, jnp.maximum(stamps - total, -base.MAX_COUNT))

  def priority(stamps: Float32[Array, "N"], key: Array) -> Float32[Array, "N"]:
    del key
    return stamps

  return base.Policy(init, observe, base.newest, priority)
