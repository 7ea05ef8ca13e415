"""Key maps of all families: every published tensor is used, every array of ours is made once, and
no layout follows from sizes that coincide."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax import families
from moecore_jax.checkpoint import assemble, template
from moecore_jax.checkpoint.published import PublishedCheckpoint

ORACLES = pathlib.Path(__file__).parents[1] / "oracles"
FOLDERS = sorted(path.name for path in ORACLES.iterdir())


@pytest.mark.parametrize("name", FOLDERS)
def test_every_source_is_read_and_every_target_written_once(name):
  opened, reads = PublishedCheckpoint(ORACLES / name), set()
  keymap, spec = opened.keymap, opened.spec

  def read(key, *rows):
    reads.add(key)
    return opened.read(key, *rows)

  pieces = [piece.path for piece in assemble.dense_pieces(keymap, read)]
  chunks = list(assemble.bank_chunks(keymap, read, spec, "float32"))
  assert set(opened.tensors) - reads <= set(keymap.skipped)
  wanted = jax.tree_util.tree_leaves_with_path(template.dense_template(spec, jnp.float32))
  paths = [tuple(key.key for key in path) for path, _ in wanted]
  assert sorted(pieces, key=str) == sorted(paths, key=str)
  rows = [(c.bank, c.group, c.start + i) for c in chunks for i in range(len(c.arrays["down"]))]
  groups = {"experts": spec.expert_groups, "mtp_experts": spec.mtp_expert_groups}
  assert sorted(rows) == [
    (bank, g, row)
    for bank, of_bank in groups.items()
    for g, group in enumerate(of_bank)
    for row in range(len(group.layers) * group.num_experts)
  ]


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("times", [1, 2])
def test_no_layout_follows_from_sizes_that_coincide(name, times):
  """The stream is as wide as an expert, or as its gate and up together."""
  config = json.loads((ORACLES / name / "config.json").read_text())
  dim = config["hidden_size"]
  width = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
  keymap = families.key_map(families.model_spec(config | {width: dim // times}))
  rule, rng = keymap.experts[-1], np.random.default_rng(0)
  sources = [rng.normal(size=keymap.shapes[key]) for key in rule.sources]
  if rule.entry is not None:
    sources = [source[rule.entry] for source in sources]
  x, h = rng.normal(size=dim), rng.normal(size=dim // times)
  if name == "gpt_oss":  # [in, out], gate and up by turns, and biases
    gate_up, gate_up_bias, down, down_bias = sources
    both, out = x @ gate_up + gate_up_bias, h @ down + down_bias
    both = np.concatenate([both[::2], both[1::2]])
    x, h = np.append(x, 1), np.append(h, 1)
  elif name == "granitemoe":  # [out, in], gate above up
    both, out = (matrix @ vector for matrix, vector in zip(sources, (x, h), strict=True))
  else:  # [out, in]
    gate, up, down = sources
    both, out = np.concatenate([gate @ x, up @ x]), down @ h
  gate_up, down = rule.make(*sources)
  np.testing.assert_allclose(x @ gate_up, both)
  np.testing.assert_allclose(h @ down, out)
