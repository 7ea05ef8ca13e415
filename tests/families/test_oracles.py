"""Each family's published checkpoint through the engine against reference activations: logits,
routes, greedy tokens, and the MTP chain where the reference has one.

The weights are random, the names, layouts and configs are those of the published checkpoints.
"""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from checkpoints_convert import verify
from checkpoints_convert.convert import convert
from moecore_jax import checkpoint
from moecore_jax.checkpoint.published import read_spec

pytestmark = pytest.mark.usefixtures("quick_compilation")

ORACLES = pathlib.Path(__file__).parents[1] / "oracles"
FOLDERS = sorted(path.name for path in ORACLES.iterdir())
ATOL = 1e-4


def mismatches(folder: pathlib.Path, oracle_folder: pathlib.Path, slots) -> list[verify.Row]:
  oracle = verify.read_oracle(str(oracle_folder / "oracle.npz"))
  with jax.default_matmul_precision("highest"):
    loaded = checkpoint.load(str(folder), dtype=jnp.float32, expert_format="float32")
    engine = verify.make_engine(loaded, oracle, slots)
    rows = list(verify.compare_engine(engine, oracle, ATOL))
    if "mtp_hidden_in" in oracle:
      rows += verify.compare_mtp(loaded, oracle, ATOL)
  assert len(rows) >= 2 * len(loaded.spec.moe_layers) + 4
  return [row for row in rows if not row.ok]


def test_all_families_have_an_oracle():
  from moecore_jax import families

  assert {read_spec(ORACLES / name).family for name in FOLDERS} == set(families.NAMES)


@pytest.mark.cover
@pytest.mark.parametrize("name", FOLDERS)
def test_one_slot_and_as_many_as_a_token_takes(name):
  spec = read_spec(ORACLES / name)
  per_token = [g.num_experts_per_tok for g in spec.expert_groups]
  slots = tuple(
    per_token[spec.group_of(layer)[0]] if i % 2 else 1 for i, layer in enumerate(spec.moe_layers)
  )
  assert mismatches(ORACLES / name, ORACLES / name, slots) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("slots", [0, 1])
def test_after_conversion(name, slots, tmp_path):
  convert(str(ORACLES / name), str(tmp_path / "converted"), show_progress=False)
  assert mismatches(tmp_path / "converted", ORACLES / name, slots) == []
