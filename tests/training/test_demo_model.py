"""The bundled weights: made by the config, and what they have learnt."""

import json
import pathlib

import pytest
import safetensors
import tokenizers
from flax import nnx

import moecore_jax
from moecore_jax.config_loading import load_config
from moecore_jax.models.router import SelectionBias
from moecore_jax.testing.published import load_module
from moecore_jax.training import heldout, workloads

PACKAGE = pathlib.Path(moecore_jax.__file__).parent
DEMO = PACKAGE / "assets" / "demo"
CONFIG = load_config(str(PACKAGE.parent / "configs" / "demo_train.py"))


@pytest.fixture(scope="module")
def evaluated():
  words = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
  graphdef, params, biases = nnx.split(load_module(DEMO), nnx.Param, SelectionBias)
  return heldout.make_evaluate(graphdef, heldout.load(words, workloads.NUM_ITEMS, "test"))(
    params, biases
  )


def test_files():
  assert json.loads((DEMO / "config.json").read_text()) == CONFIG.model.published_config
  assert (DEMO / "model.safetensors").stat().st_size <= 16_000_000
  with safetensors.safe_open(DEMO / "model.safetensors", "numpy") as f:
    dtypes = {key: f.get_slice(key).get_dtype() for key in f.keys()}  # noqa: SIM118  no mapping
  assert {key for key, dtype in dtypes.items() if dtype != "BF16"} == {
    key for key in dtypes if ".mlp.gate." in key
  }
  assert {dtypes[key] for key in dtypes if ".mlp.gate." in key} == {"F32"}


def test_held_out_items_are_answered_exactly(evaluated):
  rates, _ = evaluated
  assert rates["math"] >= 0.8
  assert rates["qa"] >= 0.8
  assert rates["code"] >= 0.8
  assert rates["agent"] >= 0.8


def test_domains_prefer_different_experts(evaluated):
  _, counts = evaluated
  overlap = heldout.top_quarter_overlap(counts)
  assert len(overlap) == 6
  assert max(overlap.values()) < 0.5


def test_every_expert_is_used(evaluated):
  _, counts = evaluated
  total = sum(counts.values())
  assert (total > 0).mean() > 0.95


def test_the_log_is_that_of_the_config():
  rows = [json.loads(line) for line in (DEMO / "training_log.jsonl").read_text().splitlines()]
  train = CONFIG.train
  assert [row["step"] for row in rows] == [
    *range(train.checkpoint_every, train.num_steps + 1, train.checkpoint_every)
  ]
  assert rows[-1]["tokens"] == train.num_steps * train.batch_rows * train.row_tokens
