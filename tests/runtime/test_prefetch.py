"""Prefetch and substitution inside the decode step: what is copied, how often, and when not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax.runtime.decode import jit_decode_step
from moecore_jax.specs import EngineSpec, PrefetchSpec, ResidencySpec
from moecore_jax.testing import tiny

pytestmark = pytest.mark.cover

SPEC = tiny.tiny_spec(num_moe_layers=3, num_experts=16, num_experts_per_tok=3)
ENGINE = EngineSpec(
  batch_size=2, context_tokens=64, prefill_buckets=(16,), kv_block_tokens=16, layer_loop="scanned"
)
STEPS = 12
LAYERS = 3


@pytest.fixture(scope="module")
def model():
  return tiny.random_model(SPEC, ENGINE)


def still_model(model, flips=()):
  """A model whose layers leave the stream as it is: a router's input is the next one's too; the
  norms of the MoE layers in `flips` turn its sign, so that they choose what they liked least."""

  def change(path, leaf):
    names = [getattr(entry, "key", None) for entry in path]
    if "o_proj" in names or "down_proj" in names or "bias" in names:
      return jnp.zeros_like(leaf)
    if "mlp_norm" in names:
      sign = -1.0 if names[1] - 1 in flips else 1.0
      return jnp.full_like(leaf, sign)
    return leaf

  def silent(rows):
    return jax.device_put(np.zeros(rows.shape, rows.dtype), rows.sharding)

  banks = tuple(dict(bank, down=silent(bank["down"])) for bank in model.banks)
  return model._replace(params=jax.tree.map_with_path(change, model.params), banks=banks)


def start(model, prefetch, slots=4, **kwargs):
  residency = ResidencySpec("rhac", (slots,) * LAYERS, prefetch=prefetch, **kwargs)
  engine = tiny.make_engine(model, residency, ENGINE)
  for row, prompt in enumerate(tiny.random_prompts(SPEC, (5, 9))):
    engine.prefill(row, prompt, STEPS + 40)
  assert not engine.counters()["prefill_prefetches"].any()  # without a profile
  return engine


def advanced(engine, steps=1):
  """Returns the decode counters that some steps add, [layers] each."""
  before = engine.counters()
  for _ in range(steps):
    engine.decode_step()
  after = engine.counters()
  return {k.removeprefix("decode_"): after[k] - before[k] for k in after if k.startswith("decode")}


def test_what_is_predicted_and_needed_is_loaded_once(model):
  count = 2
  engine, one = start(model, PrefetchSpec(count)), 3 * 32 * 16 * 4
  issued = useful = 0
  for _ in range(STEPS):
    resident = np.asarray(engine.state.groups[0].tables.expert_to_slot) >= 0
    before = engine.counters()
    out = engine.decode_step()
    after = engine.counters()
    new = {name.removeprefix("decode_"): after[name] - before[name] for name in after}
    for layer, ids in enumerate(np.asarray(out.topk_ids)):
      absent = [e for e in set(ids.flatten().tolist()) if not resident[layer, e]]
      assert new["misses"][layer] + new["useful_prefetches"][layer] == len(absent)
      loads = new["misses"][layer] + new["prefetches"][layer]
      assert new["moved_bytes"][layer] == loads * one
      assert new["prefetches"][layer] in (0, count)
    issued, useful = issued + new["prefetches"], useful + new["useful_prefetches"]
  assert issued[0] == 0 and (issued[1:] > 0).all() and (useful[1:] > 0).all()


@pytest.mark.parametrize("predictor_input", ["literal", "renorm"])
def test_a_perfect_prediction_is_always_useful(model, predictor_input):
  new = advanced(start(still_model(model), PrefetchSpec(1, (), predictor_input)), STEPS)
  np.testing.assert_array_equal(new["predicted"][1:], new["invocations"][1:])
  np.testing.assert_array_equal(new["useful_prefetches"], new["prefetches"])
  assert (new["prefetches"][1:] > 0).all()


def test_a_layer_with_wrong_predictions_stops_and_resumes_without_a_new_program(model):
  wrong, right = still_model(model, flips=(1,)), still_model(model)
  engine = start(wrong, PrefetchSpec(1, min_useful_frac=0.5, useful_decay=0.7))
  engine.release(1)  # what one row is wrongly thought to need the other might
  first = advanced(engine, STEPS)
  assert first["prefetches"][1] > 0 and first["useful_prefetches"][1] == 0
  compilations = jit_decode_step()._cache_size()
  assert advanced(engine, STEPS)["prefetches"][1] == 0  # and is scored in the shadow meanwhile
  engine.params = tiny.make_engine(right, engine.residency, ENGINE).params
  later = advanced(engine, STEPS)
  assert later["useful_prefetches"][1] == later["prefetches"][1] > 0
  assert jit_decode_step()._cache_size() == compilations


def test_what_a_copy_displaces_at_once_is_counted(model):
  engine = start(model, PrefetchSpec(1, placement="slot"))
  advanced(engine, 4)
  (group,) = engine.state.groups
  np.testing.assert_array_equal((np.asarray(group.tables.expert_to_slot) >= 0).sum(1), 4)  # full
  new = advanced(engine, STEPS)
  assert new["prefetches"][1:].all()
  np.testing.assert_array_equal(new["evictions"], new["misses"] + new["prefetches"])


def test_no_link_bound_of_zero_is_overstepped(model):
  new = advanced(start(model, PrefetchSpec(2, link_experts=(9, 0, 1))), STEPS)
  assert new["prefetches"][1] == 0 and 0 < new["prefetches"][2] <= STEPS


def test_substitution_leaves_prefill_exact_and_saves_loads(model):
  prompts = tiny.random_prompts(SPEC, (5, 9))
  exact, loose = (
    tiny.make_engine(
      model, ResidencySpec("rhac", (4,) * LAYERS, substitution_threshold=alpha), ENGINE
    )
    for alpha in (0.0, 0.9)
  )
  a, b = (tiny.decode_all(engine, prompts, STEPS) for engine in (exact, loose))
  for x, y in zip(a.prompt_logits, b.prompt_logits, strict=True):
    np.testing.assert_array_equal(x, y)
  exact_count, loose_count = exact.counters(), loose.counters()
  for name in ("misses", "hits", "evictions", "substitutions"):
    np.testing.assert_array_equal(exact_count[f"prefill_{name}"], loose_count[f"prefill_{name}"])
  assert not exact_count["decode_substitutions"].any()
  assert loose_count["decode_substitutions"].sum() > 0
  assert loose_count["decode_misses"].sum() < exact_count["decode_misses"].sum()


def test_padding_predicts_nothing(model):
  """A free row neither changes what is predicted nor what is counted."""
  engine = start(model, PrefetchSpec(1))
  engine.state = dataclasses.replace(engine.state, active=jnp.zeros(2, bool))
  new = advanced(engine, 3)
  assert not any(counts.any() for counts in new.values())
