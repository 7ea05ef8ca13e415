"""Hyper-connections: the stream of a layer is several streams, [B, T, n, D].

A block reads a weighted sum of them. What it gives is added to each by a weight, and the streams
themselves are mixed by a matrix whose rows and columns all but sum to one. All maps depend on the
streams, and are worked out in float32.

Source: DeepSeek-V4 (2026).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moecore_jax.models.layers import unit_rms
from moecore_jax.specs import HyperSpec


class Mix(NamedTuple):
  """How a block's output enters the streams.

  Attributes:
    out: float32 [B, T, n], weight of the output in each stream.
    streams: float32 [B, T, n, n], weight of the first stream in the second.
  """

  out: jax.Array
  streams: jax.Array


def expand(x: jax.Array, spec: HyperSpec | None) -> jax.Array:
  """Returns the streams [..., n, D] that a model starts from; without hyper-connections x."""
  if spec is None:
    return x
  return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], spec.num_streams, x.shape[-1]))


class HyperConnection(nnx.Module):
  """The maps around one block.

  Args:
    spec: number of streams.
    embed_dim: width of a stream (D).
    eps: of the norm over all streams.
    rngs: initialises parameters.
  """

  def __init__(self, spec: HyperSpec, embed_dim: int, eps: float, rngs: nnx.Rngs):
    self.spec, self.eps = spec, eps
    n = spec.num_streams
    self.maps = _Maps(n, embed_dim, (2 + n) * n, 3, rngs)

  def __call__(self, x: jax.Array) -> tuple[jax.Array, Mix]:
    """Returns a block's input [B, T, D] and how to add its output, for the streams [B, T, n, D]."""
    spec, n = self.spec, self.spec.num_streams
    maps = self.maps(x, self.eps, (n, n, n * n))
    weights, out, streams = jnp.split(maps, [n, 2 * n], axis=-1)
    weights = jax.nn.sigmoid(weights) + spec.eps
    streams = streams.reshape((*streams.shape[:-1], n, n))
    return _sum(x, weights), Mix(2 * jax.nn.sigmoid(out), _balance(streams, spec))


class HyperHead(nnx.Module):
  """The map from the streams to what the head reads; arguments as of HyperConnection."""

  def __init__(self, spec: HyperSpec, embed_dim: int, eps: float, rngs: nnx.Rngs):
    self.spec, self.eps = spec, eps
    self.maps = _Maps(spec.num_streams, embed_dim, spec.num_streams, 1, rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., D] for the streams [..., n, D]."""
    weights = self.maps(x, self.eps, (self.spec.num_streams,))
    return _sum(x, jax.nn.sigmoid(weights) + self.spec.eps)


def add(x: jax.Array, y: jax.Array, mix: Mix) -> jax.Array:
  """Returns the streams [B, T, n, D] after a block that gave y [B, T, D] for the streams x."""
  mixed = jnp.einsum(
    "btjk,btjd->btkd", mix.streams, x.astype(jnp.float32), precision=lax.Precision.HIGHEST
  )
  return (mixed + mix.out[..., None] * y.astype(jnp.float32)[..., None, :]).astype(x.dtype)


class _Maps(nnx.Module):
  """A linear map of all streams, scaled part by part, with a bias; float32."""

  def __init__(self, n: int, embed_dim: int, size: int, parts: int, rngs: nnx.Rngs):
    init = nnx.initializers.lecun_normal()
    self.kernel = nnx.Param(init(rngs.params(), (n * embed_dim, size), jnp.float32))
    self.base = nnx.Param(jnp.zeros((size,), jnp.float32))
    self.scale = nnx.Param(jnp.ones((parts,), jnp.float32))

  def __call__(self, x: jax.Array, eps: float, sizes: tuple[int, ...]) -> jax.Array:
    """Returns float32 [..., sum of sizes] for the streams [..., n, D]; a scale for each size."""
    flat = unit_rms(x.reshape((*x.shape[:-2], -1)), eps)
    z = jnp.matmul(flat, self.kernel[...], precision=lax.Precision.HIGHEST)
    scale = jnp.concatenate(
      [jnp.broadcast_to(self.scale[i], (size,)) for i, size in enumerate(sizes)]
    )
    axes = (1,) * (z.ndim - 1) + (-1,)
    return z * scale.reshape(axes) + self.base[...].reshape(axes)


def _sum(x: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the streams [..., n, D] summed by float32 weights [..., n], in the streams' dtype."""
  return (x.astype(jnp.float32) * weights[..., None]).sum(-2).astype(x.dtype)


def _balance(logits: jax.Array, spec: HyperSpec) -> jax.Array:
  """Returns positive matrices [..., n, n] whose columns sum to one, and whose rows nearly do."""

  def by_columns(x):
    return x / (x.sum(-2, keepdims=True) + spec.eps)

  def by_rows_and_columns(_, x):
    return by_columns(x / (x.sum(-1, keepdims=True) + spec.eps))

  start = by_columns(jax.nn.softmax(logits, axis=-1) + spec.eps)
  return lax.fori_loop(1, spec.sinkhorn_iters, by_rows_and_columns, start)
