"""The memory plan in numbers: published arithmetic, answers checked by trying, refusals."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore_jax import planner

GB, GIB = 10**9, 1 << 30
MB = 10**6


def uniform(layers, slots, context, **kwargs):
  return planner.Settings((slots,) * layers, context, use_staging=True, **kwargs)


# DeepSeek-V4-Flash and GLM-5, W4A8: 43 and 75 MoE layers of 256 experts; figures of SPEC 2.
FLASH = planner.Demand(
  (planner.ExpertPool(tuple(range(43)), 256, 12_650_000),), 8_500 * MB, 2_500 * MB // 368_000
)
GLM = planner.Demand((planner.ExpertPool(tuple(range(75)), 256, 18_960_000),), 20_500 * MB, 110_000)


def in_gb(parts):
  return {name: round(size / GB, 1) for name, size in parts.items() if size > MB}


def test_the_published_plan_of_84_slots():
  parts = planner.regions(FLASH, uniform(43, 84, 368_000))
  parts["expert_slots"] -= 12_650_000  # the transient row
  assert in_gb(parts) == {
    "dense_weights": 8.5,
    "kv_cache": 2.5,
    "expert_slots": 45.7,
    "layer_buffers": 6.5,
  }
  assert round(sum(parts.values()) / GB, 1) == 63.2
  assert round(FLASH.bank_bytes / GB) == 139


@pytest.mark.parametrize(
  ("cap", "left_gb", "thousand_tokens"), [(84 * GB, 9.8, 89), (84 * GIB, 15.7, 142)]
)
def test_the_published_context_of_28_slots(cap, left_gb, thousand_tokens):
  budget = int(0.95 * cap)
  none = planner.regions(GLM, uniform(75, 28, 0))
  assert round(none["expert_slots"] / GB, 1) == 39.8
  assert round(none["layer_buffers"] / GB, 1) == 9.7
  assert (budget - sum(none.values())) / GB == pytest.approx(left_gb, abs=0.07)
  longest = planner.longest_context(GLM, uniform(75, 28, 0), budget)
  assert longest / 1000 == pytest.approx(thousand_tokens, abs=0.7)
  words = planner.refusal(GLM, uniform(75, 28, 368_000), budget)
  assert "kv_cache 40.48 GB" in words
  assert f"engine.context_tokens to {longest}" in words


TWO_POOLS = planner.Demand(
  pools=(planner.ExpertPool((0, 2), 8, 1000), planner.ExpertPool((1,), 16, 5000)),
  dense_bytes=70_000,
  kv_token_bytes=30,
  table_bytes=500,
  table_row_bytes=13,
  temporary_bytes=9000,
  activation_token_bytes=40,
  activation_row_bytes=7,
  head_token_bytes=300,
  max_context_tokens=4096,
  context_step=128,
)
SETTINGS = planner.Settings((3, 5, 4), 256, 2, 64, in_flight_rows=2, use_staging=True)


def test_every_region_by_hand():
  assert planner.regions(TWO_POOLS, SETTINGS) == {
    "dense_weights": 70_000,
    "kv_cache": 2 * 256 * 30,
    "expert_slots": (3 + 4 + 1) * 1000 + (5 + 1) * 5000,
    "in_flight_rows": 2 * (1000 + 5000),
    "layer_buffers": 2 * 16 * 5000,  # of the largest layer, which is the second
    "tables": 500 + 2 * 13 + 4 * (3 + 4 + 4 + 5 + 5),
    "temporaries": 9000,
    "activations": 64 * 40 + 300 + 2 * 7,
  }
  wide = dataclasses.replace(SETTINGS, batch_size=64, chunk_tokens=8)
  assert planner.regions(TWO_POOLS, wide)["activations"] == 64 * 340 + 64 * 7
  assert TWO_POOLS.bank_bytes == 2 * 8 * 1000 + 16 * 5000


def test_layers_with_all_experts_in_slots_need_no_staging():
  one = planner.Demand((planner.ExpertPool((0,), 8, 1000),), 0, 0)
  needed = [planner.needed_bytes(one, planner.Settings((k,), 1, use_staging=True)) for k in (7, 8)]
  assert needed == [8000 + 16_000 + 4 * 14, 9000 + 4 * 16]
  asked = planner.Settings((1,), 1, use_staging=True)
  assert planner.most_uniform_slots(one, asked, needed[1]) == 8
  assert planner.most_uniform_slots(one, asked, needed[1] - 1) == 0


def test_what_each_setting_frees_by_hand():
  assert planner.frees(TWO_POOLS, SETTINGS) == {
    "residency.slots_per_layer: one slot less in every layer": 2000 + 5000 + 4 * (2 + 1 + 1 + 1),
    "engine.context_tokens: 128 less": 2 * 128 * 30,
    "engine.batch_size: one less": 256 * 30 + 13 + 7,
    "engine.prefill_buckets: the largest halved": 32 * 40,
    "residency.prefetch.max_experts: 0": 12_000,
    "residency.staging.enabled: False": 160_000,
  }
  least = planner.Settings((1, 1, 1), 128)
  assert planner.frees(TWO_POOLS, least) == {}


@settings(max_examples=60, deadline=None)
@given(budget=st.integers(0, 800_000), rows=st.integers(1, 4), context=st.integers(1, 32))
def test_answers_are_the_largest_that_fit(budget, rows, context):
  """Each answer fits, and one more does not: found by trying every value."""
  asked = dataclasses.replace(SETTINGS, batch_size=rows, context_tokens=128 * context)

  def best(values, changed):
    fitting = [n for n in values if planner.needed_bytes(TWO_POOLS, changed(n)) <= budget]
    return max(fitting, default=0)

  assert planner.most_uniform_slots(TWO_POOLS, asked, budget) == best(
    range(1, 9), lambda n: dataclasses.replace(asked, slots=(n, n, n))
  )
  assert planner.longest_context(TWO_POOLS, asked, budget) == best(
    range(128, 4097, 128), lambda n: dataclasses.replace(asked, context_tokens=n)
  )
  assert planner.largest_batch(TWO_POOLS, asked, budget) == best(
    range(1, 1025), lambda n: dataclasses.replace(asked, batch_size=n)
  )
  refused = planner.refusal(TWO_POOLS, asked, budget) != ""
  assert refused == (planner.needed_bytes(TWO_POOLS, asked) > budget)


def test_the_context_is_not_shorter_than_a_piece_of_a_prompt():
  assert planner.with_context(SETTINGS, 32) == dataclasses.replace(
    SETTINGS, context_tokens=32, chunk_tokens=32
  )


@pytest.mark.parametrize(
  ("budget", "words"),
  [
    (306_000, ("residency.slots_per_layer to 4, or engine.context_tokens to 128, or", "size to 1")),
    (
      298_000,
      (
        "kv_cache 0.02 MB",
        "there are 0.30 MB; set residency.slots_per_layer to 3",
      ),
    ),
    (282_000, ("no one setting", "2 slots a layer at 128 tokens", "384 tokens at one slot")),
    (200_000, ("even one slot a layer", "0.27 MB", "device.memory_bytes")),
  ],
)
def test_refusals_say_what_is_needed_and_what_would_fit(budget, words):
  message = planner.refusal(TWO_POOLS, SETTINGS, budget)
  assert "\n" not in message
  for word in ("the device needs 0.3", "dense_weights 0.07 MB", *words):
    assert word in message


def test_published_groups_of_streamed_layers():
  """43 layers, of which 19 stay beside four buffers; 75, none of which stay."""
  layer = 256 * 12_650_000
  assert planner.streamed_groups([layer] * 43, 23 * layer, 4) == (7, 4)
  assert planner.streamed_groups([layer] * 75, 4 * layer, 4) == (1, 1)
  assert planner.streamed_groups([layer] * 43, 43 * layer, 4) == (1, 0)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=7), st.integers(1, 3), st.integers(0, 40))
def test_streamed_groups_keep_the_most_that_fits(layers, ring, budget):
  size, streamed = planner.streamed_groups(layers, budget, ring)

  def cost(size, streamed):
    flows = [i % size >= size - streamed for i in range(len(layers))]
    kept = sum(b for b, f in zip(layers, flows, strict=True) if not f)
    flowing = [b for b, f in zip(layers, flows, strict=True) if f]
    return kept, kept + min(ring, len(flowing)) * max(flowing, default=0)

  choices = [(g, n) for g in range(1, len(layers) + 1) for n in range(g + 1)]
  fitting = [cost(*choice)[0] for choice in choices if cost(*choice)[1] <= budget]
  if fitting:
    assert cost(size, streamed)[0] == max(fitting)
    assert cost(size, streamed)[1] <= budget
  else:
    assert (size, streamed) == (1, 1)


def test_a_ring_is_counted_and_not_told_to_change_its_slots():
  ring = dataclasses.replace(SETTINGS, slots=(0, 16, 8), use_staging=False, ring_layers=3)
  assert planner.regions(TWO_POOLS, ring)["layer_buffers"] == 3 * 8 * 1000
  frees = planner.frees(TWO_POOLS, ring)
  assert frees["residency.layer_prefetch.prefetch_step: one less"] == 8000
  assert not [name for name in frees if "slots" in name or "staging" in name]
  for budget in (250_000, 200_000):
    message = planner.refusal(TWO_POOLS, ring, budget)
    assert "slots" not in message.partition(";")[2]
  assert "stream more layers" in message


@pytest.mark.parametrize(
  ("window_ms", "bound"),
  [(0.0, 0), (0.206, 0), (0.208, 1), (0.5, 2), (2.0, 9)],
)
def test_whole_transfers_in_a_window(window_ms, bound):
  """12.65 MB at 61.2 GB/s take 0.2067 ms; an overhead of a tenth of a millisecond is paid each."""
  window = window_ms / 1e3
  assert planner.prefetch_bound([window], [12_650_000], 0.0, 61.2e9) == (bound,)
  slower = planner.prefetch_bound([window], [12_650_000], 1e-4, 61.2e9)
  assert slower == (int(window_ms // 0.3067),)


def test_bytes_as_text():
  assert planner.show(79_800_000_000) == "79.80 GB"
  assert planner.show(7_200_000) == "7.20 MB"
