"""What a replacement policy is: pure functions over the signals of one layer.

A policy sees the router's selections of every decode step (`observe`), the experts that enter a
slot (`placed`) and answers with a priority per expert; `slots.choose_slot` evicts the lowest. Its
state is a pytree of fixed-shape arrays, so that an engine may stack it over layers, donate it, and
vmap or scan over it.

Ages, counts and recency stamps are kept as float32 integers of at most 2**24 in magnitude, where
float32 is exact; they saturate there instead of overflowing in a job that runs for days.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

PolicyState = Any
"""A pytree of fixed-shape arrays over the experts of one layer."""

MAX_COUNT = float(2**24)
"""Largest magnitude of a count: the end of float32's exact integers."""


class Policy(NamedTuple):
  """A replacement policy as a tuple of pure functions.

  Attributes:
    init: (num_experts) -> state of a cold cache.
    observe: (state, topk_ids int32[T, A], scores float32[T, N], valid bool[T]) -> state after the
      tokens of one decode step, taken in order. `scores` are selection scores, -inf where masked.
      Tokens that are not valid change nothing.
    placed: (state, expert int32[]) -> state after `expert` has entered a slot.
    priority: (state, key) -> float32[N], the lowest is evicted first. `key` is a JAX PRNG key, old
      or new style; only `random` reads it.
    evicts: False where the resident set is fixed, and a miss runs from a transient row.
  """

  init: Callable[[int], PolicyState]
  observe: Callable[[PolicyState, Array, Array, Array], PolicyState]
  placed: Callable[[PolicyState, Array], PolicyState]
  priority: Callable[[PolicyState, Array], Array]
  evicts: bool = True


def selections(
  topk_ids: Int32[Array, "T A"], valid: Bool[Array, "T"], num_experts: int
) -> Bool[Array, "T N"]:
  """Returns which experts each valid token selects."""
  hits = topk_ids[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)  # [T, A, N]
  return jnp.any(hits, axis=1) & valid[:, None]


def newest(stamps: Float32[Array, "N"], expert: Int32[Array, ""]) -> Float32[Array, "N"]:
  """Moves every stamp one into the past and gives `expert` the stamp 0, the newest."""
  is_expert = jnp.arange(stamps.shape[0], dtype=jnp.int32) == expert
  return jnp.where(is_expert, 0.0, jnp.maximum(stamps - 1.0, -MAX_COUNT))
