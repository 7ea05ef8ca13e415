"""Products with stored weights, which are unpacked where they are used: one expert at a time."""

import jax
import jax.numpy as jnp
from jax import lax

from moecore_jax.quantization import formats, integers
from moecore_jax.specs import ExpertFormat

_TPU_ROWS = 8  # of a tile


def affine(x: jax.Array, stored: jax.Array, fmt: ExpertFormat) -> jax.Array:
  """Applies a stored weight, and its bias where it has one.

  W4A8 and W8A8: each token is quantised to int8 by its largest magnitude, the products are summed
  in int32, and the scales of token and weight are applied in float32; groups of rows are summed in
  order.

  Args:
    x: [..., T, D] float.
    stored: [..., *formats.storage_shape(D, F, fmt, has_bias)].
    fmt: its format.

  Returns:
    [..., T, F] of x's dtype.
  """
  dim = x.shape[-1]
  if not formats.is_integer(fmt):
    weight = formats.unpack(stored, fmt, x.dtype)
    if weight.shape[-2] == dim:
      return x @ weight
    kernel, bias = jnp.split(weight, [dim], axis=-2)
    return x @ kernel + bias
  if stored.ndim == 2 and x.ndim > 2:
    return affine(x.reshape(-1, dim), stored, fmt).reshape((*x.shape[:-1], -1))
  size = formats.group_rows(fmt, dim)
  parts = integers.unpack(stored, formats.bits(fmt), dim, size)
  tokens, token_scales = quantize_tokens(x)
  total = jnp.float32(0)
  for group in range(dim // size):
    rows = slice(group * size, (group + 1) * size)
    product = _product(tokens[..., rows], parts.values[..., rows, :])
    total = total + product.astype(jnp.float32) * parts.scales[..., group, None, :]
  y = total * token_scales
  return (y + parts.bias if parts.bias.shape[-2] else y).astype(x.dtype)


def _product(tokens: jax.Array, values: jax.Array) -> jax.Array:
  """Returns the product of int8 [..., T, D] and [..., D, F], int32 [..., T, F]."""

  def plain(tokens, values):
    return jnp.matmul(tokens, values, preferred_element_type=jnp.int32)

  def padded(tokens, values):
    # XLA would multiply a single row without the matrix unit.
    pads = [(0, 0)] * (tokens.ndim - 2) + [(0, _TPU_ROWS - 1), (0, 0)]
    return plain(jnp.pad(tokens, pads), values)[..., :1, :]

  if tokens.shape[-2] > 1:
    return plain(tokens, values)
  return lax.platform_dependent(tokens, values, tpu=padded, default=plain)


def quantize_tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Quantises activations symmetrically to int8, each token by itself.

  Args:
    x: float [..., T, D].

  Returns:
    int8 [..., T, D], -127..127, and float32 scales [..., T, 1].
  """
  x = x.astype(jnp.float32)
  scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
  values = jnp.rint(x / jnp.where(scales > 0, scales, 1))
  return lax.clamp(jnp.float32(-127), values, jnp.float32(127)).astype(jnp.int8), scales
