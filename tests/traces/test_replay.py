"""Replays against other caches: cachetools for sequential counting, plain Python for protected."""

import dataclasses
import itertools

import cachetools
import numpy as np
import pytest

from moecore_jax.specs import RhacSpec
from moecore_jax.testing import routing
from moecore_jax.traces import Trace, hit_rates, replay
from tests.residency import oracles

TRACE = routing.random_trace(150, num_layers=2, num_experts=12, top_k=3, num_sequences=3)
WARM = np.stack([np.random.default_rng(i).permutation(12) for i in range(2)])


class LowestSlotLfu(cachetools.LFUCache):
  """LFU that breaks ties as we do: of the least used, the one in the lowest slot leaves."""

  def __init__(self, maxsize):
    super().__init__(maxsize)
    self.slots = {}

  def popitem(self):
    least_used = self._LFUCache__root.next.keys
    key = min(least_used, key=self.slots.get)
    self.freed = self.slots.pop(key)
    return key, self.pop(key)

  def add(self, key):
    self.freed = len(self.slots)
    self[key] = True
    self.slots[key] = self.freed


def stream_hits(cache, choices):
  hits = []
  for key in choices:
    hits.append(key in cache)
    if hits[-1]:
      cache[key]
    elif isinstance(cache, LowestSlotLfu):
      cache.add(key)
    else:
      cache[key] = True
  return hits


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("policy", "make"), [("lru", cachetools.LRUCache), ("lfu", LowestSlotLfu)])
def test_sequential_counting_equals_cachetools(policy, make, seed):
  """Every number of slots from one on, hit for hit of each token."""
  trace = routing.random_trace(150, 2, 12, 3, seed=seed)
  for num_slots in (1, 2, 5, 11, 12):
    result = replay(trace, policy, num_slots, counting="sequential", per_token=True)
    for layer in range(2):
      hits = stream_hits(make(num_slots), trace.experts[:, layer].ravel().tolist())
      expected = np.reshape(hits, (-1, 3)).sum(axis=1)
      np.testing.assert_array_equal(result.token_hits[:, layer], expected)
      assert result.hits[layer] == expected.sum()


@pytest.mark.parametrize("warm_rank", [None, WARM])
@pytest.mark.parametrize("policy", ["rhac", "lru", "lfu", "fifo", "static"])
def test_protected_counting_equals_plain_python(policy, warm_rank):
  slots = (3, 7)
  make = {
    "rhac": lambda: oracles.Rhac(12, RhacSpec()),
    "lru": lambda: oracles.Lru(12),
    "lfu": lambda: oracles.Lfu(12),
    "fifo": lambda: oracles.Fifo(12),
    "static": lambda: None,
  }[policy]
  result = replay(TRACE, policy, slots, warm_rank=warm_rank, per_token=True)
  for layer, num_slots in enumerate(slots):
    rank = np.zeros(12, int) if warm_rank is None else warm_rank[layer]
    cache = oracles.Cache(num_slots, rank, make())
    if warm_rank is not None:
      cache.slots = np.argsort(rank)[:num_slots].tolist()
    counts = np.zeros(3, int)
    for token in range(TRACE.num_tokens):
      chosen = TRACE.experts[token, layer].tolist()
      hits = sum(e in cache.slots for e in chosen)
      cache.step([(chosen, np.zeros(12))])
      evictions = sum(victim is not None for _, _, victim in cache.log)
      counts += hits, 3 - hits, evictions
      assert result.token_hits[token, layer] == hits
    found = result.hits[layer], result.misses[layer], result.evictions[layer]
    assert found == tuple(counts)


def test_all_sizes_at_once_equal_each_alone():
  candidates = [3, 4, 6, 12]
  for policy, counting in (("random", "protected"), ("belady", "sequential")):
    rates = hit_rates(TRACE, candidates, policy, counting=counting, warm_rank=WARM)
    assert rates.shape == (2, 4)
    for i, count in enumerate(candidates):
      alone = replay(TRACE, policy, count, counting=counting, warm_rank=WARM)
      np.testing.assert_array_equal(rates[:, i], alone.hit_rate)
  by_layer = hit_rates(TRACE, np.array([[3, 12], [5, 4]]), "lru")
  np.testing.assert_array_equal(by_layer[:, 1], replay(TRACE, "lru", (5, 4)).hit_rate)
  num_used = len(np.unique(TRACE.experts[:, 1]))
  assert by_layer[1, 0] == 1 - num_used / (150 * 3)  # all resident: each expert misses once


def test_long_traces_run_in_pieces():
  """Pieces of 1024 tokens pass on their caches: the whole equals its parts' running counts."""
  trace = routing.random_trace(2500, num_layers=1, num_experts=8, top_k=2)
  whole = replay(trace, "rhac", 3, per_token=True)
  assert whole.hits[0] == whole.token_hits.sum()
  part = replay(trace.head(1500), "rhac", 3, per_token=True)
  np.testing.assert_array_equal(part.token_hits, whole.token_hits[:1500])


@pytest.mark.parametrize("policy", ["rhac", "belady"])
def test_resets_make_every_sequence_start_alike(policy):
  result = replay(TRACE, policy, 4, reset_between_sequences=True, warm_rank=WARM, per_token=True)
  edges = TRACE.sequence_offsets
  for start, stop in itertools.pairwise(edges):
    keep = (np.arange(TRACE.num_tokens) >= start) & (np.arange(TRACE.num_tokens) < stop)
    alone = replay(TRACE.select(keep), policy, 4, warm_rank=WARM, per_token=True)
    np.testing.assert_array_equal(result.token_hits[keep], alone.token_hits)


def test_layers_of_different_shapes():
  """Each layer counts as it would alone; missing choices are no requests."""
  small = routing.random_trace(40, 1, 6, 2, seed=1)
  large = routing.random_trace(40, 1, 12, 3, seed=2)
  experts = np.full((40, 2, 3), 65535, np.uint16)
  experts[:, :1, :2], experts[:, 1:] = small.experts, large.experts
  experts[7] = 65535
  both = dataclasses.replace(
    small,
    experts=experts,
    num_experts=np.array([6, 12], np.int32),
    top_k=np.array([2, 3], np.int32),
    expert_bytes=np.zeros(2, np.int64),
  )
  result = replay(both, "lru", (3, 5))
  assert result.requests.tolist() == [78, 117]
  keep = np.arange(40) != 7
  for layer, (trace, slots) in enumerate(((small, 3), (large, 5))):
    changed = trace.experts.copy()
    changed[7] = 65535
    alone = replay(dataclasses.replace(trace, experts=changed), "lru", slots)
    assert (result.hits[layer], result.misses[layer]) == (alone.hits[0], alone.misses[0])
    assert alone.hits + alone.misses == alone.requests
  empty = replay(both.select(~keep), "lru", (3, 5))
  assert empty.hit_rate.tolist() == [0, 0]
  assert empty.mean_hit_rate == 0


def test_scores_decide_where_they_have_weight():
  spec = RhacSpec(average_weight=0, age_weight=0, score_weight=1.0)
  scores = np.random.default_rng(0).normal(size=(150, 2, 12)).astype(np.float32)
  trace = dataclasses.replace(TRACE, scores=scores)
  result = replay(trace, "rhac", 5, rhac=spec, per_token=True)
  for layer in range(2):
    cache = oracles.Cache(5, np.zeros(12, int), oracles.Rhac(12, spec))
    for token in range(150):
      chosen = trace.experts[token, layer].tolist()
      assert result.token_hits[token, layer] == sum(e in cache.slots for e in chosen)
      cache.step([(chosen, scores[token, layer])])
  with pytest.raises(ValueError, match="no scores"):
    replay(TRACE, "rhac", 5, rhac=spec)


def test_seeds_change_random_replacement_alone():
  first, again, other = (replay(TRACE, "random", 4, seed=s).hits for s in (0, 0, 1))
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"slots": 2}, r"layer 0 is 2, expected 3\.\.12; with fewer, count sequentially"),
    ({"slots": 13}, r"layer 0 is 13, expected 3\.\.12$"),
    ({"slots": 0, "counting": "sequential"}, r"layer 0 is 0, expected 1\.\.12$"),
    ({"slots": (3, 3, 3)}, "slots"),
    ({"policy": "mru"}, "policy is 'mru'"),
    ({"counting": "twice"}, "counting is 'twice'"),
    ({"warm_rank": WARM[:1]}, "warm_rank has shape"),
    ({"warm_rank": WARM * 0}, "warm_rank of layer 0 is no order"),
  ],
)
def test_wrong_settings(change, words):
  with pytest.raises(ValueError, match=words):
    replay(TRACE, **{"policy": "lru", "slots": 4} | change)


def test_an_empty_trace():
  nothing: Trace = routing.random_trace(0)
  assert replay(nothing, "lru", 4).requests.tolist() == [0, 0]
