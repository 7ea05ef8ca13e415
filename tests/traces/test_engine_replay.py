"""Counters of an engine equal those of the replay of what it did."""

import dataclasses

import numpy as np
import pytest

from moecore_jax.specs import EngineSpec, ResidencySpec, RhacSpec
from moecore_jax.testing import routing, tiny
from moecore_jax.traces import TraceRecorder, replay_counters
from moecore_jax.traces.engine_replay import NAMES

pytestmark = [pytest.mark.cover, pytest.mark.usefixtures("quick_compilation")]

SPEC = tiny.tiny_spec(num_dense_layers=0)
ENGINE = EngineSpec(
  batch_size=2, context_tokens=64, prefill_buckets=(8,), kv_block_tokens=16, layer_loop="scanned"
)


@pytest.fixture(scope="module")
def model():
  return tiny.random_model(SPEC, ENGINE)


@pytest.mark.parametrize(
  ("policy", "slots", "weights"),
  [
    ("rhac", (1, 5), {"score_weight": 1.0}),  # fewer slots than the fan-out, and more
    pytest.param("random", (1, 4), {}, marks=pytest.mark.slow),
    pytest.param("rhac", (1, 5), {}, marks=pytest.mark.slow),
    pytest.param("static", (2, 5), {}, marks=pytest.mark.slow),
    pytest.param("lru", (1, 4), {}, marks=pytest.mark.slow),
    pytest.param("lfu", (3, 4), {}, marks=pytest.mark.slow),
    pytest.param("fifo", (3, 8), {}, marks=pytest.mark.slow),
  ],
)
def test_counters_equal_those_of_the_engine(model, policy, slots, weights):
  residency = ResidencySpec(policy, slots, RhacSpec(**weights))
  recorder = TraceRecorder(keeps_scores=bool(weights))
  engine = tiny.make_engine(model, residency, ENGINE, recorder=recorder)
  engine.warm_up()
  prompts = tiny.random_prompts(SPEC, [5, 21, 1, 9])

  def decode(steps):
    for _ in range(steps):
      engine.decode_step()

  engine.prefill(0, prompts[0], 7)
  decode(3)
  engine.prefill(1, prompts[1], 31)
  decode(5)  # row 0 ends on the way
  engine.prefill(0, prompts[2], 41)
  decode(4)
  engine.reset_residency()
  decode(6)
  engine.prefill(0, prompts[3], 41)
  engine.reset_residency()
  decode(9)
  trace = recorder.trace(engine)
  expected, found = engine.counters(), replay_counters(trace)
  assert set(found) >= {f"{phase}_{name}" for phase in ("decode", "prefill") for name in NAMES}
  for name, figures in found.items():
    np.testing.assert_array_equal(figures, expected[name], name)
  had_choices = found["decode_evictions"] > 0
  assert (had_choices == ((policy != "static") & (np.array(slots) < trace.num_experts))).all()
  assert (found["decode_hits"] > 0).all()


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"residency": None}, "no residency settings"),
    ({"residency": ResidencySpec("lru", (3, 3, 3))}, "slots has 3 numbers"),
    ({"residency": ResidencySpec("lru", (17, 3))}, "slots"),
    ({"staged": np.ones((5, 2), bool)}, "staging"),
    ({"accepted": np.zeros(5, bool)}, "drafts"),
    ({"residency": ResidencySpec("lru", (3, 3), substitution_threshold=0.1)}, "substitution"),
    ({"residency": ResidencySpec("rhac", (3, 3), RhacSpec(score_weight=1.0))}, "no scores"),
  ],
)
def test_refuses_what_it_cannot_reproduce(change, words):
  trace = dataclasses.replace(routing.random_trace(5), residency=ResidencySpec("lru", (3, 3)))
  residency = change.pop("residency", trace.residency)
  trace = dataclasses.replace(trace, **change, residency=None)
  with pytest.raises(ValueError, match=words):
    replay_counters(trace, residency)


def test_scores_are_read():
  """A layer of one slot more than the fan-out keeps whichever expert its scores favour."""
  trace = routing.random_trace(40, num_layers=1, num_experts=6)
  settings = ResidencySpec(
    "rhac", (3,), RhacSpec(average_weight=0, score_weight=1.0, age_weight=0.0)
  )
  hits = []
  for favoured in (0, 5):
    scores = np.zeros((40, 1, 6), np.float32)
    scores[:, :, favoured] = 1
    chosen = dataclasses.replace(trace, scores=scores)
    hits.append(int(replay_counters(chosen, settings)["decode_hits"][0]))
  kept = [int((trace.experts == favoured).sum()) for favoured in (0, 5)]
  assert (hits[0] > hits[1]) == (kept[0] > kept[1])
  assert hits[0] != hits[1]
