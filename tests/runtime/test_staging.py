"""Staged prefill: the same bits, the right bytes, and what it leaves in the slots."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moecore_jax.runtime import program as program_lib
from moecore_jax.specs import EngineSpec, PrefetchSpec, ResidencySpec, StagingSpec
from moecore_jax.testing import tiny
from tests.runtime.test_exactness import assert_same

pytestmark = pytest.mark.cover

STEPS = 4
N, K = 16, 3
ENGINE = EngineSpec(
  batch_size=2, context_tokens=64, prefill_buckets=(4, 16), kv_block_tokens=16, layer_loop="scanned"
)
SELECTIVE, NO_PREFETCH = StagingSpec(enabled=False), PrefetchSpec()


@functools.cache
def spec(layers: int, dense: int = 1):
  return tiny.tiny_spec(
    num_moe_layers=layers, num_dense_layers=dense, num_experts=N, num_experts_per_tok=K
  )


@functools.cache
def model(layers: int, dense: int, engine: EngineSpec):
  return tiny.random_model(spec(layers, dense), engine)


def make(
  staging, slots, layers=3, dense=1, engine=ENGINE, prefetch=NO_PREFETCH, has_profiles=False
):
  by_layer = (slots,) * layers if isinstance(slots, int) else slots
  residency = ResidencySpec("rhac", by_layer, prefetch=prefetch, staging=staging)
  profiles = tiny.random_profiles(spec(layers, dense)) if has_profiles else None
  return tiny.make_engine(model(layers, dense, engine), residency, engine, profiles=profiles)


def run(staging, slots, lengths, **kwargs):
  engine = make(staging, slots, **kwargs)
  prompts = tiny.random_prompts(engine.model_spec, lengths)
  return tiny.decode_all(engine, prompts, STEPS), engine.counters()


@functools.cache
def wanted(lengths, layers=3, dense=1, engine=ENGINE):
  return run(SELECTIVE, N, lengths, layers=layers, dense=dense, engine=engine)[0]


# N* is 4: below, at and above it; 17 and 35 take two and three chunks.
@pytest.mark.cover
@pytest.mark.parametrize(("lengths", "fill"), [((3, 4), "both"), ((5, 17), "none")])
def test_prompts_around_the_threshold_give_the_same_bits(lengths, fill):
  check_prompts(lengths, fill)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(3, 4), (5, 17), (35, 2)])
@pytest.mark.parametrize("fill", ["none", "profile", "prompt", "both"])
def test_more_prompts(lengths, fill):
  check_prompts(lengths, fill)


def check_prompts(lengths, fill):
  got, counters = run(StagingSpec(True, fill), 12, lengths)
  assert_same(got, wanted(lengths))
  chunks = sum(-(-n // 16) for n in lengths if n >= 4)
  np.testing.assert_array_equal(counters["prefill_staged"], N * chunks)


@pytest.mark.cover
def test_staged_layers_lead_to_layers_with_copies_ahead():
  """The first MoE layer stages every prompt, the others only those of at least five tokens."""
  staging, lengths = StagingSpec(True, "profile"), (3, 4)
  engine = make(staging, (3, 14, 14), prefetch=PrefetchSpec(1), has_profiles=True)
  got = tiny.decode_all(engine, tiny.random_prompts(engine.model_spec, lengths), STEPS)
  assert_same(got, wanted(lengths))
  counters = engine.counters()
  np.testing.assert_array_equal(counters["prefill_staged"], [2 * N, 0, 0])
  assert counters["prefill_prefetches"][1:].all()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("layers", "dense", "slots", "loop"),
  [
    (1, 1, 4, "scanned"),
    (1, 0, 4, "unrolled"),
    (2, 1, (12, 16), "unrolled"),
    (3, 0, (3, 12, 4), "unrolled"),
  ],
)
def test_other_stacks(layers, dense, slots, loop):
  engine = EngineSpec(**{**vars(ENGINE), "layer_loop": loop})
  got, counters = run(StagingSpec(True), slots, (3, 9), layers=layers, dense=dense, engine=engine)
  assert_same(got, wanted((3, 9), layers, dense, engine))
  slots = (slots,) * layers if isinstance(slots, int) else slots
  prompts = [sum(n >= -(-s // K) for n in (3, 9)) * (s < N) for s in slots]
  np.testing.assert_array_equal(counters["prefill_staged"], np.multiply(N, prompts))
  one = 3 * 32 * 16 * 4
  loads = counters["prefill_staged"] + counters["prefill_misses"]
  np.testing.assert_array_equal(counters["prefill_moved_bytes"], loads * one)


def test_long_buckets_run_in_blocks_of_tokens():
  """Layers of one stack are staged one by one; the last holds all its experts, and never is."""
  check_blocks("unrolled", StagingSpec(True, "prompt", reuses_residents=True), (3, 15, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("loop", "staging", "slots"),
  [
    ("scanned", StagingSpec(True), (3, 15, 12)),
    ("scanned", SELECTIVE, (1, 3, 16)),
    ("unrolled", SELECTIVE, (1, 3, 16)),
  ],
)
def test_other_buckets_in_blocks(loop, staging, slots):
  whole = dataclasses.replace(ENGINE, prefill_buckets=(32,), layer_loop=loop)
  got = check_blocks(loop, staging, slots)
  in_one = wanted((21, 32), engine=whole)
  np.testing.assert_array_equal(got.tokens, in_one.tokens)
  for ours, theirs in zip(got.prompt_logits, in_one.prompt_logits, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def check_blocks(loop, staging, slots):
  """21 tokens in a bucket of four blocks leave one of padding alone."""
  engine = dataclasses.replace(
    ENGINE, prefill_buckets=(32,), prefill_block_tokens=8, layer_loop=loop
  )
  lengths = 21, 32
  got, counters = run(staging, slots, lengths, engine=engine)
  assert_same(got, wanted(lengths, engine=engine))
  np.testing.assert_array_equal(counters["prefill_invocations"], sum(lengths) * K)
  prompts = [len(lengths) * (staging.enabled and n < N) for n in slots]
  kept = [n * (staging.enabled and n < N) for n in slots]  # the second prompt's
  np.testing.assert_array_equal(
    counters["prefill_staged"],
    np.multiply(N, prompts) - np.multiply(kept, staging.reuses_residents),
  )
  loads = counters["prefill_staged"] + counters["prefill_misses"]
  np.testing.assert_array_equal(counters["prefill_moved_bytes"], loads * 3 * 32 * 16 * 4)
  return got


def test_residents_may_be_reused():
  got, first = run(StagingSpec(True, "prompt", reuses_residents=True), 12, (9, 11))
  assert_same(got, wanted((9, 11)))
  # The second prompt finds the 12 experts of each layer that the first has left.
  np.testing.assert_array_equal(first["prefill_staged"], N + N - 12)


def test_slots_hold_the_prompts_best_experts_and_their_weights():
  engine = make(StagingSpec(True, "prompt"), 4)
  (prompt,) = tiny.random_prompts(engine.model_spec, (12,))
  prefilled = engine.prefill(0, prompt, 5)
  (group,) = engine.state.groups
  resident = np.asarray(group.tables.expert_to_slot) >= 0
  np.testing.assert_array_equal(resident.sum(1), 4)
  for layer in range(3):
    counts = np.bincount(prefilled.topk_ids[layer].flatten(), minlength=N)
    assert counts[resident[layer]].mean() > counts[~resident[layer]].mean()
    for expert, slot in enumerate(np.asarray(group.tables.expert_to_slot[layer])):
      if slot >= 0:
        for name, bank in engine.banks[0].items():
          np.testing.assert_array_equal(group.pool[name][slot], bank[layer * N + expert])


def test_a_busy_cache_keeps_its_residents():
  engine = make(StagingSpec(True, "prompt"), 4)
  first, second = tiny.random_prompts(engine.model_spec, (12, 14))
  engine.prefill(0, first, 5)
  before = np.asarray(engine.state.groups[0].tables.expert_to_slot)
  engine.prefill(1, second, 5)
  np.testing.assert_array_equal(engine.state.groups[0].tables.expert_to_slot, before)


def test_staging_leaves_the_cache_alone_without_filling():
  engine = make(StagingSpec(True, "none"), 4)
  for row, prompt in enumerate(tiny.random_prompts(engine.model_spec, (2, 2))):
    engine.prefill(row, prompt[:1], 5)  # one token is below N* = 2
  before = jax.device_get(engine.state.groups[0])
  engine.prefill(0, tiny.random_prompts(engine.model_spec, (12,))[0], 5)
  after = jax.device_get(engine.state.groups[0])
  np.testing.assert_array_equal(before.tables.expert_to_slot, after.tables.expert_to_slot)
  jax.tree.map(np.testing.assert_array_equal, before.policy, after.policy)


def test_thresholds():
  engine = make(
    StagingSpec(True), (3, 16, 4), engine=EngineSpec(**{**vars(ENGINE), "layer_loop": "unrolled"})
  )
  thresholds = program_lib.staging_thresholds(engine.program, engine.residency)
  assert thresholds == {1: 1, 3: 2}  # segment 0 is dense, segment 2 holds all its experts
