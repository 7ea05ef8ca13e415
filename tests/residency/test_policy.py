"""Every policy against its plain-Python oracle, step by step, and what all policies share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax import residency, specs
from tests.residency import driver, oracles

N, A = 12, 3
SLOTS = (1, 2, 3, 5, N)  # K = 1, K < k, K = k, K > k, K = N: layers of one table, one program
STEPS = 40

RHAC_SPECS = {
  "default": specs.RhacSpec(),
  "all_terms": specs.RhacSpec(
    window=5,
    decay=0.9,
    frequency_weight=1.3,
    average_weight=0.7,
    score_weight=0.9,
    age_weight=0.4,
    age_cap=9,
  ),
  "window_32": specs.RhacSpec(window=32, decay=0.0, frequency_weight=1.0, age_weight=1.0),
  "score_only": specs.RhacSpec(window=1, average_weight=0, score_weight=1.0, age_weight=0),
  "no_terms": specs.RhacSpec(average_weight=0, age_weight=0),
}
CASES = [("rhac", name) for name in RHAC_SPECS]
CASES += [(name, None) for name in ("lru", "lfu", "fifo", "static")]


def make(name, rhac_name):
  """Returns (policy, oracle factory)."""
  spec = RHAC_SPECS.get(rhac_name)
  oracle = {
    "rhac": lambda: oracles.Rhac(N, spec),
    "lru": lambda: oracles.Lru(N),
    "lfu": lambda: oracles.Lfu(N),
    "fifo": lambda: oracles.Fifo(N),
    "static": lambda: None,
  }[name]
  return residency.make_policy(name, spec), oracle


def signals_of_oracle(name, oracle):
  if name == "rhac":
    return [oracle.frequency, list(oracle.average), list(oracle.age), list(oracle.score)]
  if name == "lfu":
    return [list(oracle.count)]
  if name == "static":
    return []
  stamps = oracle.last_use if name == "lru" else oracle.entry
  return [[stamp - oracle.time for stamp in stamps]]


def signals_of_policy(name, state):
  if name == "rhac":
    return [np.bitwise_count(state.window), state.average, state.age, state.score]
  return [] if name == "static" else [state]


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(("name", "rhac_name"), CASES)
def test_equals_oracle(name, rhac_name, num_tokens):
  policy, make_oracle = make(name, rhac_name)
  rng = np.random.default_rng(7)
  tables = residency.init_tables(N, SLOTS)
  rank = np.stack([rng.permutation(N) for _ in SLOTS])
  rank[1] = 0  # a layer without a profile
  tables = dataclasses.replace(tables, warm_rank=jnp.asarray(rank, jnp.int32))
  run = jax.jit(functools.partial(driver.run_stream, policy, max(SLOTS)))
  num_victims = 0
  for topk_ids, scores, valid in driver.make_streams(N, A, num_tokens, STEPS, rng).values():
    for layer, num_slots in enumerate(SLOTS):
      outputs = run(tables, layer, topk_ids, scores, valid, jax.random.key(0))
      after, state, log = jax.device_get(outputs)
      oracle = make_oracle()
      cache = oracles.Cache(num_slots, rank[layer], oracle)
      first = sum(SLOTS[:layer])
      expected = []
      for s in range(STEPS):
        cache.step(
          [
            (topk_ids[s, t].tolist(), scores[s, t].tolist())
            for t in range(num_tokens)
            if valid[s, t]
          ]
        )
        rows = after.slot_to_expert[s, first : first + num_slots].tolist()
        assert [None if e < 0 else e for e in rows] == cache.slots
        loads = [
          (
            int(log.plan.order[s, i]),
            None if slot < 0 else int(slot) - first,
            None if log.evicted[s, i] < 0 else int(log.evicted[s, i]),
          )
          for i, slot in enumerate(log.slots[s])
          if slot != -2
        ]
        assert loads == cache.log
        expected.append(signals_of_oracle(name, oracle))
        num_victims += sum(victim is not None for _, _, victim in loads)
      signals = signals_of_policy(name, state)
      for actual, steps in zip(signals, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(actual, np.array(steps))
  assert (num_victims > 1000) == policy.evicts


@pytest.mark.parametrize("name", ["rhac", "lru", "lfu", "random"])
def test_padding_changes_nothing(name):
  """Batch 5 padded to 8: residents, victims, signals equal those of the unpadded run.

  The padding carries ids of its own and scores that are not numbers, before, between and behind.
  """
  policy = residency.make_policy(name, RHAC_SPECS["all_terms"])
  rng = np.random.default_rng(3)
  topk_ids, scores, valid = driver.make_streams(N, A, 5, 20, rng)["random"]
  where = np.array([1, 2, 4, 5, 7])
  padded_ids = np.full((20, 8, A), 11, np.int32)
  padded_scores = np.full((20, 8, N), np.nan, np.float32)
  padded_valid = np.zeros((20, 8), bool)
  padded_ids[:, where], padded_scores[:, where], padded_valid[:, where] = topk_ids, scores, valid
  tables = residency.init_tables(N, (4, 2))
  run = jax.jit(functools.partial(driver.run_stream, policy, 4))
  key = jax.random.key(1)
  plain = jax.device_get(run(tables, 1, topk_ids, scores, valid, key))
  padded = jax.device_get(run(tables, 1, padded_ids, padded_scores, padded_valid, key))
  jax.tree.map(np.testing.assert_array_equal, plain, padded)


@pytest.mark.parametrize("name", ["rhac", "lru", "lfu", "fifo", "random", "static"])
def test_step_of_padding_only(name):
  policy = residency.make_policy(name, RHAC_SPECS["all_terms"])
  state = policy.observe(
    policy.init(N), jnp.arange(A, dtype=jnp.int32)[None], jnp.ones((1, N)), jnp.ones(1, bool)
  )
  after = policy.observe(
    state, jnp.ones((4, A), jnp.int32), jnp.full((4, N), jnp.nan), jnp.zeros(4, bool)
  )
  jax.tree.map(np.testing.assert_array_equal, state, after)


@pytest.mark.parametrize("name", ["rhac", "lru", "random"])
def test_vmap_equals_loop(name):
  """Caches of one shape run side by side under vmap, the layer mapped too."""
  policy = residency.make_policy(name)
  rng = np.random.default_rng(5)
  streams = [driver.make_streams(N, A, 2, 12, rng)["skewed"] for _ in range(3)]
  tables = residency.init_tables(N, (4, 2, 5))
  run = functools.partial(driver.run_stream, policy, 5)
  keys = jax.random.split(jax.random.key(2), 3)
  batch = [np.stack(x) for x in zip(*streams, strict=True)]
  mapped = jax.jit(jax.vmap(run, in_axes=(None, 0, 0, 0, 0, 0)))(
    tables, jnp.arange(3), *batch, keys
  )
  single = jax.jit(run)
  for i, stream in enumerate(streams):
    expected = single(tables, i, *stream, keys[i])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], mapped), expected)


def test_one_program_for_every_allocation():
  """Layer and slots are traced: other numbers, same total, no new compilation."""
  policy = residency.make_policy("rhac")
  stream = driver.make_streams(N, A, 1, 4, np.random.default_rng(0))["random"]
  run = jax.jit(functools.partial(driver.run_stream, policy, 6))
  for slots in ((4, 4), (2, 6), (6, 2)):
    for layer in (0, 1):
      run(residency.init_tables(N, slots, 6), layer, *stream, jax.random.key(0))
  assert run._cache_size() == 1


def test_make_policy_reads_a_residency_spec():
  spec = specs.ResidencySpec("rhac", (2,), specs.RhacSpec(window=1, frequency_weight=1.0))
  policy = residency.make_policy(spec)
  state = policy.init(4)
  for ids in ([0, 1], [2, 3]):
    state = policy.observe(
      state, jnp.asarray([ids], jnp.int32), jnp.zeros((1, 4)), jnp.ones(1, bool)
    )
  np.testing.assert_array_equal(state.window, [0, 0, 1, 1])
  assert residency.make_policy(specs.ResidencySpec("static", (2,))).evicts is False


def test_unknown_policy_is_refused():
  with pytest.raises(ValueError, match=r"policy is 'mru', expected one of rhac, lru"):
    residency.make_policy("mru")
