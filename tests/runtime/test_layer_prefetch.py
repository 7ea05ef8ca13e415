"""Streamed layers: the same bits, the right bytes, and nothing in their slots."""

import functools

import numpy as np
import pytest

from moecore_jax import planner
from moecore_jax.runtime import plan as plan_lib
from moecore_jax.specs import DeviceSpec, EngineSpec, LayerPrefetchSpec, ResidencySpec
from moecore_jax.testing import tiny
from tests.runtime.test_exactness import assert_same

pytestmark = pytest.mark.cover

STEPS = 4
N = 8
LENGTHS = (3, 19)  # 19 takes two chunks
CHUNKS = 3
ONE = 3 * 32 * 16 * 4  # bytes of an expert


def engine_spec(loop):
  return EngineSpec(
    batch_size=2, context_tokens=64, prefill_buckets=(16,), kv_block_tokens=16, layer_loop=loop
  )


def make(loop, layers, layer_prefetch):
  spec = tiny.tiny_spec(num_moe_layers=layers, num_dense_layers=0, num_experts=N)
  slots = tuple(0 if layer_prefetch.streams(i) else N for i in range(layers))
  engine = engine_spec(loop)
  residency = ResidencySpec("static", slots, layer_prefetch=layer_prefetch)
  return tiny.make_engine(tiny.random_model(spec, engine), residency, engine)


def run(engine):
  return tiny.decode_all(engine, tiny.random_prompts(engine.model_spec, LENGTHS), STEPS)


@functools.cache
def wanted(loop, layers):
  return run(make(loop, layers, LayerPrefetchSpec()))


def check(loop, layers, layer_prefetch):
  engine = make(loop, layers, layer_prefetch)
  assert_same(run(engine), wanted(loop, layers))
  streamed = np.array([layer_prefetch.streams(i) for i in range(layers)])
  counters, tables = engine.counters(), engine.state.groups[0].tables
  resident = (np.asarray(tables.expert_to_slot) >= 0).sum(1)
  np.testing.assert_array_equal(resident[streamed], 0)
  for phase, passes in (("prefill", CHUNKS), ("decode", STEPS)):
    got = {name: counters[f"{phase}_{name}"] for name in ("staged", "hits", "misses", "evictions")}
    np.testing.assert_array_equal(got["staged"], N * passes * streamed)
    moved = (got["staged"] + got["misses"]) * ONE
    np.testing.assert_array_equal(counters[f"{phase}_moved_bytes"], moved)
    assert not (got["hits"] + got["misses"])[streamed].any()
    assert not got["evictions"].any()
  # A resident layer loads each of its experts once at most.
  loads = counters["prefill_misses"] + counters["decode_misses"]
  np.testing.assert_array_equal(loads, resident)
  return engine


def test_a_scan_of_streamed_layers():
  engine = check("scanned", 3, LayerPrefetchSpec(3, 2))
  report = engine.memory_report()["device"]
  assert report["layer_buffers"] == 2 * N * ONE
  assert report["expert_slots"] == (N + 1) * ONE
  plan = plan_lib.make_plan(engine.model_spec, engine.residency, engine.spec, DeviceSpec())
  parts = planner.regions(plan.demand, plan.settings)
  assert {name: parts[name] for name in ("layer_buffers", "expert_slots", "tables")} == {
    name: report[name] for name in ("layer_buffers", "expert_slots", "tables")
  }


@pytest.mark.cover
def test_single_layers():
  check("unrolled", 2, LayerPrefetchSpec(2, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("loop", ["unrolled", "scanned"])
def test_every_ring(loop, step, size):
  for streamed in range(size + 1):
    check(loop, 5, LayerPrefetchSpec(size, streamed, step))
