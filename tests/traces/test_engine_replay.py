"""Counters of an engine equal those of the replay of what it did."""

import dataclasses

import jax
import numpy as np
import pytest

from moecore_jax.specs import EngineSpec, ResidencySpec, RhacSpec
from moecore_jax.testing import routing, tiny
from moecore_jax.traces import EventKind, Events, Phase, Trace, replay_counters
from moecore_jax.traces.engine_replay import NAMES

SPEC = tiny.tiny_spec(num_dense_layers=0)
ENGINE = EngineSpec(
  batch_size=2, context_tokens=64, prefill_buckets=(8,), kv_block_tokens=16, layer_loop="scanned"
)


class Recorder:
  """Runs an engine and keeps what every call chose."""

  def __init__(self, engine):
    self.engine = engine
    engine.warm_up()
    self.calls = len(ENGINE.prefill_buckets) + 1
    self.tokens: list = []  # (sequence, phase, step, row, ids [L, A])
    self.resets: list[int] = []
    self.sequence = [-1] * ENGINE.batch_size
    self.count = 0

  def prefill(self, row, prompt, steps):
    topk_ids = self.engine.prefill(row, prompt, steps + 1).topk_ids
    self.sequence[row], self.count = self.count, self.count + 1
    for i in range(len(prompt)):
      step = self.calls + i // ENGINE.prefill_buckets[-1]
      self.tokens.append((self.sequence[row], Phase.PREFILL, step, row, topk_ids[:, i]))
    self.calls = step + 1

  def decode(self, steps):
    for _ in range(steps):
      out = jax.device_get(self.engine.decode_step())
      for row in np.flatnonzero(out.was_active):
        ids = out.topk_ids[:, row]
        self.tokens.append((self.sequence[row], Phase.DECODE, self.calls, row, ids))
      self.calls += 1

  def reset(self):
    self.engine.reset_residency()
    self.resets.append(self.calls)

  def trace(self, residency):
    tokens = sorted(self.tokens, key=lambda token: token[0])  # stable
    sequence, phase, step, row, experts = zip(*tokens, strict=True)
    counts = np.bincount(sequence)
    return Trace(
      experts=np.stack(experts),
      sequence_offsets=np.append(0, np.cumsum(counts)).astype(np.int64),
      phase=np.array(phase, np.uint8),
      step=np.array(step, np.int32),
      row=np.array(row, np.uint16),
      num_experts=np.array([8, 8], np.int32),
      top_k=np.array([2, 2], np.int32),
      expert_bytes=self.engine._expert_bytes(),
      events=Events(
        np.array(self.resets, np.int32),
        np.full(len(self.resets), EventKind.RESET, np.uint8),
        np.full(len(self.resets), 65535, np.uint16),
      ),
      residency=residency,
      seed=0,
    )


@pytest.fixture(scope="module")
def model():
  return tiny.random_model(SPEC, ENGINE)


@pytest.mark.parametrize(
  ("policy", "slots"),
  [
    ("rhac", (1, 5)),  # fewer than the fan-out, and more
    pytest.param("random", (1, 4), marks=pytest.mark.slow),
    pytest.param("static", (2, 5), marks=pytest.mark.slow),
    pytest.param("lru", (1, 4), marks=pytest.mark.slow),
    pytest.param("lfu", (3, 4), marks=pytest.mark.slow),
    pytest.param("fifo", (3, 8), marks=pytest.mark.slow),
  ],
)
def test_counters_equal_those_of_the_engine(model, policy, slots):
  residency = ResidencySpec(policy, slots)
  engine = tiny.make_engine(model, residency, ENGINE)
  recorder = Recorder(engine)
  prompts = tiny.random_prompts(SPEC, [5, 21, 1, 9])
  recorder.prefill(0, prompts[0], 6)
  recorder.decode(3)
  recorder.prefill(1, prompts[1], 30)
  recorder.decode(5)  # row 0 ends on the way
  recorder.prefill(0, prompts[2], 40)
  recorder.decode(4)
  recorder.reset()
  recorder.decode(6)
  recorder.prefill(0, prompts[3], 40)
  recorder.reset()
  recorder.decode(9)
  trace = recorder.trace(residency)
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
