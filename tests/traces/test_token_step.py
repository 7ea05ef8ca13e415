"""The fast step makes the engine's decisions: same slots, signals and counts after every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax import residency
from moecore_jax.specs import RhacSpec
from moecore_jax.traces import engine_replay, token_step
from moecore_jax.traces.trace import Phase
from tests.residency import driver

N, A, STEPS = 12, 3, 60
SLOTS = (A, 5, 8, N)
ALL_TERMS = RhacSpec(window=5, decay=0.9, frequency_weight=1.3, score_weight=0.9, age_cap=9)
POLICIES = {
  "rhac": residency.make_policy("rhac"),
  "rhac with all terms": residency.make_policy("rhac", ALL_TERMS),
  **{name: residency.make_policy(name) for name in ("lru", "lfu", "fifo", "random", "static")},
}


@functools.partial(jax.jit, static_argnums=0)
def run_both(name, num_slots, warm_rank, topk_ids, scores, valid):
  """Runs a stream through both steps; returns what each told after every token."""
  policy = POLICIES[name]
  layer = engine_replay.cold_layer(policy, N, N, N)
  tables = layer.tables
  tables = residency.SlotTables(
    tables.expert_to_slot,
    tables.slot_to_expert,
    tables.first_slot,
    num_slots[None],
    warm_rank[None],
    tables.last_used,
  )
  layer = layer._replace(tables=tables)

  def body(carry, step):
    layer, cache = carry
    index, ids, scores, valid = step
    key = jax.random.fold_in(jax.random.PRNGKey(3), index)
    layer, counts, _ = engine_replay.run_step(
      policy, Phase.DECODE, layer, N, ids, scores, valid, key
    )
    cache, served = token_step.serve(
      policy, cache, num_slots, warm_rank, ids[0], scores[0], valid[0], key, name == "random"
    )
    engine = layer.tables.expert_to_slot[0], layer.signals, counts[1:]
    return (layer, cache), (engine, (cache.slot_of, cache.signals, jnp.stack(served)))

  start = layer, token_step.cold_cache(policy, N)
  steps = jnp.arange(STEPS), topk_ids, scores, valid
  return jax.lax.scan(body, start, steps)[1]


@pytest.mark.parametrize("name", POLICIES)
def test_equals_the_engines_functions(name):
  rng = np.random.default_rng(11)
  num_evictions = 0
  for topk_ids, scores, valid in driver.make_streams(N, A, 1, STEPS, rng).values():
    for num_slots in SLOTS:
      for warm_rank in (np.zeros(N, np.int32), rng.permutation(N).astype(np.int32)):
        engine, fast = run_both(
          name, jnp.int32(num_slots), jnp.asarray(warm_rank), topk_ids, scores, valid
        )
        jax.tree.map(np.testing.assert_array_equal, engine, fast)
        num_evictions += int(fast[2][:, 2].sum())
  assert (num_evictions > 100) == (name != "static")


@pytest.mark.parametrize("name", ["rhac", "lru"])
def test_one_by_one_equals_tokens_of_one_expert(name):
  """Sequential counting is the engine's step, fed one choice at a time."""
  policy, warm_rank, zeros = POLICIES[name], jnp.zeros(N, jnp.int32), jnp.zeros((A, N))
  key, yes = jax.random.PRNGKey(0), jnp.ones((), bool)
  topk_ids, *_ = driver.make_streams(N, A, 1, 20, np.random.default_rng(5))["skewed"]

  @jax.jit
  def both(layer, cache, ids):
    for rank in range(A):
      layer, _, _ = engine_replay.run_step(
        policy, Phase.DECODE, layer, N, ids[rank, None, None], zeros[:1], yes[None], key
      )
    return layer, *token_step.serve_one_by_one(
      policy, cache, jnp.int32(4), warm_rank, ids, zeros, yes, key, False
    )

  layer, cache = engine_replay.cold_layer(policy, N, 4, N), token_step.cold_cache(policy, N)
  hits = 0
  for ids in topk_ids[:, 0]:
    layer, cache, served = both(layer, cache, jnp.asarray(ids))
    np.testing.assert_array_equal(layer.tables.expert_to_slot[0], cache.slot_of)
    assert int(served.hits) + int(served.misses) == A
    hits += int(served.hits)
  assert hits > 0
