"""With exact execution, tokens and logits equal the all-resident model's bit for bit, whatever the
policy, the slots, the batch, the format and the loop over layers."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moecore_jax.specs import EngineSpec, PrefetchSpec, ResidencySpec
from moecore_jax.testing import tiny

pytestmark = pytest.mark.cover

STEPS = 6
LENGTHS = {1: (11,), 4: (3, 19, 1, 8)}  # ragged; 19 takes two chunks
POLICIES = ("rhac", "lru", "lfu", "fifo", "random", "static")
SLOTS = ("1", "k-1", "k", "N/4", "N")


NO_PREFETCH = PrefetchSpec()


def engine_spec(batch: int, **kwargs) -> EngineSpec:
  return EngineSpec(
    batch_size=batch, context_tokens=64, prefill_buckets=(16,), kv_block_tokens=16, **kwargs
  )


@functools.cache
def run(
  spec,
  policy: str,
  slots,
  engine: EngineSpec,
  seed: int = 0,
  prefetch: PrefetchSpec = NO_PREFETCH,
  has_profiles: bool = False,
) -> tiny.Trace:
  model = tiny.random_model(spec, engine, seed)
  by_layer = (slots,) * len(spec.moe_layers) if isinstance(slots, int) else slots
  residency = ResidencySpec(policy, by_layer, prefetch=prefetch)
  prompts = tiny.random_prompts(spec, LENGTHS[engine.batch_size], seed)
  profiles = tiny.random_profiles(spec) if has_profiles else None
  made = tiny.make_engine(model, residency, engine, profiles=profiles)
  return tiny.decode_all(made, prompts, STEPS, ("math", None, "cooking", "qa")[: len(prompts)])


def assert_same(got: tiny.Trace, wanted: tiny.Trace) -> None:
  np.testing.assert_array_equal(got.tokens, wanted.tokens)
  np.testing.assert_array_equal(got.logits, wanted.logits)
  for a, b in zip(got.prompt_logits, wanted.prompt_logits, strict=True):
    np.testing.assert_array_equal(a, b)


def num_slots(name: str, spec) -> int:
  router = spec.layers[-1].mlp.router
  k, n = router.num_experts_per_tok, router.num_experts
  return max(1, {"1": 1, "k-1": k - 1, "k": k, "N/4": n // 4, "N": n}[name])


# k - 1, k and N / 4 differ in this spec: 3 of 16 experts a token.
SPEC = tiny.tiny_spec(num_experts=16, num_experts_per_tok=3)


FIVE_LAYERS = tiny.tiny_spec(num_moe_layers=5, num_experts=16, num_experts_per_tok=3)


def every_count(spec) -> tuple[int, ...]:
  """Returns slots by which each count of SLOTS occurs, one after the other from layer to layer."""
  return tuple(num_slots(SLOTS[i % len(SLOTS)], spec) for i in range(len(spec.moe_layers)))


@pytest.mark.cover
@pytest.mark.parametrize(("policy", "batch"), list(zip(POLICIES, (4, 1) * 3, strict=True)))
def test_policies_and_slots(policy, batch):
  """With the other batch size, each policy runs on the demo model."""
  engine = engine_spec(batch, layer_loop="scanned")
  wanted = run(FIVE_LAYERS, "static", 16, engine)
  assert_same(run(FIVE_LAYERS, policy, every_count(FIVE_LAYERS), engine), wanted)


@pytest.mark.parametrize(("policy", "slots", "batch"), [("rhac", "k-1", 4), ("lru", "N/4", 1)])
def test_unrolled(policy, slots, batch):
  engine = engine_spec(batch)
  wanted = run(SPEC, "static", 16, engine)
  assert_same(run(SPEC, policy, num_slots(slots, SPEC), engine), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_full_product(policy, slots, batch):
  engine = engine_spec(batch)
  wanted = run(SPEC, "static", 16, engine)
  assert_same(run(SPEC, policy, num_slots(slots, SPEC), engine), wanted)


@pytest.mark.parametrize(
  "options",
  [
    {"layer_loop": "scanned"},
    {"expert_format": "bfloat16"},
    {"expert_format": "bfloat16", "dtype": "bfloat16"},
  ],
  ids=lambda options: "-".join(options.values()),
)
def test_formats_and_loops(options):
  engine = engine_spec(4, **options)
  with jax.numpy_dtype_promotion("standard"):  # flax promotes bfloat16 to take norms
    assert_same(run(SPEC, "rhac", 2, engine), run(SPEC, "static", 16, engine))


# Every count but the demo's 1, input, placement, loop and batch occurs, with profiles and without;
# test_exactness_product.py has the full product.
PREFETCHES = [
  ("rhac", 1, 4, PrefetchSpec(2), False),
  ("lru", 3, 4, PrefetchSpec(4, predictor_input="renorm"), True),
  ("static", 4, 1, PrefetchSpec(2, placement="slot"), True),
]
MORE_PREFETCHES = [
  ("rhac", 4, 1, PrefetchSpec(1), True),
  ("rhac", (2, 16, 3), 4, PrefetchSpec(1, min_useful_frac=0.6, useful_decay=0.5), False),
]
DEEPER = tiny.tiny_spec(num_moe_layers=3, num_experts=16, num_experts_per_tok=4)


@pytest.mark.cover
@pytest.mark.parametrize(
  ("policy", "slots", "batch", "prefetch", "has_profiles"),
  [*PREFETCHES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_PREFETCHES)],
  ids=lambda value: str(value)[:40],
)
def test_prefetch(policy, slots, batch, prefetch, has_profiles):
  engine = engine_spec(batch, layer_loop="scanned" if batch == 4 else "unrolled")
  wanted = run(DEEPER, "static", 16, engine)
  got = run(DEEPER, policy, slots, engine, prefetch=prefetch, has_profiles=has_profiles)
  assert_same(got, wanted)


def test_group_limited_routing():
  spec = tiny.tiny_spec(num_experts=16, num_experts_per_tok=4, num_groups=4, topk_groups=2)
  engine = engine_spec(4)
  assert_same(run(spec, "rhac", 3, engine), run(spec, "lru", 16, engine))


def check_made_model(data, max_layers):
  ranks = data.draw(st.integers(1, 4), "experts per token")
  spec = tiny.tiny_spec(
    num_moe_layers=data.draw(st.integers(1, max_layers), "MoE layers"),
    num_dense_layers=data.draw(st.integers(0, 1), "dense layers"),
    num_experts=data.draw(st.integers(ranks, 12), "experts"),
    num_experts_per_tok=ranks,
    shared_dim=data.draw(st.sampled_from([0, 16]), "shared width"),
    q_lora_rank=data.draw(st.sampled_from([None, 8]), "query rank"),
  )
  slots = data.draw(st.integers(1, spec.layers[-1].mlp.router.num_experts), "slots")
  policy = data.draw(st.sampled_from(POLICIES), "policy")
  engine = engine_spec(data.draw(st.sampled_from([1, 4]), "batch"))
  seed = data.draw(st.integers(0, 99), "seed")
  everything = spec.layers[-1].mlp.router.num_experts
  assert_same(run(spec, policy, slots, engine, seed), run(spec, "static", everything, engine, seed))


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_made_models(data):
  check_made_model(data, max_layers=2)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_made_models(data):
  check_made_model(data, max_layers=4)
