"""What an engine's calls chose lands in the trace, and costs nothing where nobody records."""

import jax
import numpy as np
import pytest

from moecore_jax.runtime.decode import decode_step
from moecore_jax.runtime.program import make_program
from moecore_jax.runtime.requests import Request
from moecore_jax.specs import EngineSpec, PrefetchSpec, ResidencySpec, StagingSpec
from moecore_jax.testing import tiny
from moecore_jax.traces import EventKind, Phase, TraceRecorder, load, save

pytestmark = [pytest.mark.cover, pytest.mark.usefixtures("quick_compilation")]

SPEC = tiny.tiny_spec(num_dense_layers=0, num_experts=8, num_experts_per_tok=2)
ENGINE = EngineSpec(
  batch_size=2, context_tokens=64, prefill_buckets=(8,), kv_block_tokens=16, layer_loop="scanned"
)
RESIDENCY = ResidencySpec("rhac", (5, 5), prefetch=PrefetchSpec(1), staging=StagingSpec(True))
LENGTHS = {"a": (4, 12), "b": (11, 5), "c": (3, 9)}  # of prompt and completion
DOMAINS = {"a": "math", "b": "qa", "c": None}


@pytest.fixture(scope="module")
def run():
  """Three requests in two rows, all of them staged."""
  scores = []
  recorder = TraceRecorder(on_scores=lambda domain, part: scores.append((domain, part)))
  model = tiny.random_model(SPEC, ENGINE)
  engine = tiny.make_engine(model, RESIDENCY, ENGINE, recorder=recorder, fingerprint="abc")
  engine.decode_step()  # a call without tokens
  prompts = tiny.random_prompts(SPEC, [length for length, _ in LENGTHS.values()])
  requests = [
    Request(name, prompt, LENGTHS[name][1], DOMAINS[name])
    for name, prompt in zip(LENGTHS, prompts, strict=True)
  ]
  completions = {c.id: c for c in engine.generate(requests)}
  return engine, recorder.trace(engine), completions, scores


def test_sequences_and_steps(run):
  engine, trace, completions, _ = run
  assert [len(completions[name].token_ids) for name in LENGTHS] == [12, 5, 9]
  assert trace.domain.tolist() == ["math", "qa", ""]
  steps = np.split(trace.step, trace.sequence_offsets[1:-1])
  rows = np.split(trace.row, trace.sequence_offsets[1:-1])
  # Each sequence: its chunks of up to 8 tokens, then decode steps; its last token is not fed.
  assert steps[0].tolist() == [1] * 4 + [4, 5, 6, 7] + list(range(9, 16))
  assert steps[1].tolist() == [2] * 8 + [3] * 3 + [4, 5, 6, 7]
  assert steps[2].tolist() == [8] * 3 + list(range(9, 17))
  assert [np.unique(row).tolist() for row in rows] == [[0], [1], [1]]
  # The first request is alone: its staged layers fill the slots.
  kinds = [EventKind.ADMISSION, EventKind.WARM_START, EventKind.ADMISSION, EventKind.ADMISSION]
  assert trace.events.kind.tolist() == kinds
  np.testing.assert_array_equal(trace.events.step, [1, 1, 2, 8])
  np.testing.assert_array_equal(trace.events.row, [0, 0, 1, 1])
  assert (trace.meta["fingerprint"], trace.seed, trace.residency) == ("abc", 0, RESIDENCY)
  np.testing.assert_array_equal(trace.expert_bytes, engine.expert_bytes())


def test_choices_are_those_that_the_engine_counted(run):
  engine, trace, _, _ = run
  counters = engine.counters()
  for phase in Phase:
    is_phase, name = trace.phase == phase, phase.name.lower()
    np.testing.assert_array_equal(counters[f"{name}_invocations"], 2 * is_phase.sum())
    held = (trace.predicted[:, :, :, None] == trace.experts[:, :, None]).any(2)
    np.testing.assert_array_equal(counters[f"{name}_predicted"], held[is_phase].sum((0, 2)))
  assert counters["decode_predicted"][1:].all()
  best = np.argsort(-trace.scores, axis=2, kind="stable")[:, :, :2]
  np.testing.assert_array_equal(best, trace.experts)
  is_prompt = (trace.phase == Phase.PREFILL)[:, None]
  np.testing.assert_array_equal(trace.staged, np.repeat(is_prompt, 2, axis=1))


def test_scores_come_by_domain(run):
  _, trace, _, scores = run
  for sequence, domain in enumerate(trace.domain):
    came = np.concatenate([part for name, part in scores if name == domain])
    begin, end = trace.sequence_offsets[sequence : sequence + 2]
    np.testing.assert_array_equal(came, trace.scores[begin:end])


def test_file(run, tmp_path):
  _, trace, _, _ = run
  save(trace, tmp_path / "trace.npz")
  again = load(tmp_path / "trace.npz")
  for name in ("experts", "scores", "predicted", "staged", "step", "domain"):
    np.testing.assert_array_equal(getattr(again, name), getattr(trace, name))
  assert again.residency == RESIDENCY


def test_nothing_more_leaves_a_program_that_does_not_record():
  """Its outputs are the state and six arrays of the step, none as wide as the experts."""
  model = tiny.random_model(SPEC, ENGINE)
  engine = tiny.make_engine(model, RESIDENCY, ENGINE)
  assert make_program(SPEC, RESIDENCY, ENGINE) == engine.program
  shapes = {}
  for records in (False, True):
    program = make_program(SPEC, RESIDENCY, ENGINE, records)
    jaxpr, out = jax.make_jaxpr(decode_step, static_argnums=0, return_shape=True)(
      program, engine.params, engine.banks, engine.state
    )
    added = len(jaxpr.out_avals) - len(jax.tree.leaves(engine.state))
    assert added == (8 if records else 6)
    shapes[records] = out[1]
  assert shapes[False].scores is None and shapes[False].predicted is None
  assert shapes[True].scores.shape == (2, 2, 8)
  assert shapes[True].predicted.shape == (2, 2, 2)


def test_an_engine_that_saw_nothing_has_no_trace():
  recorder = TraceRecorder()
  engine = tiny.make_engine(tiny.random_model(SPEC, ENGINE), RESIDENCY, ENGINE, recorder=recorder)
  with pytest.raises(ValueError, match="nothing was recorded"):
    recorder.trace(engine)
