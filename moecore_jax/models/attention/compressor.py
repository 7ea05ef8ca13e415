"""Compressed entries: a window of tokens becomes one vector, a softmax over its tokens in every
component.

Source: DeepSeek-V4 (2026).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moecore_jax.models.attention.cache import LayerCache, pad_rows
from moecore_jax.models.attention.indexer import IndexQueries
from moecore_jax.models.layers import apply_rope, linear, rms_norm
from moecore_jax.specs import CompressionSpec, IndexerSpec, RopeSpec


class Compressor(nnx.Module):
  """Makes the entries of one layer.

  Args:
    spec: of the windows.
    rope: of the entries; an entry stands at its window's first token.
    embed_dim: width of the stream (D).
    width: of an entry (R).
    eps: of the norm of entries.
    dtype: of parameters and activations; position biases are float32.
    rngs: initialises parameters.
  """

  def __init__(
    self,
    spec: CompressionSpec,
    rope: RopeSpec,
    embed_dim: int,
    width: int,
    eps: float,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
  ):
    self.spec, self.rope, self.width = spec, rope, width
    total = 2 * width if spec.overlaps else width
    self.kv_proj = linear(embed_dim, total, dtype, rngs)
    self.gate_proj = linear(embed_dim, total, dtype, rngs)
    self.position_bias = nnx.Param(jnp.zeros((spec.ratio, total), jnp.float32))
    self.norm = rms_norm(width, eps, dtype, rngs)

  def rows(self, x: jax.Array) -> jax.Array:
    """Returns what a token brings to its windows: contents, then gates; for x [B, T, D]."""
    return jnp.concatenate([self.kv_proj(x), self.gate_proj(x)], axis=-1)

  def entries(self, rows: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the entries of the window that a step's first token lies in and of those behind.

    Args:
      rows: [B, spec.held_tokens + T, R or more], of the tokens before the step, then of its own.
      start: int32 [B], position of the step's first token.

    Returns:
      Entries [B, windows, R], and their numbers, int32 [B, windows]. Those of windows that are
      still open mean nothing.
    """
    ratio, overlaps, num_held = self.spec.ratio, self.spec.overlaps, self.spec.held_tokens
    num_windows = -(-(rows.shape[1] - num_held) // ratio)
    number = start[:, None] // ratio + jnp.arange(num_windows, dtype=jnp.int32)[None]
    before = ratio if overlaps else 0
    at = (num_held - start % ratio - before)[:, None]
    at = at + jnp.arange(before + num_windows * ratio, dtype=jnp.int32)[None]
    rows = jnp.take_along_axis(rows, at[:, :, None], axis=1, mode="clip")

    def windows(rows, first):
      """Returns contents and float32 gates, [B, windows, ratio, R]: components from `first` on."""
      rows = rows.reshape((rows.shape[0], num_windows, ratio, -1))
      bias = self.position_bias[...]
      part, total = slice(first, first + self.width), bias.shape[1]
      gates = rows[..., total : 2 * total][..., part].astype(jnp.float32)
      return rows[..., part], gates + bias[None, None, :, part]

    contents, gates = windows(rows[:, before:], self.width if overlaps else 0)
    if overlaps:
      earlier, earlier_gates = windows(rows[:, :-ratio], 0)
      earlier_gates = jnp.where((number > 0)[:, :, None, None], earlier_gates, -jnp.inf)
      contents = jnp.concatenate([earlier, contents], axis=2)
      gates = jnp.concatenate([earlier_gates, gates], axis=2)
    mean = (jax.nn.softmax(gates, axis=2) * contents.astype(jnp.float32)).sum(2)
    return apply_rope(self.norm(mean.astype(rows.dtype)), number * ratio, self.rope), number

  def write(self, x: jax.Array, cache: LayerCache, name: str) -> LayerCache:
    """Takes in a step's tokens, x [B, T, D], and writes the entries of the windows that they close.

    Args:
      x: normed stream.
      cache: of the layer; `name` are the entries, `name`_tokens the rows of the newest tokens.
      name: of the entries.
    """
    tokens, ratio = cache.tokens, self.spec.ratio
    rows, cache = cache.slide(f"{name}_tokens", pad_rows(self.rows(x)))
    start = tokens.positions[:, 0]
    entries, number = self.entries(rows, start)
    is_closed = number < ((start + tokens.valid.sum(1, dtype=jnp.int32)) // ratio)[:, None]
    return cache.write(name, pad_rows(entries), number, is_closed)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the entries [B, windows, R] of whole sequences x [B, T, D], the last one's open."""
    rows = jnp.pad(self.rows(x), ((0, 0), (self.spec.held_tokens, 0), (0, 0)))
    return self.entries(rows, jnp.zeros(len(x), jnp.int32))[0]


class EntryIndexer(IndexQueries):
  """Scores entries for queries, by entries of its own; arguments as of Indexer and Compressor."""

  def __init__(
    self,
    spec: IndexerSpec,
    compression: CompressionSpec,
    query_dim: int,
    embed_dim: int,
    eps: float,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
  ):
    super().__init__(spec, query_dim, embed_dim, dtype, rngs)
    self.compressor = Compressor(compression, spec.rope, embed_dim, spec.head_dim, eps, dtype, rngs)
