"""Writes a trained model as a published checkpoint: config.json, model.safetensors, tokenizer.json.

The family's key map says how published tensors become our arrays. Every rule only moves numbers, so
it is inverted by sending the numbers' indices through it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers
from flax import nnx

from moecore_jax import families
from moecore_jax.models.experts import HostExpert
from moecore_jax.specs import ModelSpec

_FLOAT32_KEYS = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")


def write(
  folder: Path,
  published: Mapping[str, Any],
  spec: ModelSpec,
  params: nnx.State,
  biases: nnx.State,
  tokenizer: tokenizers.Tokenizer,
) -> None:
  """Writes the folder; bfloat16 but for the routers, which stay float32."""
  folder.mkdir(parents=True, exist_ok=True)
  tensors = published_tensors(spec, params, biases)
  tensors = {
    key: x if key.endswith(_FLOAT32_KEYS) else x.astype(ml_dtypes.bfloat16)
    for key, x in tensors.items()
  }
  weights = safetensors.numpy.save(tensors, {"format": "pt"})
  (folder / "model.safetensors").write_bytes(weights)
  (folder / "config.json").write_text(json.dumps(dict(published), indent=2) + "\n")
  tokenizer.save(str(folder / "tokenizer.json"))


def published_tensors(
  spec: ModelSpec, params: nnx.State, biases: nnx.State
) -> dict[str, np.ndarray]:
  """Returns {published key: float32 array}, with the copies of embedding and head that MTP layers
  publish.
  """
  dense = dict(nnx.to_flat_state(params)) | dict(nnx.to_flat_state(biases))
  banks = {path: v for path, v in dense.items() if isinstance(v, HostExpert)}
  keymap = families.key_map(spec)
  out = {key: np.full(shape, np.nan, np.float32) for key, shape in keymap.shapes.items()}
  for rule in keymap.dense:

    def make(*parts: np.ndarray, rule=rule) -> np.ndarray:
      return np.concatenate([rule.make(part) for part in parts], rule.axis)

    _invert(out, rule.sources, make, (np.asarray(dense[rule.target][...]),))
  host = {path: np.asarray(v[...]) for path, v in banks.items()}
  for rule in keymap.experts:
    rows = tuple(host[rule.bank, rule.group, name][rule.row] for name in ("gate_up", "down"))
    _invert(out, rule.sources, rule.make, rows)
  for key in keymap.skipped:
    source = (
      "model.embed_tokens.weight" if key.endswith("embed_tokens.weight") else "lm_head.weight"
    )
    out[key] = out[source].copy()
  unset = [key for key, x in out.items() if np.isnan(x).any()]
  if unset:
    raise AssertionError(f"not every number of {unset[0]} comes from a parameter")
  return out


def _invert(out: dict[str, np.ndarray], sources: Sequence[str], make, arrays) -> None:
  """Writes our arrays into the published tensors that `make` would build them from."""
  sizes = np.cumsum([0, *(out[key].size for key in sources)])
  indices = [
    np.arange(start, end).reshape(out[key].shape)
    for key, start, end in zip(sources, sizes, sizes[1:], strict=False)
  ]
  made = make(*indices)
  flat = np.concatenate([out[key].reshape(-1) for key in sources])
  for index, array in zip(made if isinstance(made, tuple) else (made,), arrays, strict=True):
    flat[index] = array
  for key, start, end in zip(sources, sizes, sizes[1:], strict=False):
    out[key][...] = flat[start:end].reshape(out[key].shape)
