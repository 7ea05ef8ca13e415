"""Warm starts: ranks of a request's domain, what they load and displace, and when nothing is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moecore_jax as moecore
from moecore_jax import checkpoint
from moecore_jax.models.router import Routing
from moecore_jax.residency import prefetch
from moecore_jax.residency import profiles as profiles_lib
from moecore_jax.runtime import routed, staging, warm_start
from moecore_jax.runtime.engine import DEMO
from moecore_jax.runtime.prefill import jit_prefill_chunk
from moecore_jax.specs import EngineSpec, PrefetchSpec, ResidencySpec, StagingSpec
from moecore_jax.testing import tiny
from moecore_jax.traces import EventKind, TraceRecorder

pytestmark = pytest.mark.cover

N, K, LAYERS = 16, 6, 2
SPEC = tiny.tiny_spec(num_dense_layers=0, num_experts=N, num_experts_per_tok=2)
ENGINE = EngineSpec(
  batch_size=2, context_tokens=64, prefill_buckets=(8,), kv_block_tokens=16, layer_loop="scanned"
)
PROFILES = tiny.random_profiles(SPEC)
COPIES = 2
SELECTIVE, FROM_PROFILE = StagingSpec(), StagingSpec(True, "profile")


@pytest.fixture(scope="module")
def model():
  return tiny.random_model(SPEC, ENGINE)


def make(model, profiles=PROFILES, staging=SELECTIVE):
  """Returns an engine and its recorder; all of one kind share their programs."""
  residency = ResidencySpec("rhac", (K,) * LAYERS, prefetch=PrefetchSpec(COPIES), staging=staging)
  recorder = TraceRecorder(keeps_scores=False)
  engine = tiny.make_engine(model, residency, ENGINE, profiles=profiles, recorder=recorder)
  return engine, recorder


def tables(engine):
  return jax.device_get(engine.state.groups[0].tables)


def order(domain):
  """Experts of each layer, the hottest first."""
  return np.argsort(profiles_lib.warm_rank(PROFILES.lookup(domain).mean_scores), axis=1)


def residents(engine):
  return [set(np.flatnonzero(row >= 0).tolist()) for row in tables(engine).expert_to_slot]


def test_admissions_rank_by_domain_without_a_new_program(model):
  engine, recorder = make(model, staging=FROM_PROFILE)  # prompts of 3 tokens and more are staged
  sizes = None
  for domain in ("math", "qa", "cooking", None):
    engine.prefill(0, [1, 2, 3], 5, domain=domain)
    sizes = sizes or (warm_start._ranks_of._cache_size(), jit_prefill_chunk._cache_size())
    wanted = profiles_lib.warm_rank(PROFILES.lookup(domain).mean_scores)
    np.testing.assert_array_equal(tables(engine).warm_rank, wanted)
    # Staged layers leave the hottest in the slots, and nothing else.
    assert residents(engine) == [set(row[:K].tolist()) for row in order(domain)]
  assert sizes == (warm_start._ranks_of._cache_size(), jit_prefill_chunk._cache_size())
  engine.prefill(1, [4, 5, 6], 5, domain="math")  # not alone: row 0 decodes
  assert residents(engine) == [set(row[:K].tolist()) for row in order(None)]
  events = recorder.trace(engine).events
  assert (events.kind == EventKind.ADMISSION).sum() == 5
  assert events.row[events.kind == EventKind.WARM_START].tolist() == [0] * 4


def test_a_prefill_on_demand_loads_what_the_warm_start_lacks(model):
  engine, recorder = make(model)
  engine.warm_up()
  assert not any(row for row in residents(engine))  # no token, no copy
  before = engine.counters()
  chosen = engine.prefill(0, [5], 20, domain="qa").topk_ids
  new = {name: value - before[name] for name, value in engine.counters().items()}
  for layer, row in enumerate(residents(engine)):
    # The first layer has no copies ahead; in the others the two hottest join what was chosen.
    wanted = order("qa")[layer][: COPIES * (layer > 0)].tolist()
    assert row == {*wanted, *chosen[layer, 0].tolist()}
    useful = len({*wanted} & {*chosen[layer, 0].tolist()})
    assert new["prefill_prefetches"][layer] == len(wanted)
    assert new["prefill_useful_prefetches"][layer] == useful
    assert new["prefill_misses"][layer] == 2 - useful
  loads = new["prefill_misses"] + new["prefill_prefetches"]
  np.testing.assert_array_equal(new["prefill_moved_bytes"], loads * 3 * 32 * 16 * 4)
  assert not new["prefill_predicted"].any()
  group = engine.state.groups[0]
  np.testing.assert_array_equal(group.useful_rate, 1.0)
  for layer, row in enumerate(np.asarray(group.tables.expert_to_slot)):
    for expert in np.flatnonzero(row >= 0):
      for name, bank in engine.banks[0].items():
        np.testing.assert_array_equal(group.pool[name][row[expert]], bank[layer * N + expert])

  # While row 0 decodes, another admission ranks, and touches neither residents nor signals.
  for _ in range(6):
    engine.decode_step()
  signals, kept = jax.device_get(engine.state.groups[0].policy), residents(engine)
  assert signals.age.any() and all(len(row) == K for row in kept)
  before = engine.counters()
  engine.prefill(1, [7], 20, domain="math")
  wanted = profiles_lib.warm_rank(PROFILES.lookup("math").mean_scores)
  np.testing.assert_array_equal(tables(engine).warm_rank, wanted)
  jax.tree.map(np.testing.assert_array_equal, engine.state.groups[0].policy, signals)
  after = engine.counters()
  np.testing.assert_array_equal(after["prefill_prefetches"], before["prefill_prefetches"])

  # Alone again, what is hot displaces what is colder.
  engine.release(0)
  engine.prefill(1, [7], 20, domain="qa")
  assert engine.counters()["prefill_prefetches"][1] == after["prefill_prefetches"][1] + COPIES
  trace = recorder.trace(engine)
  assert EventKind.WARM_START not in trace.events.kind
  assert trace.domain.tolist() == ["qa", "math", "qa"]


@pytest.mark.parametrize(
  ("fill", "has_profile", "has_tokens"),
  [("profile", False, True), ("both", True, False), ("both", False, True), ("profile", True, True)],
)
def test_slots_are_filled_where_there_is_something_to_follow(model, fill, has_profile, has_tokens):
  engine, _ = make(model, staging=StagingSpec(True, fill))
  (group,) = engine.state.groups
  if has_profile:
    warm_rank = jnp.asarray(profiles_lib.warm_rank(PROFILES.merged.mean_scores))
    group = dataclasses.replace(
      group, tables=dataclasses.replace(group.tables, warm_rank=warm_rank)
    )
  scores = jnp.asarray(np.random.default_rng(0).normal(size=(4, N)), jnp.float32)
  valid = jnp.asarray([has_tokens] * 3 + [False])
  topk_ids = jnp.zeros((4, 2), jnp.int32)
  nothing = prefetch.no_prediction(topk_ids, N)
  inputs = routed.Inputs(scores, Routing(scores, topk_ids, scores[:, :2]), valid, nothing)
  places = np.asarray(staging.warm_order(engine.program, group, jnp.int32(1), inputs))
  if (fill == "profile" and not has_profile) or not has_tokens:
    assert (places == N).all()
  else:
    assert sorted(places) == list(range(N))
    hottest = scores[:3].sum(0).argmax() if fill == "both" else order(None)[1, 0]
    assert places[int(hottest)] == 0


def test_profiles_of_another_shape_are_refused(model):
  other = tiny.random_profiles(tiny.tiny_spec(num_moe_layers=3, num_experts=N))
  with pytest.raises(ValueError, match=r"\[3, 16\].*\[2, 16\]"):
    make(model, profiles=other)


def test_a_config_names_profiles_that_fit_its_model(tmp_path):
  config, spec = moecore.load_config("configs/demo.py"), checkpoint.read_spec(DEMO)
  config.residency.profiles = ""
  assert warm_start.read_profiles(config, spec) is None
  path = tmp_path / "profiles.npz"
  tiny.random_profiles(spec).save(path)
  config.residency.profiles = str(path)
  found = warm_start.read_profiles(config, spec, "random")
  assert found is not None and found.domains == ("math", "qa")
  with pytest.raises(ValueError, match=r"residency.profiles.*other weights.*or leave it empty"):
    warm_start.read_profiles(config, spec, "others")
  tiny.random_profiles(SPEC).save(path)
  with pytest.raises(ValueError, match=r"residency.profiles.*\[2, 16\].*\[8, 32\]"):
    moecore.Engine.from_checkpoint(None, config)
  config.residency.profiles = str(tmp_path / "none.npz")
  with pytest.raises(ValueError, match="no such profile file"):
    moecore.Engine.from_checkpoint(None, config)
  config.residency.layer_prefetch.enabled = True
  assert warm_start.read_profiles(config, spec) is None
