"""Multi-head latent attention in absorbed form: what is cached is one latent row a token, shared by
all heads.

A latent row is [compressed kv | rotated shared key]. The key up-projection is folded into the query
and the value up-projection into the output, so that attention itself is multi-query attention over
latent rows, the same code in prefill and in decode.

Source: DeepSeek-V2 (2024), section 2.1.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moecore_jax.models.layers import apply_rope, linear, rms_norm, yarn_mscale
from moecore_jax.specs import MLASpec

LATENT_NORM_EPS = 1e-6  # of both low-rank norms, whatever the model's own epsilon


class MLAttention(nnx.Module):
  """Projections of one attention layer; the caller supplies attention over cached or fresh latent
  rows.
  """

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

  @property
  def scale(self) -> float:
    """Softmax scale, with YaRN's correction."""
    width = self.spec.qk_nope_head_dim + self.spec.qk_rope_head_dim
    yarn = self.spec.rope.yarn
    correction = yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2 if yarn else 1.0
    return width**-0.5 * correction

  def queries(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns absorbed, scaled queries.

    Args:
      x: normed stream [B, T, D].
      positions: int32 [B, T].

    Returns:
      [B, T, H, latent_dim] of x's dtype.
    """
    spec = self.spec
    if spec.q_lora_rank is None:
      q = self.q_proj(x)
    else:
      q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
    q = q.reshape((*x.shape[:2], spec.num_heads, -1))
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

  def output(self, attended: jax.Array) -> jax.Array:
    """Maps attended latents [B, T, H, kv_lora_rank or more] to the stream [B, T, D]."""
    attended = attended[..., : self.spec.kv_lora_rank]
    values = jnp.einsum("bthr,hvr->bthv", attended, self.v_up_proj[...])
    return self.o_proj(values.reshape((*values.shape[:2], -1)))

  def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Causal attention of a whole sequence with itself, without a cache: [B, T, D] to [B, T, D]."""
    rows = self.latents(x, positions)[:, :, None]
    return self.output(
      jax.nn.dot_product_attention(
        self.queries(x, positions), rows, rows, is_causal=True, scale=1.0
      )
    )


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
