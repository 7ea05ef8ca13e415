"""Each family's published checkpoint through the engine against reference activations: logits,
routes, greedy tokens, and the keys of indexers and the MTP chain where the reference has them.

The weights are random, the names, layouts and configs are those of the published checkpoints.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import verify
from checkpoints_convert.convert import convert
from moecore_jax import checkpoint
from moecore_jax.checkpoint.published import read_spec
from moecore_jax.runtime.engine import Engine
from moecore_jax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

ORACLES = pathlib.Path(__file__).parents[1] / "oracles"
FOLDERS = sorted(path.name for path in ORACLES.iterdir())
ATOL = 1e-4
STEPS = 6


def load(folder: pathlib.Path) -> checkpoint.Loaded:
  return checkpoint.load(str(folder), dtype=jnp.float32, expert_format="float32")


def mismatches(
  loaded: checkpoint.Loaded, engine: Engine, oracle: verify.Oracle
) -> list[verify.Row]:
  rows = list(verify.compare_engine(engine, oracle, ATOL))
  rows += verify.compare_whole(loaded, oracle, ATOL)
  spec = loaded.spec
  indexed = [name for name in oracle if name.endswith("_index_topk")]
  assert len(rows) >= 2 * len(spec.moe_layers) + 4 + len(indexed) + 4 * bool(spec.mtp_layers)
  return [row for row in rows if not row.ok]


def test_all_families_have_an_oracle():
  from moecore_jax import families

  assert {read_spec(ORACLES / name).family for name in FOLDERS} == set(families.NAMES)


@pytest.mark.cover
@pytest.mark.parametrize("name", FOLDERS)
def test_prompts_in_chunks_and_ragged_rows(name):
  """With one slot and with as many as a token takes, by turns. The chunks of a prompt, the last one
  padded, end within windows; and rows of several lengths equal those run alone, bit for bit, with
  what others left in the caches.
  """
  folder = ORACLES / name
  spec, oracle = read_spec(folder), verify.read_oracle(str(folder / "oracle.npz"))
  per_token = [g.num_experts_per_tok for g in spec.expert_groups]
  slots = tuple(
    per_token[spec.group_of(layer)[0]] if i % 2 else 1 for i, layer in enumerate(spec.moe_layers)
  )
  long, short = oracle["input_ids"]
  ragged = [short[:5], long]
  with jax.default_matmul_precision("highest"):
    loaded = load(folder)
    engine = verify.make_engine(loaded, oracle, slots, chunk_tokens=7)
    assert mismatches(loaded, engine, oracle) == []
    together = tiny.decode_all(engine, ragged, STEPS)
    for row, prompt in enumerate(ragged):
      engine.release(1)
      alone = tiny.decode_all(engine, [prompt], STEPS)
      np.testing.assert_array_equal(alone.prompt_logits[0], together.prompt_logits[row])
      np.testing.assert_array_equal(alone.logits[:, 0], together.logits[:, row])
      np.testing.assert_array_equal(alone.tokens[:, 0], together.tokens[:, row])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("slots", [0, 1])
def test_after_conversion(name, slots, tmp_path):
  """Whole prompts, with all experts and with one slot."""
  convert(str(ORACLES / name), str(tmp_path / "converted"), show_progress=False)
  oracle = verify.read_oracle(str(ORACLES / name / "oracle.npz"))
  with jax.default_matmul_precision("highest"):
    loaded = load(tmp_path / "converted")
    assert mismatches(loaded, verify.make_engine(loaded, oracle, slots), oracle) == []
