"""Linear maps of a decoder layer with int8 weights, in place of those in float.

A `QuantizedLinear` has one parameter, `words`, in the storage format w8a8: int8 by output channel,
with its scales and bias in the same array. Activations are quantised when they meet it.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moecore_jax.quantization import formats
from moecore_jax.quantization.matmul import affine

FORMAT = "w8a8"


class QuantizedLinear(nnx.Module):
  """A linear map [in, out] whose weight is stored in int8.

  Args:
    linear: the map in float, whose shapes it takes.
  """

  def __init__(self, linear: nnx.Linear):
    shape = formats.storage_shape(
      linear.in_features, linear.out_features, FORMAT, linear.bias is not None
    )
    self.words = nnx.Param(jnp.zeros(shape, jnp.uint32))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., in] to [..., out]."""
    return affine(x, self.words[...], FORMAT)


ModuleT = TypeVar("ModuleT", bound=nnx.Module)


def quantize_module(module: ModuleT) -> ModuleT:
  """Replaces the linear maps below a module, those whose outputs fill words; returns the module."""
  for path, linear in list(nnx.iter_graph(module)):
    if isinstance(linear, nnx.Linear) and _is_quantized(linear.out_features):
      parent: Any = module
      for part in path[:-1]:
        parent = getattr(parent, str(part))
      setattr(parent, str(path[-1]), nnx.data(QuantizedLinear(linear)))
  return module


def quantize_layers(params: dict[str, Any]) -> dict[str, Any]:
  """Quantises the decoder layers of a model's dense parameters, layer after layer.

  Args:
    params: pure dict; its `layers` are emptied as it goes, so that floats and integers of all
      layers are never held together.

  Returns:
    The parameters that modules of `quantize_module` have, in device memory.
  """
  layers = params["layers"]
  return params | {"layers": {i: quantize_params(layers.pop(i)) for i in sorted(layers)}}


def quantize_params(params: dict[str, Any]) -> dict[str, Any]:
  """Quantises the linear maps of a layer's parameters.

  Args:
    params: pure dict with a node {"kernel": [in, out], maybe "bias": [out]} for each linear map;
      routers, whose kernels stay as they are, are under "router".

  Returns:
    The same tree with {"words": uint32} in their place; device memory.
  """
  out = {}
  for name, node in params.items():
    if name != "router" and isinstance(node, dict):
      is_linear = "kernel" in node and _is_quantized(node["kernel"].shape[1])
      node = {"words": _pack(**node)} if is_linear else quantize_params(node)
    out[name] = node
  return out


def _is_quantized(out_features: int) -> bool:
  return out_features % (32 // formats.bits(FORMAT)) == 0


def _pack(kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
  rows = [np.asarray(kernel, np.float32)]
  if bias is not None:
    rows.append(np.asarray(bias, np.float32)[None])
  return jnp.asarray(formats.pack(np.concatenate(rows), FORMAT, bias is not None))
