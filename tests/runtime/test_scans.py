"""Scans over layers of several kinds that take turns."""

import dataclasses
import functools

import numpy as np
import pytest

from moecore_jax.runtime.program import make_program
from moecore_jax.specs import (
  EngineSpec,
  IndexerSpec,
  LayerPrefetchSpec,
  LayerSpec,
  PrefetchSpec,
  ResidencySpec,
  RopeSpec,
  StagingSpec,
)
from moecore_jax.testing import tiny
from tests.runtime.test_exactness import assert_same

pytestmark = [pytest.mark.cover, pytest.mark.usefixtures("quick_compilation")]

ENGINE = EngineSpec(
  batch_size=2,
  context_tokens=64,
  prefill_buckets=(16,),
  prefill_block_tokens=8,
  kv_block_tokens=16,
  layer_loop="scanned",
)
STEPS = 5
LENGTHS = (14, 1)
SYSTEM = {"prefetch": PrefetchSpec(1), "staging": StagingSpec(True)}


@functools.cache
def spec(kinds: str):
  """Returns a model with a MoE layer of each of these kinds: they differ in their shared experts,
  those in capitals in their routed experts, too; `i` has an indexer, `j` takes the keys that it
  chose. A dense layer comes first."""
  base = tiny.tiny_spec(num_moe_layers=1, num_experts=16, num_experts_per_tok=3)
  dense, moe = base.layers

  def layer(kind: str):
    router = dataclasses.replace(moe.mlp.router, num_experts=8 if kind.isupper() else 16)
    shared_dim = 8 * (1 + "abcij".index(kind.lower()))
    mlp = dataclasses.replace(moe.mlp, router=router, shared_dim=shared_dim)
    attention = moe.attention
    if kind in "ij":
      indexer = IndexerSpec(2, 8, 6, RopeSpec(8), kind == "j")
      attention = dataclasses.replace(attention, q_lora_rank=12, indexer=indexer)
    return LayerSpec(attention, mlp)

  return dataclasses.replace(base, layers=(dense, *map(layer, kinds)))


def run(kinds: str, slots: int, engine: EngineSpec = ENGINE, **kwargs):
  residency = ResidencySpec("lru", (slots,) * len(kinds), **kwargs)
  if slots == 16:  # all
    counts = tuple(
      g.num_experts
      for i in spec(kinds).moe_layers
      for g in spec(kinds).expert_groups
      if i in g.layers
    )
    residency = dataclasses.replace(residency, slots=counts)
  made = tiny.make_engine(tiny.random_model(spec(kinds), engine), residency, engine)
  prompts = tiny.random_prompts(spec(kinds), LENGTHS)
  trace = tiny.decode_all(made, prompts, STEPS)
  return trace, made.counters(), np.asarray(made.decode_step().topk_ids)


def segments(kinds: str, count: int = 1, loop: str = "scanned"):
  engine = dataclasses.replace(ENGINE, layer_loop=loop)
  residency = ResidencySpec("lru", (4,) * len(kinds), prefetch=PrefetchSpec(count))
  program = make_program(spec(kinds), residency, engine)
  return [(s.start, s.length, s.period, s.group_period) for s in program.segments]


@pytest.mark.parametrize(
  ("kinds", "wanted"),
  [
    ("aaaa", [(1, 1, 1, 1), (2, 3, 1, 1)]),
    ("ababab", [(1, 1, 1, 1), (2, 2, 2, 2), (3, 2, 2, 2), (6, 1, 1, 1)]),
    ("caBaB", [(1, 1, 1, 1), (2, 2, 2, 1), (3, 2, 2, 1)]),
    ("caabaab", [(1, 1, 1, 1), (2, 2, 3, 3), (3, 2, 3, 3), (4, 2, 3, 3)]),
    ("cab", [(1, 1, 1, 1), (2, 1, 1, 1), (3, 1, 1, 1)]),
  ],
)
def test_layers_that_take_turns_are_scanned_together(kinds, wanted):
  """The first MoE layer, of which nothing is predicted, stands alone where others are predicted."""
  assert segments(kinds) == [(0, 1, 1, 1), *wanted]


def test_without_prefetches_the_first_layer_is_scanned_too():
  assert segments("ababab", 0) == [(0, 1, 1, 1), (1, 3, 2, 2), (2, 3, 2, 2)]
  assert len(segments("ababab", loop="unrolled")) == 7


@pytest.mark.parametrize(
  "kinds",
  ["caBaB", "ijiji", *(pytest.param(k, marks=pytest.mark.slow) for k in ("cababab", "cabcabc"))],
)
def test_the_same_bits_as_all_resident_and_the_same_counts_as_unrolled(kinds):
  """Prompts of two blocks that are staged and a short one that is not; rings of two layers, of two
  that differ in shape, and of three; keys that are chosen in one turn and read in the next."""
  got, counters, topk_ids = run(kinds, 6, **SYSTEM)
  assert_same(got, run(kinds, 16)[0])
  assert counters["prefill_staged"].any() and counters["decode_prefetches"].any()
  unrolled = dataclasses.replace(ENGINE, layer_loop="unrolled")
  other, other_counters, other_topk_ids = run(kinds, 6, unrolled, **SYSTEM)
  np.testing.assert_array_equal(topk_ids, other_topk_ids)
  np.testing.assert_array_equal(got.tokens, other.tokens)
  np.testing.assert_allclose(got.logits, other.logits, atol=1e-5)
  for name, counts in counters.items():
    np.testing.assert_array_equal(counts, other_counters[name], name)


def test_every_other_layer_is_streamed():
  got = run("cabab", 6, layer_prefetch=LayerPrefetchSpec(2, 1))[0]
  assert_same(got, run("cabab", 16)[0])
