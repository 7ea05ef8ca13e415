"""Both allocators: hand-worked examples, plain-Python oracles, and what must hold on any curve."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore_jax.residency import allocator


def make_curves(sizes, hit_rates, expert_bytes=1, fan_out=1, num_experts=10**6):
  layers = len(hit_rates)
  return allocator.Curves(
    np.asarray(sizes, np.int64),
    np.asarray(hit_rates, np.float64),
    *(
      np.broadcast_to(np.asarray(x, np.int64), layers) for x in (expert_bytes, fan_out, num_experts)
    ),
  )


def test_one_transfer_by_hand():
  """Median .70; layer 0 loses .01 at 6, layer 2 would gain .20 at 10, and then none is left."""
  curves = make_curves(
    (4, 6, 8, 10, 12),
    [
      (0.80, 0.89, 0.90, 0.91, 0.92),
      (0.40, 0.60, 0.70, 0.75, 0.80),
      (0.10, 0.30, 0.50, 0.70, 0.71),
    ],
  )
  assert allocator.allocate_heuristic(curves, 8, 24, step=2) == (6, 8, 10)
  assert curves.hit_rate((8, 8, 8)) == pytest.approx(0.70)
  assert curves.hit_rate((6, 8, 10)) == pytest.approx((0.89 + 0.70 + 0.70) / 3)
  # A stricter donor, or a receiver that must lie lower, and nothing moves.
  assert allocator.allocate_heuristic(curves, 8, 24, step=2, eps_drop=0.005) == (8, 8, 8)
  assert allocator.allocate_heuristic(curves, 8, 24, step=2, tau_low=0.25) == (8, 8, 8)
  # The best of this budget: layer 1 gives nothing, for it loses .10 at 6.
  assert allocator.allocate_exact(curves, 24) == (6, 8, 10)
  assert allocator.allocate_exact(curves, 24, weights=(1, 8, 1)) == (4, 12, 8)


def test_ties_go_to_the_lower_layer():
  flat, steep, middle = (0.9, 0.9, 0.9), (0.1, 0.2, 0.6), (0.4, 0.5, 0.55)
  curves = make_curves((1, 2, 3), [flat, flat, middle, steep, steep])
  assert allocator.allocate_heuristic(curves, 2, 10, step=1) == (1, 1, 2, 3, 3)
  curves = make_curves((1, 2, 3), [flat, flat, middle, middle, steep])
  # Layer 4 goes first; it is the median then, and layers 2 and 3 have become receivers.
  assert allocator.allocate_heuristic(curves, 2, 10, step=1, tau_low=0.1) == (1, 1, 3, 2, 3)


def test_a_donor_of_small_experts_gives_several_steps():
  """One step of layer 2 costs 5, one of layer 0 frees 2: three steps pay, if layer 0 has them."""
  rates = [(0.88, 0.89, 0.90, 0.91, 0.92), (0.7,) * 5, (0.1, 0.2, 0.3, 0.4, 0.7)]
  sizes = (1, 2, 3, 4, 5)
  curves = make_curves(sizes, rates, expert_bytes=(2, 3, 5))
  uniform_bytes = 4 * (2 + 3 + 5)
  assert allocator.allocate_heuristic(curves, 4, uniform_bytes, step=1) == (1, 4, 5)
  assert allocator.allocate_heuristic(curves, 4, uniform_bytes + 1, step=1) == (2, 4, 5)
  assert allocator.allocate_heuristic(curves, 4, uniform_bytes + 3, step=1) == (3, 4, 5)
  few = make_curves(sizes, rates, expert_bytes=(2, 3, 5), fan_out=(2, 1, 1))
  assert allocator.allocate_heuristic(few, 4, uniform_bytes, step=1) == (4, 4, 4)


def test_the_papers_allocation_is_reached():
  """84 slots in 43 layers: 30 give a step of 6, five take six steps, eight stay.

  At most 21 layers lie above the median at once: the first to give fall below the others.
  """
  step = allocator.default_step(84)
  sizes = np.asarray(allocator.candidate_sizes(84, step, 6, 256))
  assert step == 6
  assert {78, 84, 120} <= set(sizes)
  receivers, still = (7, 9, 19, 31, 37), (3, 5, 11, 13, 17, 23, 29, 41)
  rates = np.empty((43, len(sizes)))
  for layer in range(43):
    if layer in receivers:
      rates[layer] = 0.5 + 0.03 * (np.minimum(sizes, 120) - 84) / 6
    elif layer in still:
      rates[layer] = 0.76
    else:
      rates[layer] = 0.8 + 3e-4 * layer - 0.019 * (sizes < 84) - 0.1 * (sizes < 78)
  rates = np.maximum(rates, 0)
  curves = make_curves(sizes, rates, 12_650_000, fan_out=6, num_experts=256)
  budget = curves.num_bytes([84] * 43)
  assert round(budget / 1e9, 1) == 45.7
  slots = allocator.allocate_heuristic(curves, 84, budget)
  assert sorted(slots) == [78] * 30 + [84] * 8 + [120] * 5
  assert [layer for layer, k in enumerate(slots) if k == 120] == list(receivers)
  assert sum(slots) == 84 * 43 == 3612
  assert curves.num_bytes(slots) == budget
  exact = allocator.allocate_exact(curves, budget)
  assert curves.hit_rate(exact) > curves.hit_rate(slots) > curves.hit_rate([84] * 43)


@pytest.mark.parametrize(
  ("uniform", "step", "least", "most", "sizes"),
  [
    (12, 1, 10, 14, (10, 11, 12, 13, 14)),
    (84, 6, 70, 100, (72, 78, 84, 90, 96)),
    (4, 3, 4, 8, (4, 7)),
    (5, 3, 1, 4, (2,)),
  ],
)
def test_candidate_sizes(uniform, step, least, most, sizes):
  assert allocator.candidate_sizes(uniform, step, least, most) == sizes


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda c: allocator.allocate_heuristic(c, 3, 99), "no measured size of MoE layer 0"),
    (lambda c: allocator.allocate_heuristic(c, 2, 3), "the budget is 0.000 GB"),
    (lambda c: allocator.allocate_exact(c, 1), "smallest sizes need"),
    (lambda c: make_curves((2, 1), [(0, 0)]), "ascending"),
    (lambda c: make_curves((1, 2), [(0, 0, 0)]), r"\[1, 3\], expected \[1, 2\]"),
    (lambda c: make_curves((1, 2), [(0, np.nan)]), "not finite"),
    (
      lambda c: allocator.allocate_exact(make_curves((1, 2), [(0, 0)], fan_out=3), 9),
      "no measured",
    ),
  ],
)
def test_refusals(make, words):
  curves = make_curves((1, 2), [(0.1, 0.2), (0.1, 0.2)])
  with pytest.raises(ValueError, match=words):
    make(curves)


@st.composite
def problems(draw):
  """Curves of 1..4 layers over five sizes, some falling, and experts of unequal bytes."""
  layers = draw(st.integers(1, 4))
  step = draw(st.integers(1, 2))
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  sizes = [step * i + 1 for i in range(5)]
  rates = rng.integers(0, 40, (layers, 5)) / 40  # coarse, so that there are ties
  if draw(st.booleans()):
    rates = np.sort(rates, axis=1)
  expert_bytes = rng.choice((1, 2, 5) if draw(st.booleans()) else (3,), layers)
  fan_out = rng.integers(1, sizes[2] + 1, layers)
  num_experts = rng.integers(sizes[2], sizes[4] + 1, layers)
  rates[(np.asarray(sizes) < fan_out[:, None]) | (np.asarray(sizes) > num_experts[:, None])] = (
    np.nan
  )
  curves = make_curves(sizes, rates, expert_bytes, fan_out, num_experts)
  spare = draw(st.integers(0, 6))
  return curves, sizes[2], step, curves.num_bytes([sizes[2]] * layers) + spare


def plain_heuristic(curves, uniform, step, budget, eps_drop, tau_low):
  """The procedure of the method, in lists and loops."""
  rates = [
    {
      int(k): float(h)
      for k, h in zip(curves.sizes, row, strict=True)
      if curves.num_experts_per_tok[layer] <= k <= curves.num_experts[layer]
    }
    for layer, row in enumerate(curves.hit_rates)
  ]
  size, slots = curves.expert_bytes.tolist(), [uniform] * len(rates)

  def transfer():
    now = [rates[layer][k] for layer, k in enumerate(slots)]
    median, donors, receivers = statistics.median(now), [], []
    for layer, k in enumerate(slots):
      if now[layer] > median and k - step in rates[layer]:
        loss = now[layer] - rates[layer][k - step]
        if loss <= eps_drop:
          donors.append((loss, layer))
      if now[layer] <= median - tau_low and k + step in rates[layer]:
        receivers.append((now[layer] - rates[layer][k + step], layer))
    for minus_gain, r in sorted(receivers):
      for _, d in sorted(donors):
        given = step
        while sum(map(int.__mul__, slots, size)) + step * size[r] - given * size[d] > budget:
          given += step
        left = slots[d] - given
        if left in rates[d] and -minus_gain > now[d] - rates[d][left]:
          slots[d], slots[r] = left, slots[r] + step
          return True
    return False

  while transfer():
    pass
  return tuple(slots)


@settings(max_examples=150, deadline=None)
@given(
  problem=problems(), tau_low=st.sampled_from((0.0, 0.05, 0.2)), eps=st.sampled_from((0.02, 0.3))
)
def test_allocations_keep_their_promises(problem, tau_low, eps):
  curves, uniform, step, budget = problem
  layers = len(curves.expert_bytes)
  heuristic = allocator.allocate_heuristic(curves, uniform, budget, step, eps, tau_low)
  exact = allocator.allocate_exact(curves, budget)
  for slots in (heuristic, exact):
    assert curves.num_bytes(slots) <= budget
    assert (curves.num_experts_per_tok <= slots).all()
    assert (slots <= curves.num_experts).all()
  rates = [curves.hit_rate(slots) for slots in (exact, heuristic, (uniform,) * layers)]
  assert rates[0] >= rates[1] - 1e-12
  assert rates[1] >= rates[2] - 1e-12
  assert heuristic == plain_heuristic(curves, uniform, step, budget, eps, tau_low)


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 1000))
def test_the_exact_allocator_equals_trying_everything(problem, seed):
  curves, _, _, budget = problem
  layers = len(curves.expert_bytes)
  weights = np.random.default_rng(seed).integers(1, 5, layers)
  exact = allocator.allocate_exact(curves, budget, weights)
  every = itertools.product(
    *(
      [(float(w * row[s]), int(curves.sizes[s] * size)) for s in np.flatnonzero(allowed)]
      for w, row, size, allowed in zip(
        weights, curves.hit_rates, curves.expert_bytes, curves.is_allowed, strict=True
      )
    )
  )
  best = max(
    sum(value for value, _ in choice)
    for choice in every
    if sum(cost for _, cost in choice) <= budget
  )
  assert curves.hit_rate(exact, weights) == pytest.approx(best / weights.sum(), abs=1e-12)
