"""The demo model answers its own workload with the same bits under every policy and slot count."""

import functools
import itertools

import pytest
import tokenizers

import moecore_jax as moecore
from moecore_jax.config import EngineConfig, ResidencyConfig
from moecore_jax.evaluation import tasks
from moecore_jax.runtime.engine import DEMO
from moecore_jax.specs import PolicyName
from moecore_jax.testing import tiny
from tests.runtime.test_exactness import POLICIES, assert_same

NUM_EXPERTS, RANKS = 32, 4
SLOTS = (1, RANKS - 1, RANKS, NUM_EXPERTS // 4, NUM_EXPERTS)
STEPS = 12


@functools.cache
def prompts(count: int) -> tuple[tuple[int, ...], ...]:
  """The first item of each task: lengths differ."""
  tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
  items = [tasks.load_items(task, 1)[0] for task in ("math", "qa", "code", "agent")]
  return tuple(tuple(tokenizer.encode(item.prompt).ids) for item in items[:count])


@functools.cache
def run(
  policy: PolicyName, slots: int | tuple[int, ...], batch: int, layer_loop: str
) -> tiny.Trace:
  by_layer = (slots,) * 8 if isinstance(slots, int) else slots
  config = moecore.RunConfig(
    residency=ResidencyConfig(policy=policy, slots=by_layer),
    engine=EngineConfig(
      batch_size=batch, context_tokens=256, prefill_buckets=(64,), layer_loop=layer_loop
    ),
  )
  return tiny.decode_all(moecore.Engine.from_checkpoint(None, config), prompts(batch), STEPS)


@pytest.mark.cover
@pytest.mark.parametrize(("policy", "batch"), list(zip(POLICIES, (1, 4) * 3, strict=True)))
def test_policies_and_slots(policy, batch):
  """Every slot count occurs, one after the other from layer to layer."""
  slots = tuple(SLOTS[i % len(SLOTS)] for i in range(8))
  assert_same(run(policy, slots, batch, "scanned"), run("static", NUM_EXPERTS, batch, "scanned"))


@pytest.mark.slow
def test_unrolled():
  assert_same(run("rhac", 8, 4, "unrolled"), run("static", NUM_EXPERTS, 4, "unrolled"))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("policy", "slots", "batch"), list(itertools.product(POLICIES, SLOTS, (1, 4)))
)
def test_full_product(policy, slots, batch):
  # The scanned form runs the same layer function and compiles in a third of the time.
  assert_same(run(policy, slots, batch, "scanned"), run("static", NUM_EXPERTS, batch, "scanned"))
