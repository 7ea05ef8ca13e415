"""What attention keeps of earlier tokens: arrays of one shape for each name, written and read in
place, whatever the attention.

A layer's spec says what it caches (`cache_shapes`); the caches of equal layers are stacked. An
attention module gets a `LayerCache`, a view of the arrays of its layer, and gives it back.
"""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from moecore_jax.specs import AttentionSpec, CompressedSpec, MLASpec

LANES = 128

_MAX_SINGLE_WRITES = 8
"""Batch rows whose one token is written by an update each. A scatter counts in XLA's schedule for a
pass over the caches of all stacked layers, which would seem to hide copies of experts."""

CacheArrays = dict[str, jax.Array]
"""[layers, B, rows, R] by name."""


class Tokens(NamedTuple):
  """The tokens of one step: one a row in decode, one row's chunk in prefill.

  Attributes:
    positions: int32 [B, T].
    valid: bool [B, T], False for padding.
    row: int32 scalar, first row of the cache that they belong to.
    ids: int32 [B, T], the tokens themselves.
  """

  positions: jax.Array
  valid: jax.Array
  row: jax.Array
  ids: jax.Array


def padded_row_dim(width: int) -> int:
  """Returns the width of a cached row: rounded up to whole lanes of 128 numbers."""
  return -(-width // LANES) * LANES


def pad_rows(rows: jax.Array) -> jax.Array:
  """Pads the last axis with zeros to whole lanes."""
  width = padded_row_dim(rows.shape[-1])
  return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, width - rows.shape[-1])])


def cache_shapes(spec: AttentionSpec, context_tokens: int) -> dict[str, tuple[int, int]]:
  """Returns what a layer caches of one batch row: (rows, padded width) by name.

  `latent`: a row a token. `index_keys`: a row a token, where a context can be longer than what
  sparse attention reads. `keys_values`: a row a token, all key heads, then all value heads; with a
  window only the rows of the last window - 1 tokens, the newest last. `window`: likewise, one
  vector a token. `entries`: a row for each window of tokens that can be closed; `entries_tokens`:
  what the newest tokens bring to windows, the newest last. `index_entries` and
  `index_entries_tokens`: the same of the indexer, where there can be more entries than it chooses.
  """
  if isinstance(spec, CompressedSpec):
    shapes = {"window": (spec.window - 1, padded_row_dim(spec.head_dim))}
    compression = spec.compression
    rows = context_tokens // compression.ratio if compression is not None else 0
    if compression is not None and rows:
      indexer = compression.indexer
      widths = {"entries": spec.head_dim}
      if indexer is not None and rows > indexer.topk:
        widths["index_entries"] = indexer.head_dim
      for name, width in widths.items():
        shapes[name] = (rows, padded_row_dim(width))
        brought = 2 * width * (2 if compression.overlaps else 1)
        shapes[f"{name}_tokens"] = (compression.held_tokens, padded_row_dim(brought))
    return shapes
  if isinstance(spec, MLASpec):
    shapes = {"latent": (context_tokens, padded_row_dim(spec.latent_dim))}
    indexer = spec.indexer
    if indexer is not None and not indexer.is_shared and context_tokens > indexer.topk:
      shapes["index_keys"] = (context_tokens, padded_row_dim(indexer.head_dim))
    return shapes
  rows = context_tokens if spec.window is None else spec.window - 1
  return {"keys_values": (rows, padded_row_dim(2 * spec.num_kv_heads * spec.head_dim))}


@dataclasses.dataclass(frozen=True)
class LayerCache:
  """The caches of one layer.

  Attributes:
    arrays: caches of all layers that are stacked with it.
    layer: int32 scalar, its place among them.
    tokens: the step's.
    picks: int32 [B, T, topk], keys that the last indexer before the layer chose; None if no layer
      of the model shares them.
  """

  arrays: CacheArrays
  layer: jax.Array
  tokens: Tokens
  picks: jax.Array | None = None

  def write(
    self,
    name: str,
    rows: jax.Array,
    at: jax.Array | None = None,
    is_written: jax.Array | None = None,
  ) -> Self:
    """Writes rows [B, T, R] at `at`, int32 [B, T], but for those that are not written.

    By default they are the tokens' rows, at their positions; those of padding are not written.
    """
    cache, tokens = self.arrays[name], self.tokens
    at = tokens.positions if at is None else at
    at = jnp.where(tokens.valid if is_written is None else is_written, at, cache.shape[2])
    if at.shape[1] == 1 and at.shape[0] <= _MAX_SINGLE_WRITES:
      for i in range(at.shape[0]):
        place = self.layer, tokens.row + i, at[i, 0], jnp.int32(0)
        old = lax.dynamic_slice(cache, place, (1, 1, 1, cache.shape[3]))
        new = jnp.where(at[i, 0] < cache.shape[2], rows[i], old)
        cache = lax.dynamic_update_slice(cache, new, place)
      return self._with(name, cache)
    row = tokens.row + jnp.arange(at.shape[0], dtype=jnp.int32)[:, None]
    place = jnp.broadcast_to(self.layer, at.shape), jnp.broadcast_to(row, at.shape), at
    return self._with(name, cache.at[place].set(rows, mode="drop"))

  def read(self, name: str, start: jax.Array, count: int) -> jax.Array:
    """Returns rows of the step's batch rows: `count` from `start` on, or the last if fewer follow.

    They are [B, count, R].
    """
    cache = self.arrays[name]
    at = (self.layer, self.tokens.row, start, jnp.int32(0))
    return lax.dynamic_slice(cache, at, (1, len(self.tokens.valid), count, cache.shape[3]))[0]

  def gather(self, name: str, at: jax.Array) -> jax.Array:
    """Returns single rows: [B, T, K, R] for int32 positions `at` [B, T, K]."""
    row = self.tokens.row + jnp.arange(at.shape[0], dtype=jnp.int32)[:, None, None]
    place = jnp.broadcast_to(self.layer, at.shape), jnp.broadcast_to(row, at.shape), at
    return self.arrays[name].at[place].get(mode="promise_in_bounds")

  def slide(self, name: str, rows: jax.Array) -> tuple[jax.Array, Self]:
    """Moves a cache of the newest tokens on.

    Args:
      name: of the cache.
      rows: [B, T, R], of the step's tokens.

    Returns:
      [B, held + T, R], the rows that were held, then the step's; and the cache of the newest, those
      of padding left out.
    """
    held = self.arrays[name].shape[2]
    rows = jnp.concatenate([self.read(name, jnp.int32(0), held), rows], axis=1)
    count = self.tokens.valid.sum(1, dtype=jnp.int32)  # tokens that the cache moves on
    at = count[:, None] + jnp.arange(held, dtype=jnp.int32)[None]
    newest = jnp.take_along_axis(rows, at[:, :, None], axis=1)
    place = (self.layer, self.tokens.row, jnp.int32(0), jnp.int32(0))
    return rows, self._with(name, lax.dynamic_update_slice(self.arrays[name], newest[None], place))

  def _with(self, name: str, array: jax.Array) -> Self:
    return dataclasses.replace(self, arrays=self.arrays | {name: array})
