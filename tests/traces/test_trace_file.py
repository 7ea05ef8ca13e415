"""Trace files: what is written comes back, and nothing else is read."""

import dataclasses
import re

import numpy as np
import pytest

from moecore_jax.specs import PrefetchSpec, ResidencySpec, RhacSpec
from moecore_jax.testing import routing
from moecore_jax.traces import EventKind, Events, Trace, load, save

T, L, A, N = 7, 2, 3, 10


def full_trace():
  """A trace with every optional part; its layers differ."""
  rng = np.random.default_rng(0)
  base = routing.random_trace(T, L, 8, A, num_sequences=2)
  experts = base.experts.copy()
  experts[:, 1, 2] = 65535
  return dataclasses.replace(
    base,
    experts=experts,
    num_experts=np.array([N, 8], np.int32),
    top_k=np.array([3, 2], np.int32),
    accepted=rng.random(T) < 0.5,
    staged=rng.random((T, L)) < 0.5,
    scores=rng.normal(size=(T, L, N)).astype(np.float32),
    weights=rng.random((T, L, A)).astype(np.float16),
    predicted=experts[::-1].copy(),
    domain=np.array(["math", ""]),
    events=Events(
      np.array([0, 4], np.int32),
      np.array([EventKind.ADMISSION, EventKind.RESET], np.uint8),
      np.array([0, 65535], np.uint16),
    ),
    residency=ResidencySpec("rhac", (3, 4), RhacSpec(window=4), PrefetchSpec(2, (1, 2))),
    seed=5,
    meta={"model": "toy", "nested": [1, {"a": None}]},
  )


def assert_equal(one, other):
  for field in dataclasses.fields(one):
    a, b = getattr(one, field.name), getattr(other, field.name)
    if dataclasses.is_dataclass(a) and field.name == "events":
      assert_equal(a, b)
    elif isinstance(a, np.ndarray):
      assert a.dtype == b.dtype, field.name
      np.testing.assert_array_equal(a, b)
    else:
      assert a == b, field.name


@pytest.mark.parametrize("trace", [full_trace(), routing.random_trace(3), routing.random_trace(0)])
def test_round_trip(trace, tmp_path):
  save(trace, tmp_path / "a.npz")
  assert_equal(trace, load(tmp_path / "a.npz"))
  assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def test_a_failed_save_leaves_the_old_file(tmp_path):
  path = tmp_path / "a.npz"
  save(routing.random_trace(3), path)
  broken = dataclasses.replace(routing.random_trace(4), meta={"key": object()})
  with pytest.raises(TypeError):
    save(broken, path)
  assert load(path).num_tokens == 3
  assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def with_value(name, index, value):
  array = getattr(full_trace(), name).copy()
  array[index] = value
  return {name: array}


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"experts": np.zeros((T, L), np.uint16)}, "experts has shape [7, 2]"),
    ({"experts": None}, "experts is NoneType"),
    ({"experts": np.zeros((T, L, A), np.int32)}, "experts is int32[7, 2, 3], expected uint16"),
    (with_value("experts", (4, 1, 0), 8), "experts[4, 1, 0] is 8, expected 0..7 or 65535"),
    (with_value("experts", (4, 1, 2), 0), "experts[4, 1, 2] names an expert, top_k of the layer"),
    (with_value("experts", (2, 0), 1), "experts[2, 0] names an expert twice"),
    (with_value("predicted", (0, 0, 0), 10), "predicted[0, 0, 0] is 10"),
    (with_value("num_experts", 0, 0) | {"scores": None}, "num_experts has [0, 8]"),
    (with_value("num_experts", 0, 65535) | {"scores": None}, "num_experts has [65535, 8]"),
    (with_value("top_k", 0, 4), "top_k has [4, 2], expected 1..3"),
    (with_value("sequence_offsets", 0, 1), "sequence_offsets"),
    (with_value("sequence_offsets", 1, 8), "sequence_offsets"),
    (with_value("sequence_offsets", 2, 6), "sequence_offsets do not rise from 0 to 7"),
    (with_value("phase", 3, 2), "phase has 2"),
    (with_value("step", 1, -1), "step is negative, or goes back"),
    (with_value("step", 2, 0), "step is negative, or goes back"),
    (with_value("step", 1, 0) | with_value("phase", 0, 0), "phase differs"),
    (with_value("expert_bytes", 0, -1), "expert_bytes has -1"),
    ({"row": np.zeros(T - 1, np.uint16)}, "row is uint16[6], expected uint16[7]"),
    ({"accepted": np.zeros(T, np.uint8)}, "accepted is uint8[7], expected bool[7]"),
    ({"scores": np.zeros((T, L, 8), np.float32)}, "scores is float32[7, 2, 8]"),
    ({"weights": np.zeros((T, L, A))}, "weights is float64[7, 2, 3], expected float16 or float32"),
    ({"domain": np.array(["a"])}, "domain is"),
    ({"domain": np.array([1, 2])}, "domain is int64"),
    ({"residency": ResidencySpec("lru", (1,))}, "residency has 1 slots, expected 2"),
    ({"events": Events(*[np.array([2, 1], np.int32)] * 3)}, "event_kind is int32"),
  ],
)
def test_wrong_content_is_refused(change, words):
  with pytest.raises(ValueError, match=re.escape(words)):
    dataclasses.replace(full_trace(), **change)


def archive(path, **changes):
  """Writes the arrays of a trace with some changed, or left out where None."""
  save(full_trace(), path)
  with np.load(path) as file:
    arrays = {name: file[name] for name in file.files} | changes
  np.savez(path, **{name: value for name, value in arrays.items() if value is not None})


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"version": np.int32(2)}, "version is 2, expected 1"),
    ({"version": None}, "has no version"),
    ({"phase": None, "row": None}, "has no phase, row"),
    ({"event_row": None}, "the event table lacks"),
    ({"event_kind": np.array([0, 9], np.uint8)}, "event_kind is unknown"),
    ({"meta": np.array("{")}, "Expecting"),
    ({"residency": np.array('{"policy": "lru", "slot": 3}')}, "unknown field 'slot'"),
    ({"residency": np.array('{"policy": "lru"}')}, "slots"),
    ({"phase": np.full(T, 3, np.uint8)}, "phase has 3"),
    ({"experts": np.array([None])}, "plain arrays"),
  ],
)
def test_wrong_files_are_refused(changes, words, tmp_path):
  path = tmp_path / "wrong.npz"
  archive(path, **changes)
  with pytest.raises(ValueError, match=words) as error:
    load(path)
  assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("content", [b"", b"PK", b"text", None])
def test_damaged_files_are_refused(content, tmp_path):
  path = tmp_path / "damaged.npz"
  archive(path)
  whole = path.read_bytes()
  if content is None:
    middle = len(whole) // 3
    content = whole[:middle] + bytes(64) + whole[middle + 64 :]
  path.write_bytes(content)
  with pytest.raises(ValueError, match="damaged"):
    load(path)


def test_select_keeps_sequences_whole_where_it_can():
  trace = full_trace()  # sequences of 3 and 4 tokens
  head = trace.head(5)
  assert isinstance(head, Trace)
  assert head.sequence_offsets.tolist() == [0, 3, 5]
  np.testing.assert_array_equal(head.scores, trace.scores[:5])
  last = trace.select(np.arange(T) >= 5)
  assert last.sequence_offsets.tolist() == [0, 2]
  assert last.domain.tolist() == [""]
  assert trace.head(100).num_tokens == T
