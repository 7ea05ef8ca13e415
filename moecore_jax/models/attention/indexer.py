"""The indexer of sparse attention: which keys each query attends to.

Source: DeepSeek-V3.2 (2025), section 2.1.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moecore_jax.models.attention.blockwise import rows_of_block
from moecore_jax.models.layers import apply_rope, linear, split_heads
from moecore_jax.specs import IndexerSpec

KEY_NORM_EPS = 1e-6
NO_PICK = -1


class IndexQueries(nnx.Module):
  """The queries of an indexer and the weights of their heads.

  Args:
    spec: shapes.
    query_dim: width of the low-rank queries that it starts from.
    embed_dim: width of the stream (D).
    dtype: of parameters and activations.
    rngs: initialises parameters.
  """

  def __init__(
    self, spec: IndexerSpec, query_dim: int, embed_dim: int, dtype: jnp.dtype, rngs: nnx.Rngs
  ):
    self.spec = spec
    self.q_proj = linear(query_dim, spec.num_heads * spec.head_dim, dtype, rngs)
    self.weights_proj = linear(embed_dim, spec.num_heads, dtype, rngs)

  def queries(
    self, low: jax.Array, x: jax.Array, positions: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns queries [B, T, H, R] and float32 weights [B, T, H] of their heads.

    Args:
      low: low-rank queries [B, T, Q].
      x: normed stream [B, T, D].
      positions: int32 [B, T].
    """
    spec = self.spec
    q = split_heads(self.q_proj(low), spec.num_heads)
    weights = self.weights_proj(x).astype(jnp.float32) * (spec.num_heads * spec.head_dim) ** -0.5
    return apply_rope(q, positions, spec.rope), weights


class Indexer(IndexQueries):
  """Scores tokens for queries, a weighted sum over heads of relu(query . key), by keys of its own;
  arguments as of IndexQueries.
  """

  def __init__(
    self, spec: IndexerSpec, query_dim: int, embed_dim: int, dtype: jnp.dtype, rngs: nnx.Rngs
  ):
    super().__init__(spec, query_dim, embed_dim, dtype, rngs)
    self.k_proj = linear(embed_dim, spec.head_dim, dtype, rngs)
    self.k_norm = nnx.LayerNorm(
      spec.head_dim, epsilon=KEY_NORM_EPS, dtype=dtype, param_dtype=dtype, rngs=rngs
    )

  def keys(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the keys to cache, [B, T, R], of a normed stream [B, T, D]."""
    return apply_rope(self.k_norm(self.k_proj(x)), positions, self.spec.rope)


def index_scores(queries: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
  """Returns float32 scores [B, T, S] of keys [B, S, R] for queries [B, T, H, R]."""
  products = jnp.einsum("bthr,bsr->bths", queries, keys, preferred_element_type=jnp.float32)
  return jnp.einsum("bths,bth->bts", jax.nn.relu(products), weights)


def best_keys(
  queries: jax.Array,
  weights: jax.Array,
  positions: jax.Array,
  read_block: Callable[[jax.Array], jax.Array],
  block_tokens: int,
  topk: int,
  num_keys: int | None = None,
) -> jax.Array:
  """Returns the best keys of each query, a block of keys at a time.

  Args:
    queries: [B, T, H, R].
    weights: float32 [B, T, H].
    positions: int32 [B, T]; a query sees the keys 0..position, -1: none.
    read_block: maps a block index to the block's keys [B, block_tokens, R].
    block_tokens: keys of a block.
    topk: keys to choose.
    num_keys: as num_rows of `rows_of_block`.

  Returns:
    int32 [B, T, topk], positions of keys, best first; NO_PICK where fewer are visible.
  """

  def add_block(block, carry):
    at, is_new = rows_of_block(block, block_tokens, num_keys)
    scores = index_scores(queries, weights, read_block(block))
    at = at[None, None]
    seen = is_new[None, None] & (at <= positions[:, :, None])
    scores = jnp.concatenate([carry[0], jnp.where(seen, scores, -jnp.inf)], axis=-1)
    ids = jnp.concatenate([carry[1], jnp.where(seen, at, NO_PICK)], axis=-1)
    best, place = lax.top_k(scores, topk)
    return best, jnp.take_along_axis(ids, place, axis=-1)

  shape = (*positions.shape, topk)
  start = jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, NO_PICK, jnp.int32)
  num_blocks = jnp.max(positions) // block_tokens + 1
  return lax.fori_loop(0, num_blocks, add_block, start)[1]
