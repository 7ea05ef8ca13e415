"""DeepSeek-V4 against reference activations of a random checkpoint: whole sequences, MTP, and the
engine."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import verify
from moecore_jax import checkpoint, families, planner
from moecore_jax.models.router import Router
from moecore_jax.residency.substitution import substitute
from moecore_jax.runtime.engine import Engine
from moecore_jax.runtime.plan import make_plan
from moecore_jax.specs import DeviceSpec, EngineSpec, ResidencySpec
from moecore_jax.testing.published import load_module

FOLDER = pathlib.Path(__file__).parents[1] / "oracles" / "deepseek_v4"
ATOL = 1e-4
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def oracle():
  return dict(np.load(FOLDER / "oracle.npz"))


@pytest.fixture(scope="module")
def model():
  return load_module(FOLDER)


@pytest.fixture(scope="module")
def whole(model, oracle):
  return jax.jit(lambda t: model(t))(oracle["input_ids"])


def published(name="config.json"):
  return json.loads((FOLDER / name).read_text())


def test_both_spellings_of_the_config_are_one_model():
  spec = families.model_spec(published())
  assert spec == families.model_spec(published("config_public.json"))
  ratios = [c.ratio if c else 0 for c in (layer.attention.compression for layer in spec.layers)]
  assert ratios == [0, 4, 8, 4]


@pytest.mark.parametrize(
  ("name", "fields", "match"),
  [
    ("config.json", {"layer_types": ["full_attention"] * 4}, "layer_types is"),
    ("config.json", {"mlp_layer_types": ["moe"]}, "mlp_layer_types is"),
    ("config_public.json", {"compress_ratios": [0, 4]}, "a window .* 4 layers"),
    ("config_public.json", {"compress_ratios": [0, 4, "8", 4]}, "a window in tokens"),
    ("config_public.json", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
  ],
)
def test_a_config_of_another_kind_is_refused(name, fields, match):
  with pytest.raises(ValueError, match=match):
    families.model_spec(published(name) | fields)


def test_whole_sequences(model, whole, oracle):
  tokens = oracle["input_ids"]
  np.testing.assert_allclose(whole.logits, oracle["logits"], atol=ATOL, rtol=0)
  for layer, routing in zip(model.spec.moe_layers, whole.routings, strict=True):
    order = np.argsort(routing.topk_ids, axis=-1)
    ids, weights = (
      np.take_along_axis(np.asarray(x), order, -1).reshape((*tokens.shape, -1))
      for x in (routing.topk_ids, routing.topk_weights)
    )
    np.testing.assert_array_equal(ids, oracle[f"layer{layer}_topk_idx"])
    np.testing.assert_allclose(weights, oracle[f"layer{layer}_topk_w"], atol=ATOL, rtol=0)
  for layer, picks in enumerate(whole.picks):
    if picks is not None:
      wanted = np.sort(oracle[f"layer{layer}_index_topk"], -1)
      np.testing.assert_array_equal(np.sort(picks, -1), wanted)
  assert [picks is not None for picks in whole.picks] == [False, True, False, True]


def test_one_mtp_layer_drafts_several_tokens(model, whole, oracle):
  draft = jax.jit(model.draft, static_argnums=0)
  tokens, hidden = oracle["input_ids"][:1], whole.hidden[:1]
  length = tokens.shape[1]
  np.testing.assert_allclose(hidden, oracle["mtp_streams_in"], atol=ATOL, rtol=0)
  tokens = np.concatenate([tokens, np.argmax(whole.logits[:1, -1:], -1)], axis=1)
  for depth in range(3):
    following = jnp.asarray(tokens[:, depth + 1 : depth + 1 + length], jnp.int32)
    out = draft(0, hidden, following, jnp.arange(length, dtype=jnp.int32)[None] + depth)
    hidden = out.hidden
    np.testing.assert_allclose(hidden, oracle[f"mtp_streams_d{depth + 1}"], atol=ATOL, rtol=0)
    wanted = oracle["mtp_rec_logits"][:, depth]
    np.testing.assert_allclose(out.logits[:, -1], wanted, atol=ATOL, rtol=0)
    tokens = np.concatenate([tokens, np.argmax(out.logits[:, -1:], -1)], axis=1)
  np.testing.assert_array_equal(tokens[:, -3:], oracle["mtp_rec_tokens"])


def test_the_engine(oracle):
  """Prompts in four chunks, the last of them padded; layers with one slot to all experts; blocks of
  which a context has several, the last of them cut short; and rows that served others before."""
  loaded = checkpoint.load(str(FOLDER), dtype=jnp.float32, expert_format="float32")
  residency = ResidencySpec("rhac", (1, 3, 16, 2))
  spec = EngineSpec(batch_size=2, context_tokens=48, prefill_buckets=(7,), kv_block_tokens=4)
  engine = Engine(loaded.spec, residency, spec, loaded.params, loaded.banks)
  first = list(verify.compare_engine(engine, oracle, ATOL))
  swapped = {name: x[::-1] if x.shape[0] == 2 else x for name, x in oracle.items()}
  second = list(verify.compare_engine(engine, swapped, ATOL))
  assert [row.name for row in first + second if not row.ok] == []

  plan = make_plan(loaded.spec, residency, spec, DeviceSpec())
  planned, report = planner.regions(plan.demand, plan.settings), engine.memory_report()["device"]
  assert {name: planned[name] for name in report} == report


def test_hash_routing_goes_by_the_token_and_is_never_substituted(model):
  router: Router = model.layers[0].mlp.router
  tokens = jnp.arange(6, dtype=jnp.int32)
  h = jax.random.normal(jax.random.key(0), (2, 6, model.spec.embed_dim))
  route = jax.jit(lambda h: router(h, tokens))
  here, before = route(h[0]), route(h[1])  # before: as a prefetch predicts it
  np.testing.assert_array_equal(here.topk_ids, router.table[...].T[:6])
  np.testing.assert_array_equal(here.topk_ids, before.topk_ids)
  np.testing.assert_array_equal(here.selection_scores, before.selection_scores)
  assert np.abs(here.topk_weights - before.topk_weights).max() > 1e-3
  nothing = jnp.zeros(16, bool).at[8:].set(True)
  valid, threshold = jnp.ones(6, bool), 0.9
  run = jax.jit(substitute, static_argnums=4)
  done = run(here.topk_ids, here.selection_scores, valid, nothing, threshold)
  np.testing.assert_array_equal(done.topk_ids, here.topk_ids)
  assert not done.is_substituted.any()
