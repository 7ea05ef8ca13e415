"""Attention over a cache of latent rows, one block of rows at a time, up to the used context and no
further.

Neither time nor temporary memory depends on the capacity of the cache: the loop ends at the last
block that any query sees.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128


def padded_row_dim(latent_dim: int) -> int:
  """Returns the width of a cached row: latent_dim rounded up to whole lanes of 128 numbers."""
  return -(-latent_dim // LANES) * LANES


def pad_rows(rows: jax.Array) -> jax.Array:
  """Pads the last axis with zeros to whole lanes."""
  width = padded_row_dim(rows.shape[-1])
  return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, width - rows.shape[-1])])


def blockwise_attention(
  queries: jax.Array,
  positions: jax.Array,
  read_block: Callable[[jax.Array], jax.Array],
  block_tokens: int,
) -> jax.Array:
  """Multi-query attention with a running softmax.

  Args:
    queries: scaled queries [B, T, H, R].
    positions: int32 [B, T], position of each query; it sees the rows 0..position.
    read_block: maps a block index (int32 scalar) to that block's rows [B, block_tokens, R].
    block_tokens: rows of a block.

  Returns:
    [B, T, H, R] of the queries' dtype: the softmax-weighted mean of the rows.
  """
  batch, length, heads, width = queries.shape

  def add_block(block, carry):
    peak, total, mean = carry
    rows = read_block(block)
    scores = jnp.einsum("bthr,bsr->bths", queries, rows, preferred_element_type=jnp.float32)
    row_positions = block * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
    seen = row_positions[None, None, None, :] <= positions[:, :, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    new_peak = jnp.maximum(peak, scores.max(-1))
    shrink = jnp.exp(peak - new_peak)
    shares = jnp.exp(scores - new_peak[..., None])
    added = jnp.einsum(
      "bths,bsr->bthr", shares.astype(rows.dtype), rows, preferred_element_type=jnp.float32
    )
    return new_peak, total * shrink + shares.sum(-1), mean * shrink[..., None] + added

  start = (
    jnp.full((batch, length, heads), -jnp.inf, jnp.float32),
    jnp.zeros((batch, length, heads), jnp.float32),
    jnp.zeros((batch, length, heads, width), jnp.float32),
  )
  num_blocks = jnp.max(positions) // block_tokens + 1
  _, total, mean = lax.fori_loop(0, num_blocks, add_block, start)
  return (mean / total[..., None]).astype(queries.dtype)
