"""Attention to the last tokens and to compressed entries of all tokens; key and value of all heads
are one vector.

A query sees the entries of all windows of tokens that are closed, its own token counted; with an
indexer the best of them only. Window and entries share one softmax.

Source: DeepSeek-V4 (2026).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moecore_jax.models.attention.blockwise import (
  Softmax,
  add_blocks,
  add_picks,
  add_rows,
  end_softmax,
  start_softmax,
  window_attention,
)
from moecore_jax.models.attention.cache import LayerCache, pad_rows
from moecore_jax.models.attention.compressor import Compressor, EntryIndexer
from moecore_jax.models.attention.indexer import best_keys
from moecore_jax.models.layers import apply_rope, linear, rms_norm, split_heads, unit_rms
from moecore_jax.specs import CompressedSpec

QUERIES_AT_A_TIME = 16
"""Where an indexer chooses, the entries of so many queries are gathered at once."""


class CompressedAttention(nnx.Module):
  """One attention layer.

  Args:
    spec: shapes.
    embed_dim: width of the stream (D).
    eps: of all norms.
    dtype: of parameters and activations; sinks are float32.
    rngs: initialises parameters.
  """

  def __init__(
    self, spec: CompressedSpec, embed_dim: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs
  ):
    self.spec, self.eps = spec, eps
    width, compression = spec.num_heads * spec.head_dim, spec.compression
    self.q_a_proj = linear(embed_dim, spec.q_lora_rank, dtype, rngs)
    self.q_a_norm = rms_norm(spec.q_lora_rank, eps, dtype, rngs)
    self.q_b_proj = linear(spec.q_lora_rank, width, dtype, rngs)
    self.kv_proj = linear(embed_dim, spec.head_dim, dtype, rngs)
    self.kv_norm = rms_norm(spec.head_dim, eps, dtype, rngs)
    self.sinks = nnx.Param(jnp.zeros((spec.num_heads,), jnp.float32))
    init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
    shape = (spec.o_groups, spec.o_lora_rank, width // spec.o_groups)
    self.o_a_proj = nnx.Param(init(rngs.params(), shape, dtype))
    self.o_b_proj = linear(spec.o_groups * spec.o_lora_rank, embed_dim, dtype, rngs)
    self.compressor = self.indexer = None
    if compression is not None:
      self.compressor = nnx.data(
        Compressor(compression, spec.rope, embed_dim, spec.head_dim, eps, dtype, rngs)
      )
      if compression.indexer is not None:
        self.indexer = nnx.data(
          EntryIndexer(
            compression.indexer, compression, spec.q_lora_rank, embed_dim, eps, dtype, rngs
          )
        )

  def low_rank(self, x: jax.Array) -> jax.Array:
    """Returns what queries are projected from: [B, T, q_lora_rank] for a normed stream."""
    return self.q_a_norm(self.q_a_proj(x))

  def queries(self, low: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns scaled queries [B, T, 1, H, R] for what `low_rank` returns."""
    spec = self.spec
    q = split_heads(self.q_b_proj(low), spec.num_heads)[:, :, None]
    q = apply_rope(unit_rms(q, self.eps).astype(low.dtype), positions, spec.rope)
    return q * jnp.asarray(spec.head_dim**-0.5, q.dtype)

  def keys_values(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the vector of each token, [B, T, R]."""
    return apply_rope(self.kv_norm(self.kv_proj(x)), positions, self.spec.rope)

  def attend(self, x: jax.Array, cache: LayerCache, block: int) -> tuple[jax.Array, LayerCache]:
    """Attends to the cache and to the step's own tokens.

    Args:
      x: normed stream [B, T, D].
      cache: of this layer.
      block: tokens or entries that are worked on at a time.

    Returns:
      [B, T, D], and the cache with the tokens and the entries that they complete.
    """
    spec, positions = self.spec, cache.tokens.positions
    low = self.low_rank(x)
    queries = self.queries(low, positions)
    rows, cache = cache.slide("window", pad_rows(self.keys_values(x, positions)))
    extend, extras = None, ()
    if self.compressor is not None and "entries" in cache.arrays:
      cache = self.compressor.write(x, cache, "entries")
      extras = (self._last_entry(positions),)
      if self.indexer is not None and "index_entries" in cache.arrays:
        cache = self.indexer.compressor.write(x, cache, "index_entries")
        extras = (*extras, *self.indexer.queries(low, x, positions))
        block = min(block, QUERIES_AT_A_TIME)
      extend = _Entries(spec, cache, block)
    rows = rows[:, :, None, : spec.head_dim]
    attended = window_attention(
      queries, positions, rows, rows, spec.window, block, self._sinks(), extend, extras
    )
    return self.output(attended, positions), cache

  def output(self, attended: jax.Array, positions: jax.Array) -> jax.Array:
    """Maps attended vectors [B, T, 1, H, R] to the stream [B, T, D]."""
    spec = self.spec
    turned = apply_rope(attended, -positions, spec.rope)
    groups = turned.reshape((*turned.shape[:2], spec.o_groups, -1))
    low = jnp.einsum("btgi,gri->btgr", groups, self.o_a_proj[...])
    return self.o_b_proj(low.reshape((*low.shape[:2], -1)))

  def __call__(
    self, x: jax.Array, positions: jax.Array, picks: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array | None]:
    """Causal attention of a whole sequence with itself, without a cache.

    Args:
      x: normed stream [B, T, D].
      positions: int32 [B, T], 0, 1, ..; without compression plus any offset a row.
      picks: not used.

    Returns:
      [B, T, D], and the entries that the indexer chose, int32 [B, T, topk], None without one.
    """
    spec, low = self.spec, self.low_rank(x)
    rows = self.keys_values(x, positions)
    distance = positions[:, :, None] - positions[:, None, :]
    seen, picks = (distance >= 0) & (distance < spec.window), None
    if self.compressor is not None:
      entries = self.compressor(x)
      number, last = jnp.arange(entries.shape[1], dtype=jnp.int32), self._last_entry(positions)
      is_seen = number[None, None] <= last[:, :, None]
      if self.indexer is not None:
        keys = self.indexer.compressor(x)
        count = keys.shape[1]
        topk = min(self.indexer.spec.topk, count)
        picks = best_keys(
          *self.indexer.queries(low, x, positions), last, lambda _: keys, count, topk
        )
        is_seen = jnp.any(picks[..., None] == number[None, None, None], axis=2)
      rows = jnp.concatenate([rows, entries], axis=1)
      seen = jnp.concatenate([seen, is_seen], axis=2)
    rows = rows[:, :, None]
    carry = start_softmax(queries := self.queries(low, positions), spec.head_dim, self._sinks())
    attended = end_softmax(add_rows(carry, queries, rows, rows, seen), x.dtype)
    return self.output(attended, positions), picks

  def _sinks(self) -> jax.Array:
    return self.sinks[...][None]

  def _last_entry(self, positions: jax.Array) -> jax.Array:
    """Returns the last entry that a query sees, -1 for none."""
    assert self.spec.compression is not None
    return (positions + 1) // self.spec.compression.ratio - 1


class _Entries:
  """Adds the entries of a layer to what some queries have seen."""

  def __init__(self, spec: CompressedSpec, cache: LayerCache, block: int):
    assert spec.compression is not None
    self.spec, self.cache, self.indexer = spec, cache, spec.compression.indexer
    self.num_entries = cache.arrays["entries"].shape[2]
    self.block = min(block, self.num_entries)

  def __call__(
    self,
    carry: Softmax,
    queries: jax.Array,
    last: jax.Array,
    index_queries: jax.Array | None = None,
    weights: jax.Array | None = None,
  ) -> Softmax:
    """Returns the softmax with the entries; index queries only where there can be too many."""
    block, count, indexer = self.block, self.num_entries, self.indexer
    if indexer is None or index_queries is None or weights is None:
      return add_blocks(carry, queries, last, self._read_block, block, count)
    # Each query by what it sees itself: what is beside it does not matter. In loops that turn as
    # often as needed, or not at all: a condition would copy the cache.
    is_sparse = last >= indexer.topk
    of_all, of_best = jnp.where(is_sparse, -1, last), jnp.where(is_sparse, last, -1)
    carry = add_blocks(carry, queries, of_all, self._read_block, block, count)
    # As many keys at a time as are kept, so that most of the sorting is of new ones.
    size = min(max(block, indexer.topk), count)

    def add_best(_, carry):
      picks = best_keys(
        index_queries,
        weights,
        of_best,
        lambda i: self.cache.read("index_entries", i * size, size)[..., : indexer.head_dim],
        size,
        indexer.topk,
        count,
      )
      rows = self.cache.gather("entries", jnp.maximum(picks, 0))
      return add_picks(carry, queries, rows[..., : self.spec.head_dim], picks >= 0)

    return lax.fori_loop(0, jnp.any(is_sparse).astype(jnp.int32), add_best, carry)

  def _read_block(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = self.cache.read("entries", i * self.block, self.block)
    rows = rows[:, :, None, : self.spec.head_dim]
    return rows, rows
