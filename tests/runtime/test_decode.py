"""The decode step: one compilation, counters that tell the truth, and no leaks between rows, slots
and engines."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax.models.experts import expert_bytes
from moecore_jax.runtime import state as state_lib
from moecore_jax.runtime.decode import jit_decode_step
from moecore_jax.specs import EngineSpec, ResidencySpec
from moecore_jax.testing import tiny
from tests.residency import oracles

SPEC = tiny.tiny_spec(num_experts=16, num_experts_per_tok=3)
SCANNED = {"layer_loop": "scanned"}  # compiles faster; the same layer function


def make_engine(policy="lru", slots=4, batch=1, context=64, **kwargs):
  spec = EngineSpec(
    batch_size=batch,
    context_tokens=context,
    prefill_buckets=(16,),
    kv_block_tokens=16,
    **(SCANNED | kwargs),
  )
  residency = ResidencySpec(policy, (slots,) * len(SPEC.moe_layers))
  return tiny.make_engine(tiny.random_model(SPEC, spec), residency, spec)


def decode(engine, steps):
  return [jax.device_get(engine.decode_step()) for _ in range(steps)]


def test_one_compilation_over_two_hundred_steps():
  engine = make_engine(context=256)
  engine.prefill(0, [1, 2, 3], 250)
  engine.decode_step()
  before = jit_decode_step()._cache_size()
  for _ in range(200):
    out = engine.decode_step()
  assert bool(out.was_active[0])
  assert jit_decode_step()._cache_size() == before


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("slots", [2, 5])
def test_counters_and_residents_equal_a_plain_replay_of_the_routes(slots, batch):
  engine = make_engine("lru", slots, batch)
  for row, prompt in enumerate(tiny.random_prompts(SPEC, [5, 9, 2, 7][:batch])):
    engine.prefill(row, prompt, 40)
  engine.reset_residency()
  before = engine.counters()
  outs = decode(engine, 30)
  counters = {name: value - before[name] for name, value in engine.counters().items()}
  group = SPEC.expert_groups[0]
  size = expert_bytes(group, "float32")
  assert size == sum(array[0].nbytes for array in engine.banks[0].values())
  for layer in range(len(SPEC.moe_layers)):
    cache = oracles.Cache(slots, [0] * 16, oracles.Lru(16))
    hits = misses = evictions = 0
    for out in outs:
      tokens = [(ids.tolist(), [0.0] * 16) for ids in out.topk_ids[layer]]
      hits += sum(e in cache.slots for selected, _ in tokens for e in selected)
      cache.step(tokens)
      misses += len(cache.log)
      evictions += sum(victim is not None for _, _, victim in cache.log)
    assert counters["decode_invocations"][layer] == 30 * batch * 3
    assert counters["decode_hits"][layer] == hits
    assert counters["decode_misses"][layer] == misses
    assert counters["decode_evictions"][layer] == evictions
    for name in ("prefetches", "predicted", "substitutions", "staged"):
      assert counters[f"decode_{name}"][layer] == 0
    assert counters["decode_moved_bytes"][layer] == misses * size
    table = engine.state.groups[0].tables.slot_to_expert
    resident = np.asarray(table)[layer * slots : (layer + 1) * slots]
    assert resident.tolist() == [-1 if e is None else e for e in cache.slots]


def test_pool_rows_hold_what_the_tables_say():
  engine = make_engine("rhac", 4, batch=4)
  for row, prompt in enumerate(tiny.random_prompts(SPEC, [5, 9, 2, 7])):
    engine.prefill(row, prompt, 40)
  decode(engine, 10)
  (group,) = engine.state.groups
  for layer in range(len(SPEC.moe_layers)):
    for expert, slot in enumerate(np.asarray(group.tables.expert_to_slot[layer])):
      if slot >= 0:
        for name, bank in engine.banks[0].items():
          np.testing.assert_array_equal(group.pool[name][slot], bank[layer * 16 + expert])


def test_padding_rows_load_nothing_and_change_no_signal():
  prompts = tiny.random_prompts(SPEC, [5, 9, 2, 7, 4])
  states, counters = [], []
  for batch in (5, 8):
    engine = make_engine("rhac", 6, batch)
    for row, prompt in enumerate(prompts):
      engine.prefill(row, prompt, 40)
    decode(engine, 12)
    states.append(engine.state.groups[0])
    counters.append(engine.counters())
  for name in counters[0]:
    np.testing.assert_array_equal(counters[0][name], counters[1][name], name)
  jax.tree.map(np.testing.assert_array_equal, states[0].tables, states[1].tables)
  for name in ("window", "average", "age"):
    a, b = (getattr(s.policy, name) for s in states)
    np.testing.assert_array_equal(a, b, name)


def test_finished_rows_are_inert():
  alone, mixed = make_engine(batch=2), make_engine(batch=2)
  alone.prefill(0, [1, 2, 3], 30)
  mixed.prefill(0, [1, 2, 3], 30)
  mixed.prefill(1, [4, 5], 1)  # its only token is drawn by the prefill
  mixed.reset_residency()
  alone.reset_residency()
  for a, b in zip(decode(alone, 8), decode(mixed, 8), strict=True):
    np.testing.assert_array_equal(a.token[0], b.token[0])
    np.testing.assert_array_equal(a.topk_ids[:, 0], b.topk_ids[:, 0])
    assert (b.topk_ids[:, 1] == state_lib.NO_EXPERT).all()


@pytest.mark.parametrize("policy", ["rhac", "static"])
def test_what_no_table_refers_to_never_leaks(policy):
  clean, poisoned = make_engine(policy, 6), make_engine(policy, 6)
  for engine in (clean, poisoned):
    engine.prefill(0, [1, 2, 3], 30)
  (group,) = poisoned.state.groups
  free = np.asarray(group.tables.slot_to_expert)[: group.pool["down"].shape[0] - 1] < 0
  free = np.append(free, True)  # the transient row
  pool = {k: jnp.where(free[:, None, None], jnp.nan, v) for k, v in group.pool.items()}
  groups = (dataclasses.replace(group, pool=pool),)
  poisoned.state = dataclasses.replace(poisoned.state, groups=groups)
  for a, b in zip(decode(clean, 8), decode(poisoned, 8), strict=True):
    np.testing.assert_array_equal(a.logits, b.logits)
  assert np.isfinite(b.logits).all()


def test_pool_content_is_an_argument_not_a_constant():
  engine = make_engine("static", 16)
  engine.prefill(0, [1, 2, 3], 30)
  engine.decode_step()
  before = jit_decode_step()._cache_size()
  kept = jax.tree.map(jnp.copy, engine.state)
  (group,) = kept.groups
  pool = {name: array * 2 for name, array in group.pool.items()}
  wanted = np.asarray(engine.decode_step().logits)
  engine.state = dataclasses.replace(kept, groups=(dataclasses.replace(group, pool=pool),))
  assert not np.array_equal(np.asarray(engine.decode_step().logits), wanted)
  assert jit_decode_step()._cache_size() == before


def test_a_step_in_flight_does_not_see_later_refills():
  engine = make_engine("lru", 3)
  wanted = make_engine("lru", 3)
  for e in (engine, wanted):
    e.prefill(0, [1, 2, 3], 30)
  outs = [engine.decode_step() for _ in range(6)]  # enqueued without waiting, slots reused
  (group,) = engine.state.groups
  pool = {name: jnp.full_like(array, 1e9) for name, array in group.pool.items()}
  engine.state = dataclasses.replace(engine.state, groups=(dataclasses.replace(group, pool=pool),))
  for out, other in zip(outs, decode(wanted, 6), strict=True):
    np.testing.assert_array_equal(out.logits, other.logits)


def test_engines_share_nothing():
  first = make_engine("rhac", 3)
  first.prefill(0, [1, 2, 3], 30)
  wanted = decode(first, 6)
  first = make_engine("rhac", 3)
  first.prefill(0, [1, 2, 3], 30)
  second = make_engine("rhac", 3)
  second.prefill(0, [9, 8, 7, 6], 30)
  for out in wanted:
    second.decode_step()
    np.testing.assert_array_equal(first.decode_step().logits, out.logits)
  assert first.counters()["decode_invocations"].sum() == 6 * 3 * 2


def test_one_program_serves_every_allocation_of_the_same_total():
  spec = make_engine("lru", 5).spec
  model = tiny.random_model(SPEC, spec)
  wanted = None
  sizes = []
  for slots in ((3, 7), (7, 3)):
    engine = tiny.make_engine(model, ResidencySpec("lru", slots), spec)
    engine.prefill(0, [1, 2, 3], 30)
    logits = np.stack([out.logits for out in decode(engine, 8)])
    wanted = logits if wanted is None else wanted
    np.testing.assert_array_equal(logits, wanted)
    table = np.asarray(engine.state.groups[0].tables.expert_to_slot)
    assert set(table[0][table[0] >= 0]) <= set(range(slots[0]))
    assert set(table[1][table[1] >= 0]) <= set(range(slots[0], 10))
    sizes.append(jit_decode_step()._cache_size())
  assert sizes[0] == sizes[1]
