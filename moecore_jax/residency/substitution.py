"""Approximate expert substitution (AES): a resident expert of nearly equal score computes in place
of a missing one, with the missing one's mixing weight.

Per token, with b the best score that was not selected: selected experts with a score of at least
b + alpha |b| run exactly; the others, where missing, are paired in order of their scores with
resident experts outside the selection whose scores are at least b - alpha |b|. What finds no
partner loads exactly.

Source: SPEC section 7.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from moecore_jax.residency import base


class Substitution(NamedTuple):
  """Who computes.

  Attributes:
    topk_ids: int32 [T, A], the expert that computes each (token, rank).
    is_substituted: bool [T, A], entries whose expert is not the selected one.
  """

  topk_ids: Int32[Array, "T A"]
  is_substituted: Bool[Array, "T A"]


def substitute(
  topk_ids: Int32[Array, "T A"],
  scores: Float32[Array, "T N"],
  valid: Bool[Array, "T"],
  available: Bool[Array, "N"],
  threshold: float,
) -> Substitution:
  """Pairs missing experts with resident ones, token by token.

  An expert that any token must load exactly serves every token that selected it: it is never
  substituted.

  Args:
    topk_ids: selected experts by falling score; entries outside 0..N-1 select nothing.
    scores: selection scores, -inf where masked.
    valid: False for padding.
    available: experts that need no load.
    threshold: alpha, 0 <= alpha < 1; 0 substitutes nothing.
  """
  num_experts = scores.shape[1]
  if topk_ids.shape[1] >= num_experts or threshold == 0:  # no boundary, or an empty band
    return Substitution(topk_ids, jnp.zeros(topk_ids.shape, bool))
  hits = base.matches(topk_ids, num_experts) & valid[:, None, None]  # [T, A, N]
  selected = jnp.any(hits, axis=1)  # [T, N]
  boundary = jnp.max(jnp.where(selected, -jnp.inf, scores), axis=1)  # [T]
  has_boundary = boundary > -jnp.inf
  boundary = jnp.where(has_boundary, boundary, 0.0)
  band = threshold * jnp.abs(boundary)
  missing = selected & ~available[None]
  low = scores < (boundary + band)[:, None]
  low &= has_boundary[:, None]
  exact = jnp.any(missing & ~low, axis=0)  # [N], loaded whatever is paired
  replaceable = missing & low & ~exact[None]
  candidate = ~selected & available[None] & (scores >= (boundary - band)[:, None])
  candidate &= (scores > -jnp.inf) & (valid & has_boundary)[:, None]
  place_u = _place(replaceable, scores)  # [T, N], 0 is the best of the set
  place_c = _place(candidate, scores)
  num_candidates = jnp.sum(candidate, axis=1, dtype=jnp.int32)
  paired = replaceable & (place_u < num_candidates[:, None])
  exact |= jnp.any(replaceable & ~paired, axis=0)
  paired &= ~exact[None]
  # The expert of each (token, rank): the candidate whose place is that of the selected one.
  place = jnp.sum(jnp.where(hits & paired[:, None], place_u[:, None] + 1, 0), axis=2) - 1  # [T, A]
  is_partner = candidate[:, None] & (place_c[:, None] == place[:, :, None])  # [T, A, N]
  expert = jnp.arange(num_experts, dtype=jnp.int32)
  partner = jnp.sum(jnp.where(is_partner, expert[None, None], 0), axis=2)
  is_substituted = place >= 0
  return Substitution(jnp.where(is_substituted, partner, topk_ids), is_substituted)


def _place(members: Bool[Array, "T N"], scores: Float32[Array, "T N"]) -> Int32[Array, "T N"]:
  """Returns the place of each member by falling score, ties to the lower index."""
  num_experts = scores.shape[1]
  index = jnp.arange(num_experts, dtype=jnp.int32)
  ahead = scores[:, None, :] > scores[:, :, None]  # [T, this, other]
  tie = (scores[:, None, :] == scores[:, :, None]) & (index[None, :] < index[:, None])[None]
  return jnp.sum((ahead | tie) & members[:, None], axis=2, dtype=jnp.int32)
