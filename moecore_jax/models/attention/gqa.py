"""Grouped-query attention, over the whole context or a sliding window.

A cached row holds all key heads, then all value heads, of one token.

Source: GQA (Ainslie et al., 2023).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moecore_jax.models.attention.blockwise import (
  add_rows,
  blockwise_attention,
  end_softmax,
  start_softmax,
  window_attention,
)
from moecore_jax.models.attention.cache import LayerCache, pad_rows
from moecore_jax.models.layers import apply_rope, linear, rms_norm, split_heads
from moecore_jax.specs import GQASpec


class GQAttention(nnx.Module):
  """One attention layer.

  Args:
    spec: shapes.
    embed_dim: width of the stream (D).
    eps: of the norms of queries and keys.
    dtype: of parameters and activations; sinks are float32.
    rngs: initialises parameters.
  """

  def __init__(self, spec: GQASpec, embed_dim: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.spec = spec
    query_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    self.q_proj = linear(embed_dim, query_dim, dtype, rngs, spec.qkv_bias)
    self.k_proj = linear(embed_dim, kv_dim, dtype, rngs, spec.qkv_bias)
    self.v_proj = linear(embed_dim, kv_dim, dtype, rngs, spec.qkv_bias)
    self.o_proj = linear(query_dim, embed_dim, dtype, rngs, spec.o_bias)
    if spec.qk_norm != "none":
      is_full = spec.qk_norm == "full"
      self.q_norm = rms_norm(query_dim if is_full else spec.head_dim, eps, dtype, rngs)
      self.k_norm = rms_norm(kv_dim if is_full else spec.head_dim, eps, dtype, rngs)
    if spec.has_sinks:
      self.sinks = nnx.Param(jnp.zeros((spec.num_heads,), jnp.float32))

  def queries(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns scaled queries [B, T, K, G, R] for a normed stream x [B, T, D]."""
    spec = self.spec
    q = self.q_proj(x)
    if spec.qk_norm == "full":
      q = self.q_norm(q)
    q = split_heads(q, spec.num_heads)
    if spec.qk_norm == "head":
      q = self.q_norm(q)
    q = apply_rope(q, positions, spec.rope)
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    return self._by_key_head(q * jnp.asarray(scale, q.dtype), 2)

  def keys_values(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values, each [B, T, K, R]."""
    spec = self.spec
    k, v = self.k_proj(x), self.v_proj(x)
    if spec.qk_norm == "full":
      k = self.k_norm(k)
    k, v = split_heads(k, spec.num_kv_heads), split_heads(v, spec.num_kv_heads)
    if spec.qk_norm == "head":
      k = self.k_norm(k)
    return apply_rope(k, positions, spec.rope), v

  def attend(self, x: jax.Array, cache: LayerCache, block: int) -> tuple[jax.Array, LayerCache]:
    """Attends to the cache and to the step's own tokens.

    Args:
      x: normed stream [B, T, D].
      cache: of this layer.
      block: tokens that are worked on at a time.

    Returns:
      [B, T, D], and the cache with the tokens' rows.
    """
    spec, tokens = self.spec, cache.tokens
    queries = self.queries(x, tokens.positions)
    keys, values = self.keys_values(x, tokens.positions)
    rows = pad_rows(jnp.concatenate([keys, values], axis=2).reshape((*x.shape[:2], -1)))
    if spec.window is None:
      cache = cache.write("keys_values", rows)
      attended = blockwise_attention(
        queries,
        tokens.positions,
        lambda i: self._split(cache.read("keys_values", i * block, block)),
        block,
        spec.head_dim,
        self._sinks(),
      )
      return self.output(attended), cache
    rows, cache = cache.slide("keys_values", rows)
    attended = window_attention(
      queries, tokens.positions, *self._split(rows), spec.window, block, self._sinks()
    )
    return self.output(attended), cache

  def output(self, attended: jax.Array) -> jax.Array:
    """Maps attended values [B, T, K, G, R] to the stream [B, T, D]."""
    return self.o_proj(attended.reshape((*attended.shape[:2], -1)))

  def __call__(
    self, x: jax.Array, positions: jax.Array, picks: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array | None]:
    """Causal attention of a whole sequence with itself, without a cache.

    Args:
      x: normed stream [B, T, D].
      positions: int32 [B, T].
      picks: handed on.

    Returns:
      [B, T, D], and the picks.
    """
    queries, (keys, values) = self.queries(x, positions), self.keys_values(x, positions)
    distance = positions[:, :, None] - positions[:, None, :]
    seen = (distance >= 0) & (distance < (self.spec.window or distance.shape[1]))
    carry = start_softmax(queries, self.spec.head_dim, self._sinks())
    attended = end_softmax(add_rows(carry, queries, keys, values, seen), x.dtype)
    return self.output(attended), picks

  def _sinks(self) -> jax.Array | None:
    return self._by_key_head(self.sinks[...], 0) if self.spec.has_sinks else None

  def _by_key_head(self, x: jax.Array, axis: int) -> jax.Array:
    """Splits the axis of query heads in (K, G)."""
    heads = self.spec.num_kv_heads, -1
    return x.reshape((*x.shape[:axis], *heads, *x.shape[axis + 1 :]))

  def _split(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values [B, S, K, R] of cached rows."""
    spec = self.spec
    width = 2 * spec.num_kv_heads * spec.head_dim
    heads = (*rows.shape[:2], 2 * spec.num_kv_heads, spec.head_dim)
    keys, values = jnp.split(rows[..., :width].reshape(heads), 2, axis=2)
    return keys, values
