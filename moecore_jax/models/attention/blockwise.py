"""Attention over cached rows, one block of rows at a time, up to the used context and no further.

Neither time nor temporary memory depends on the capacity of the cache: the loop ends at the last
block that any query sees.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Peak, sum and weighted mean of a running softmax: float32 [B, T, K, G], the same, [.., V]."""


def blockwise_attention(
  queries: jax.Array,
  positions: jax.Array,
  read_block: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
  block_tokens: int,
  value_dim: int,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Grouped-query attention with a running softmax.

  Args:
    queries: scaled queries [B, T, K, G, R], G heads for each of K key heads.
    positions: int32 [B, T], position of each query; it sees the rows 0..position.
    read_block: maps a block index (int32 scalar) to that block's keys [B, block_tokens, K, R] and
      values [B, block_tokens, K, V].
    block_tokens: rows of a block.
    value_dim: V.
    sinks: float32 [K, G], logits that take part in the softmax without a value.

  Returns:
    [B, T, K, G, V] of the queries' dtype: the softmax-weighted mean of the values.
  """
  start = start_softmax(queries, value_dim, sinks)
  return end_softmax(add_blocks(start, queries, positions, read_block, block_tokens), queries.dtype)


def window_attention(
  queries: jax.Array,
  positions: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  window: int,
  block_tokens: int,
  sinks: jax.Array | None = None,
  extend: Callable[..., Softmax] | None = None,
  extras: tuple[jax.Array, ...] = (),
) -> jax.Array:
  """Attention of queries to the last `window` tokens, themselves included.

  Args:
    queries: scaled queries [B, T, K, G, R] of consecutive tokens.
    positions: int32 [B, T]; rows before position 0 do not exist.
    keys: [B, window - 1 + T, K, R], of the window - 1 tokens before the first query, then of the
      queries' own tokens.
    values: [B, window - 1 + T, K, V].
    window: tokens that a query sees.
    block_tokens: queries that are worked on at a time.
    sinks: as in `blockwise_attention`.
    extend: adds what else the queries see, (softmax, queries, *extras) -> softmax, for some of them
      at a time.
    extras: what it needs of each query, [B, T, ...].

  Returns:
    [B, T, K, G, V] of the queries' dtype.
  """
  length = queries.shape[1]
  block = min(block_tokens, length)
  pad = -length % block
  queries, positions, keys, values, *padded = (
    jnp.pad(x, ((0, 0), (0, pad), *[(0, 0)] * (x.ndim - 2)))
    for x in (queries, positions, keys, values, *extras)
  )
  span = window - 1 + block
  row = jnp.arange(span, dtype=jnp.int32)[None, :]
  lane = jnp.arange(block, dtype=jnp.int32)[:, None]
  in_window = (row >= lane) & (row < lane + window)  # [block, span]

  def run_block(i):
    def part(x, count):
      return lax.dynamic_slice_in_dim(x, i * block, count, axis=1)

    q, at = part(queries, block), part(positions, block)
    row_positions = at[:, :, None] - (lane + window - 1 - row)[None]
    seen = in_window[None] & (row_positions >= 0)
    carry = start_softmax(q, values.shape[-1], sinks)
    carry = add_rows(carry, q, part(keys, span), part(values, span), seen)
    if extend is not None:
      carry = extend(carry, q, *(part(x, block) for x in padded))
    return end_softmax(carry, q.dtype)

  blocks = lax.map(run_block, jnp.arange((length + pad) // block, dtype=jnp.int32))
  blocks = jnp.moveaxis(blocks, 0, 1)  # [B, blocks, block, ...]
  return blocks.reshape(blocks.shape[0], length + pad, *blocks.shape[3:])[:, :length]


def start_softmax(queries: jax.Array, value_dim: int, sinks: jax.Array | None = None) -> Softmax:
  """Returns the running softmax of queries [B, T, K, G, R] that have seen nothing but sinks."""
  heads = queries.shape[:-1]
  mean = jnp.zeros((*heads, value_dim), jnp.float32)
  if sinks is None:
    return jnp.full(heads, -jnp.inf, jnp.float32), jnp.zeros(heads, jnp.float32), mean
  return jnp.broadcast_to(sinks[None, None], heads), jnp.ones(heads, jnp.float32), mean


def rows_of_block(
  block: jax.Array, size: int, num_rows: int | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the rows that a block holds, int32 [size], and which of them no earlier block held.

  Args:
    block: int32 scalar, its index.
    size: rows of a block.
    num_rows: rows in all, at least `size`: the last block ends with them, and begins the earlier;
      None: a multiple of `size`.
  """
  start = block * size
  first = start if num_rows is None else jnp.minimum(start, num_rows - size)
  rows = first + jnp.arange(size, dtype=jnp.int32)
  return rows, rows >= start


def add_blocks(
  carry: Softmax,
  queries: jax.Array,
  positions: jax.Array,
  read_block: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
  block_tokens: int,
  num_rows: int | None = None,
) -> Softmax:
  """Adds cached rows, block after block; arguments as of `blockwise_attention`, and

  Args:
    carry: what the queries have seen.
    queries, positions, read_block, block_tokens: position -1 sees no row.
    num_rows: as in `rows_of_block`.
  """

  def add_block(block, carry):
    keys, values = read_block(block)
    rows, is_new = rows_of_block(block, block_tokens, num_rows)
    seen = is_new[None, None] & (rows[None, None] <= positions[:, :, None])
    return add_rows(carry, queries, keys, values, seen)

  num_blocks = jnp.max(positions) // block_tokens + 1
  return lax.fori_loop(0, num_blocks, add_block, carry)


def add_rows(
  carry: Softmax, queries: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array
) -> Softmax:
  """Adds keys [B, S, K, R] and values [B, S, K, V], where `seen` [B, T, S] lets a query see them.

  A query without a sink must see one of the first rows that are added.
  """
  peak, total, mean = carry
  scores = jnp.einsum("btkgr,bskr->btkgs", queries, keys, preferred_element_type=jnp.float32)
  scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
  new_peak = jnp.maximum(peak, scores.max(-1))
  shrink = jnp.exp(peak - new_peak)
  shares = jnp.exp(scores - new_peak[..., None])
  added = jnp.einsum(
    "btkgs,bskv->btkgv", shares.astype(values.dtype), values, preferred_element_type=jnp.float32
  )
  return new_peak, total * shrink + shares.sum(-1), mean * shrink[..., None] + added


def add_picks(carry: Softmax, queries: jax.Array, rows: jax.Array, seen: jax.Array) -> Softmax:
  """Adds rows [B, T, S, R], key and value in one, of each query's own; bool `seen` [B, T, S]."""
  batch, length = rows.shape[:2]

  def fold(x):
    return x.reshape((batch * length, 1, *x.shape[2:]))

  rows, seen = rows.reshape((batch * length, -1, 1, rows.shape[-1])), fold(seen)
  carry = add_rows(jax.tree.map(fold, carry), fold(queries), rows, rows, seen)
  return jax.tree.map(lambda x: x.reshape((batch, length, *x.shape[2:])), carry)


def end_softmax(carry: Softmax, dtype: jnp.dtype) -> jax.Array:
  """Returns the weighted mean of the values."""
  _, total, mean = carry
  return (mean / total[..., None]).astype(dtype)
