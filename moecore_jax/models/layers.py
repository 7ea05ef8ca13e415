"""Small layers that every family shares; linear maps, norms and embeddings come from flax.nnx."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moecore_jax.specs import RopeSpec


def linear(in_dim: int, out_dim: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
  """Returns a bias-free linear map whose kernel is [in_dim, out_dim] of `dtype`."""
  return nnx.Linear(in_dim, out_dim, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)


def rms_norm(dim: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
  """Returns an RMS norm over the last axis; the mean square is taken in float32."""
  return nnx.RMSNorm(dim, epsilon=eps, dtype=dtype, param_dtype=dtype, rngs=rngs)


class SwiGLU(nnx.Module):
  """down(silu(gate x) * up x), gate and up in one kernel [D, 2 * hidden]."""

  def __init__(self, embed_dim: int, hidden_dim: int, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.gate_up_proj = linear(embed_dim, 2 * hidden_dim, dtype, rngs)
    self.down_proj = linear(hidden_dim, embed_dim, dtype, rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., D] to [..., D]."""
    gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
    return self.down_proj(jax.nn.silu(gate) * up)


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

  low = max(math.floor(correction(yarn.beta_fast)), 0)
  high = min(math.ceil(correction(yarn.beta_slow)), n - 1)
  ramp = np.clip((np.arange(n // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
  keep = 1.0 - ramp
  frequencies = keep * frequencies + (1.0 - keep) * frequencies / yarn.factor
  factor = yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
  return frequencies.astype(np.float32), factor


def yarn_mscale(factor: float, mscale: float) -> float:
  """Returns YaRN's attention factor 0.1 * mscale * ln(factor) + 1 (1 for mscale 0)."""
  return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def apply_rope(x: jax.Array, positions: jax.Array, spec: RopeSpec) -> jax.Array:
  """Rotates interleaved pairs (2i, 2i + 1) of the last axis.

  Args:
    x: float [B, T, ..., dim].
    positions: int32 [B, T].
    spec: frequencies; dim must equal x's last axis.

  Returns:
    Same shape and dtype as x, pairs left in place.
  """
  frequencies, factor = rope_frequencies(spec)
  angles = positions[..., None].astype(jnp.float32) * frequencies.reshape(
    (1,) * positions.ndim + (-1,)
  )
  angles = angles.reshape(positions.shape + (1,) * (x.ndim - positions.ndim - 1) + (spec.dim // 2,))
  cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
  pairs = x.astype(jnp.float32).reshape((*x.shape[:-1], spec.dim // 2, 2))
  even, odd = pairs[..., 0], pairs[..., 1]
  rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
  return rotated.reshape(x.shape).astype(x.dtype)
