"""The comparison of allocators: one row, whose second half was not seen by the allocation."""

from bench import allocators
from moecore_jax.testing.routing import random_trace


def test_a_row_keeps_the_budget_and_the_order_on_the_curve():
  trace = random_trace(200, num_layers=4, num_experts=16, top_k=2, skew=2.0)
  trace.experts[:, 0] = (0, 1)  # a layer that needs two slots
  row = allocators.measure(trace, 4, "lru")
  assert row["tokens"] == [100, 100]
  assert all(sum(slots) <= 16 for slots in row["allocations"].values())
  on_curve, held_out = row["hit_rate_on_curve"], row["hit_rate"]
  assert on_curve["exact"] >= on_curve["heuristic"] >= on_curve["uniform"] > 0
  assert held_out["exact"] > held_out["uniform"] > 0
