"""Multi-head latent attention in absorbed form: what is cached is one latent row a token, shared by
all heads.

A latent row is [compressed kv | rotated shared key]. The key up-projection is folded into the query
and the value up-projection into the output, so that attention itself is multi-query attention over
latent rows, the same code in prefill and in decode.

Source: DeepSeek-V2 (2024), section 2.1.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moecore_jax.models.attention.blockwise import blockwise_attention
from moecore_jax.models.attention.cache import LayerCache, pad_rows
from moecore_jax.models.attention.indexer import Indexer, best_keys
from moecore_jax.models.layers import apply_rope, linear, rms_norm, split_heads, yarn_mscale
from moecore_jax.specs import MLASpec

LATENT_NORM_EPS = 1e-6  # of both low-rank norms, whatever the model's own epsilon
QUERIES_AT_A_TIME = 16
"""Sparse attention gathers the rows of so many queries at once."""


class MLAttention(nnx.Module):
  """One attention layer."""

  def __init__(self, spec: MLASpec, embed_dim: int, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.spec = spec
    heads, nope, rank = spec.num_heads, spec.qk_nope_head_dim, spec.kv_lora_rank
    query_dim = heads * (nope + spec.qk_rope_head_dim)
    if spec.q_lora_rank is None:
      self.q_proj = linear(embed_dim, query_dim, dtype, rngs)
    else:
      self.q_a_proj = linear(embed_dim, spec.q_lora_rank, dtype, rngs)
      self.q_a_norm = rms_norm(spec.q_lora_rank, LATENT_NORM_EPS, dtype, rngs)
      self.q_b_proj = linear(spec.q_lora_rank, query_dim, dtype, rngs)
    self.kv_a_proj = linear(embed_dim, spec.latent_dim, dtype, rngs)
    self.kv_a_norm = rms_norm(rank, LATENT_NORM_EPS, dtype, rngs)
    init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
    self.k_up_proj = nnx.Param(init(rngs.params(), (heads, nope, rank), dtype))
    self.v_up_proj = nnx.Param(init(rngs.params(), (heads, spec.v_head_dim, rank), dtype))
    self.o_proj = linear(heads * spec.v_head_dim, embed_dim, dtype, rngs)
    indexer, rank_q = spec.indexer, spec.q_lora_rank
    self.indexer = None
    if indexer is not None and rank_q is not None and not indexer.is_shared:
      self.indexer = nnx.data(Indexer(indexer, rank_q, embed_dim, dtype, rngs))

  @property
  def scale(self) -> float:
    """Softmax scale, with YaRN's correction."""
    width = self.spec.qk_nope_head_dim + self.spec.qk_rope_head_dim
    yarn = self.spec.rope.yarn
    correction = yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2 if yarn else 1.0
    return width**-0.5 * correction

  def low_rank(self, x: jax.Array) -> jax.Array:
    """Returns what queries are projected from: [B, T, q_lora_rank], or x itself [B, T, D]."""
    return x if self.spec.q_lora_rank is None else self.q_a_norm(self.q_a_proj(x))

  def queries(self, low: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns absorbed, scaled queries.

    Args:
      low: what `low_rank` returns.
      positions: int32 [B, T].

    Returns:
      [B, T, H, latent_dim] of the same dtype.
    """
    spec = self.spec
    project = self.q_proj if spec.q_lora_rank is None else self.q_b_proj
    q = split_heads(project(low), spec.num_heads)
    q_nope, q_rope = jnp.split(q, [spec.qk_nope_head_dim], axis=-1)
    absorbed = lax.platform_dependent(
      q_nope, self.k_up_proj[...], cuda=_absorb_in_two_rows, default=_absorb
    )
    q = jnp.concatenate([absorbed, apply_rope(q_rope, positions, spec.rope)], axis=-1)
    return q * jnp.asarray(self.scale, q.dtype)

  def latents(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the rows to cache: [B, T, latent_dim] for a normed stream x [B, T, D]."""
    compressed, key = jnp.split(self.kv_a_proj(x), [self.spec.kv_lora_rank], axis=-1)
    return jnp.concatenate(
      [self.kv_a_norm(compressed), apply_rope(key, positions, self.spec.rope)], axis=-1
    )

  def attend(self, x: jax.Array, cache: LayerCache, block: int) -> tuple[jax.Array, LayerCache]:
    """Attends to the cache, the step's own tokens included.

    Args:
      x: normed stream [B, T, D].
      cache: of this layer.
      block: tokens of one block of the attention loop.

    Returns:
      [B, T, D], and the cache with the tokens' rows.
    """
    positions, low = cache.tokens.positions, self.low_rank(x)
    cache = cache.write("latent", pad_rows(self.latents(x, positions)))
    queries = pad_rows(self.queries(low, positions))
    indexer, context = self.spec.indexer, cache.arrays["latent"].shape[2]

    def attend_to_all(positions):
      def read_block(i):
        rows = cache.read("latent", i * block, block)[:, :, None]
        return rows, rows

      width = queries.shape[-1]
      return blockwise_attention(queries[:, :, None], positions, read_block, block, width)[:, :, 0]

    if indexer is None or context <= indexer.topk:
      return self.output(attend_to_all(positions)), cache
    if self.indexer is not None:
      cache = cache.write("index_keys", pad_rows(self.indexer.keys(x, positions)))
      cache = dataclasses.replace(cache, picks=self._pick(low, x, cache, block))
    picks, topk = cache.picks, indexer.topk
    assert picks is not None
    # Each query by its own position: what is beside it does not matter. In loops that turn once or
    # not at all: a condition would copy the cache.
    is_sparse = positions >= topk

    def turns(is_one: jax.Array) -> jax.Array:
      return jnp.any(is_one & cache.tokens.valid).astype(jnp.int32)

    attended = lax.fori_loop(
      0,
      turns(~is_sparse),
      lambda *_: attend_to_all(jnp.minimum(positions, topk - 1)),
      jnp.zeros_like(queries),
    )
    attended = lax.fori_loop(
      0,
      turns(is_sparse),
      lambda _, attended: jnp.where(
        is_sparse[..., None, None], attend_to_picks(queries, picks, cache), attended
      ),
      attended,
    )
    return self.output(attended), cache

  def _pick(self, low: jax.Array, x: jax.Array, cache: LayerCache, block: int) -> jax.Array:
    """Returns int32 [B, T, topk], the keys that each query attends to."""
    assert self.indexer is not None
    topk, context = self.indexer.spec.topk, cache.arrays["index_keys"].shape[2]
    # As many keys at a time as are kept, so that most of the sorting is of new ones.
    blocks = max(n for n in range(1, max(1, topk // block) + 1) if context % (n * block) == 0)
    count, width = blocks * block, self.indexer.spec.head_dim

    def pick(queries, weights, positions):
      return best_keys(
        queries,
        weights,
        positions,
        lambda i: cache.read("index_keys", i * count, count)[..., :width],
        count,
        topk,
      )

    positions = cache.tokens.positions
    return by_queries(pick, *self.indexer.queries(low, x, positions), positions)

  def output(self, attended: jax.Array) -> jax.Array:
    """Maps attended latents [B, T, H, kv_lora_rank or more] to the stream [B, T, D]."""
    attended = attended[..., : self.spec.kv_lora_rank]
    values = jnp.einsum("bthr,hvr->bthv", attended, self.v_up_proj[...])
    return self.o_proj(values.reshape((*values.shape[:2], -1)))

  def __call__(
    self, x: jax.Array, positions: jax.Array, picks: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array | None]:
    """Causal attention of a whole sequence with itself, without a cache.

    Args:
      x: normed stream [B, T, D].
      positions: int32 [B, T], 0, 1, .. plus an offset a row.
      picks: keys that the last indexer before the layer chose, int32 [B, T, topk].

    Returns:
      [B, T, D], and the picks for the next layer.
    """
    low, length = self.low_rank(x), x.shape[1]
    rows = self.latents(x, positions)[:, :, None]
    if self.indexer is not None:
      keys = self.indexer.keys(x, positions)
      queries, weights = self.indexer.queries(low, x, positions)
      place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), positions.shape)
      topk = min(self.indexer.spec.topk, length)
      picks = best_keys(queries, weights, place, lambda _: keys, length, topk)
    seen = None
    if self.spec.indexer is not None:
      assert picks is not None, "the first layer has an indexer of its own"
      number = jnp.arange(length, dtype=jnp.int32)[None, None, None]
      seen = jnp.any(picks[..., None] == number, axis=2)[:, None]
    attended = jax.nn.dot_product_attention(
      self.queries(low, positions), rows, rows, mask=seen, is_causal=True, scale=1.0
    )
    return self.output(attended), picks


def attend_to_picks(queries: jax.Array, picks: jax.Array, cache: LayerCache) -> jax.Array:
  """Attends to chosen rows only.

  Args:
    queries: scaled queries [B, T, H, R].
    picks: int32 [B, T, K], positions of the rows.
    cache: with the latent rows.

  Returns:
    [B, T, H, R]; it means nothing of a query that has a NO_PICK.
  """

  def attend(queries, picks):
    rows = cache.gather("latent", jnp.maximum(picks, 0))  # [B, T, K, R]
    scores = jnp.einsum("bthr,btkr->bthk", queries, rows, preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(scores, axis=-1).astype(rows.dtype)
    mean = jnp.einsum("bthk,btkr->bthr", shares, rows, preferred_element_type=jnp.float32)
    return mean.astype(queries.dtype)

  return by_queries(attend, queries, picks)


def by_queries(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
  """Applies a function to QUERIES_AT_A_TIME queries after the other; arrays are [B, T, ...]."""
  length = arrays[0].shape[1]
  size = min(length, QUERIES_AT_A_TIME)
  if size == length:
    return function(*arrays)
  pad = -length % size

  def cut(x):
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape((x.shape[0], -1, size, *x.shape[2:])), 1, 0)

  parts = jnp.moveaxis(lax.map(lambda part: function(*part), tuple(map(cut, arrays))), 0, 1)
  return parts.reshape((parts.shape[0], length + pad, *parts.shape[3:]))[:, :length]


def _absorb(q_nope: jax.Array, k_up: jax.Array) -> jax.Array:
  """Folds the key up-projection [H, nope, R] into queries [B, T, H, nope]: [B, T, H, R]."""
  return jnp.einsum("bthn,hnr->bthr", q_nope, k_up)


def _absorb_in_two_rows(q_nope: jax.Array, k_up: jax.Array) -> jax.Array:
  """The same; a single row gets a row of zeros for company.

  XLA for GPUs turns the product of one row into a reduction, and for that transposes the stacked
  weights of all scanned layers.
  """
  if q_nope.shape[:2] != (1, 1):
    return _absorb(q_nope, k_up)
  return _absorb(jnp.pad(q_nope, ((0, 0), (0, 1), (0, 0), (0, 0))), k_up)[:, :1]
