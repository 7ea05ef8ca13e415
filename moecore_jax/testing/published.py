"""Loads a small published-format folder straight into a module, for tests of the model alone."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from moecore_jax import families
from moecore_jax.models.experts import HostExpert
from moecore_jax.models.transformer import Transformer


def load_module(folder: str | pathlib.Path) -> Transformer:
  """Returns the float32 model of a single-file checkpoint, all parameters in default memory."""
  folder = pathlib.Path(folder)
  spec = families.model_spec(json.loads((folder / "config.json").read_text()))
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  keymap = families.key_map(spec)

  tensors = {
    key: tensor if key in keymap.id_tables else tensor.astype(np.float32)
    for key, tensor in tensors.items()
  }

  model = nnx.eval_shape(lambda: Transformer(spec, rngs=nnx.Rngs(0)))
  graphdef, bank, dense = nnx.split(model, HostExpert, ...)
  banks = {
    name: {
      g: {k: np.zeros(v.shape, v.dtype) for k, v in arrays.items()} for g, arrays in groups.items()
    }
    for name, groups in nnx.to_pure_dict(bank).items()
  }
  for rule in keymap.experts:
    arrays = banks[rule.bank][rule.group]
    sources = [tensors[key] for key in rule.sources]
    if rule.entry is not None:
      sources = [source[rule.entry] for source in sources]
    arrays["gate_up"][rule.row], arrays["down"][rule.row] = rule.make(*sources)
  params: dict = {}
  for rule in keymap.dense:
    node = params
    for part in rule.target[:-1]:
      node = node.setdefault(part, {})
    parts = [rule.make(tensors[key]) for key in rule.sources]
    node[rule.target[-1]] = np.concatenate(parts, rule.axis)
  nnx.replace_by_pure_dict(bank, _to_jax(banks))
  nnx.replace_by_pure_dict(dense, _to_jax(params))
  return nnx.merge(graphdef, bank, dense)


def _to_jax(tree):
  return {k: _to_jax(v) if isinstance(v, dict) else jnp.asarray(v) for k, v in tree.items()}
