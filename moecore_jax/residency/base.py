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
from jax import lax
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


def matches(ids: Int32[Array, "..."], num_experts: int) -> Bool[Array, "... N"]:
  """Returns which expert each id names; an id outside 0..N-1 names none."""
  expert = lax.broadcasted_iota(jnp.int32, (*ids.shape, num_experts), ids.ndim)
  return ids[..., None] == expert


def selections(
  topk_ids: Int32[Array, "T A"], valid: Bool[Array, "T"], num_experts: int
) -> Bool[Array, "T N"]:
  """Returns which experts each valid token selects."""
  return jnp.any(matches(topk_ids, num_experts), axis=1) & valid[:, None]


def newest(stamps: Float32[Array, "N"], expert: Int32[Array, ""]) -> Float32[Array, "N"]:
  """Moves every stamp one into the past and gives `expert` the stamp 0, the newest."""
  return jnp.where(matches(expert, stamps.shape[0]), 0.0, jnp.maximum(stamps - 1.0, -MAX_COUNT))
