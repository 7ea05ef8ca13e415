"""Loads a small published-format folder straight into a module, for tests of the model alone."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from moecore_jax import families
from moecore_jax.checkpoint import assemble
from moecore_jax.models.experts import HostExpert
from moecore_jax.models.transformer import Transformer


def load_module(folder: str | pathlib.Path) -> Transformer:
  """Returns the float32 model of a single-file checkpoint, all parameters in default memory."""
  folder = pathlib.Path(folder)
  spec = families.model_spec(json.loads((folder / "config.json").read_text()))
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  keymap = families.key_map(spec)

  def read(key):
    return tensors[key].astype(np.float32)

  model = nnx.eval_shape(lambda: Transformer(spec, rngs=nnx.Rngs(0)))
  graphdef, bank, dense = nnx.split(model, HostExpert, ...)
  banks = {
    name: {
      g: {k: np.zeros(v.shape, v.dtype) for k, v in arrays.items()} for g, arrays in groups.items()
    }
    for name, groups in nnx.to_pure_dict(bank).items()
  }
  for row in assemble.expert_rows(keymap, read):
    arrays = banks[row.bank][row.group]
    arrays["gate_up"][row.row], arrays["down"][row.row] = row.gate_up, row.down
  nnx.replace_by_pure_dict(bank, _to_jax(banks))
  nnx.replace_by_pure_dict(dense, _to_jax(assemble.dense_params(keymap, read)))
  return nnx.merge(graphdef, bank, dense)


def _to_jax(tree):
  return {k: _to_jax(v) if isinstance(v, dict) else jnp.asarray(v) for k, v in tree.items()}
