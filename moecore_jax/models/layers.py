"""Small layers that every family shares; linear maps, norms and embeddings come from flax.nnx."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from moecore_jax.specs import ActivationSpec, RopeSpec


def linear(
  in_dim: int, out_dim: int, dtype: jnp.dtype, rngs: nnx.Rngs, use_bias: bool = False
) -> nnx.Linear:
  """Returns a linear map whose kernel is [in_dim, out_dim] of `dtype`."""
  return nnx.Linear(in_dim, out_dim, use_bias=use_bias, dtype=dtype, param_dtype=dtype, rngs=rngs)


def rms_norm(dim: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
  """Returns an RMS norm over the last axis; the mean square is taken in float32."""
  return nnx.RMSNorm(dim, epsilon=eps, dtype=dtype, param_dtype=dtype, rngs=rngs)


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
  """Returns a product [..., H * R] as [..., H, R].

  The product comes first: else XLA for TPU may split its matrix by heads, in another layout.
  """
  return lax.optimization_barrier(x).reshape((*x.shape[:-1], num_heads, -1))


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
  """Returns x over the root of its mean square along the last axis, in float32."""
  x = x.astype(jnp.float32)
  return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def gated_unit(gate: jax.Array, up: jax.Array, spec: ActivationSpec) -> jax.Array:
  """Returns the gated unit of the halves [..., F]."""
  if spec.limit is not None:
    gate, up = jnp.minimum(gate, spec.limit), jnp.clip(up, -spec.limit, spec.limit)
  if spec.up_shift:
    up = up + spec.up_shift
  if spec.alpha == 1:
    return jax.nn.silu(gate) * up
  return gate * jax.nn.sigmoid(spec.alpha * gate) * up


class GatedMLP(nnx.Module):
  """A gated unit between two linear maps, gate and up in one kernel [D, 2 * hidden]."""

  def __init__(
    self,
    embed_dim: int,
    hidden_dim: int,
    activation: ActivationSpec,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
  ):
    self.activation = activation
    self.gate_up_proj = linear(embed_dim, 2 * hidden_dim, dtype, rngs)
    self.down_proj = linear(hidden_dim, embed_dim, dtype, rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., D] to [..., D]."""
    gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
    return self.down_proj(gated_unit(gate, up, self.activation))


def rope_frequencies(spec: RopeSpec) -> tuple[np.ndarray, float]:
  """Returns the angular frequencies (float32 [dim / 2], radians a position) and the factor on cos
  and sin.

  Source: RoFormer; YaRN (Peng et al., 2023) where `spec.yarn` is set.
  """
  n = spec.dim
  frequencies = spec.theta ** (-np.arange(0, n, 2, dtype=np.float64) / n)
  yarn = spec.yarn
  if yarn is None:
    return frequencies.astype(np.float32), 1.0

  def correction(beta: float) -> float:
    return (
      n * math.log(yarn.original_max_position / (2 * math.pi * beta)) / (2 * math.log(spec.theta))
    )

  low, high = correction(yarn.beta_fast), correction(yarn.beta_slow)
  if yarn.is_truncated:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, n - 1)
  ramp = np.clip((np.arange(n // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
  keep = 1.0 - ramp
  frequencies = keep * frequencies + (1.0 - keep) * frequencies / yarn.factor
  factor = yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
  return frequencies.astype(np.float32), factor


def yarn_mscale(factor: float, mscale: float) -> float:
  """Returns YaRN's attention factor 0.1 * mscale * ln(factor) + 1 (1 for mscale 0)."""
  return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def apply_rope(x: jax.Array, positions: jax.Array, spec: RopeSpec) -> jax.Array:
  """Rotates `spec.dim` components of the last axis.

  Args:
    x: float [B, T, ..., dim or more].
    positions: int32 [B, T]; negative ones turn back.
    spec: frequencies and pairs.

  Returns:
    Same shape and dtype as x, pairs left in place.
  """
  frequencies, factor = rope_frequencies(spec)
  angles = positions[..., None].astype(jnp.float32) * frequencies.reshape(
    (1,) * positions.ndim + (-1,)
  )
  angles = angles.reshape(positions.shape + (1,) * (x.ndim - positions.ndim - 1) + (spec.dim // 2,))
  cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
  start = x.shape[-1] - spec.dim if spec.is_trailing else 0
  before, turning, behind = jnp.split(x, [start, start + spec.dim], axis=-1)
  # The pair's own axis is the last for (2i, 2i + 1), the one before for (i, i + dim / 2).
  axis, shape = (
    (-1, (spec.dim // 2, 2)) if spec.pairs == "interleaved" else (-2, (2, spec.dim // 2))
  )
  pairs = turning.astype(jnp.float32).reshape((*x.shape[:-1], *shape))
  first, second = (lax.index_in_dim(pairs, i, axis, keepdims=False) for i in (0, 1))
  rotated = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=axis)
  parts = [before, rotated.reshape(turning.shape).astype(x.dtype), behind]
  return jnp.concatenate([part for part in parts if part.shape[-1]], axis=-1)
