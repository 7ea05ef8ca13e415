"""Cross-layer prefetch: which experts of the next layer are worth copying before it has routed.

While a layer computes, the next layer's router is applied early; its best experts that are absent
are candidates. Either none or a fixed number of them is copied, into in-flight rows of the pool.
When the next layer has routed, each arrival is used at once, kept by its priority, or dropped.

A prefill copies ahead what a warm start lacks, by the same ways (`warm_candidates`).

Whatever is issued, the prediction is scored; a layer whose predictions are seldom right issues
nothing until they are again.

Source: SPEC section 6.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from moecore_jax.residency import base


class Prediction(NamedTuple):
  """What a layer was predicted to need.

  Attributes:
    experts: int32 [n_l], candidates by falling score, -1 behind the last.
    is_issued: bool [], their copies are on the way.
    topk_ids: int32 [T, A], predicted selections, resident or not, N for none.
  """

  experts: Int32[Array, "n"]
  is_issued: Bool[Array, ""]
  topk_ids: Int32[Array, "T A"]


def no_prediction(topk_ids: Int32[Array, "T A"], num_experts: int) -> Prediction:
  """Returns the prediction of a layer that has none, such as the first.

  Args:
    topk_ids: selections of the layer, for their shape.
    num_experts: N.
  """
  nothing = jnp.full_like(topk_ids, num_experts)
  return Prediction(jnp.zeros(0, jnp.int32), jnp.asarray(False), nothing)


def predict(
  topk_ids: Int32[Array, "T A"],
  scores: Float32[Array, "T N"],
  valid: Bool[Array, "T"],
  resident: Bool[Array, "N"],
  count: int,
  is_allowed: Bool[Array, ""],
) -> Prediction:
  """Ranks the candidates of the next layer and decides whether they are copied.

  Args:
    topk_ids: what the next layer's router selects from the present layer's input.
    scores: its selection scores; candidates are ranked by their maximum over tokens.
    valid: False for padding.
    resident: experts of the next layer that lie in a slot.
    count: n_l, copies that are made when any are, 1..N.
    is_allowed: the layer may issue copies.

  Returns:
    At most `count` candidates; issued where there are `count` of them and the layer may.
  """
  num_experts = resident.shape[0]
  chosen = jnp.any(base.selections(topk_ids, valid, num_experts), axis=0)
  best = jnp.max(jnp.where(valid[:, None], scores, -jnp.inf), axis=0)
  values, experts = lax.top_k(jnp.where(chosen & ~resident, best, -jnp.inf), count)
  is_candidate = values > -jnp.inf
  return Prediction(
    jnp.where(is_candidate, experts.astype(jnp.int32), -1),
    jnp.all(is_candidate) & is_allowed,
    jnp.where(valid[:, None], topk_ids, num_experts),
  )


def warm_candidates(
  warm_rank: Int32[Array, "N"],
  resident: Bool[Array, "N"],
  num_slots: Int32[Array, ""],
  count: int,
) -> Int32[Array, "n"]:
  """Returns what the warm start of a layer lacks, the hottest first.

  Args:
    warm_rank: place in the warm-start order, 0 is the hottest; all 0 where there is no profile.
    resident: experts that lie in a slot.
    num_slots: K_l; the warm start wants the K_l hottest.
    count: n_l, 1..N.

  Returns:
    int32 [n_l] experts, -1 behind the last; none without a profile.

  Source: SPEC section 4.
  """
  num_experts = warm_rank.shape[0]
  is_wanted = ~resident & (warm_rank < num_slots) & jnp.any(warm_rank > 0)
  values, experts = lax.top_k(jnp.where(is_wanted, -warm_rank, -num_experts), count)
  return jnp.where(values > -num_experts, experts.astype(jnp.int32), -1)


def num_useful(prediction: Prediction, member: Bool[Array, "N"]) -> Int32[Array, ""]:
  """Returns how many candidates the layer's true routing selects (`member`)."""
  is_candidate = base.matches(prediction.experts, member.shape[0])
  return jnp.sum(jnp.any(is_candidate & member[None], axis=1), dtype=jnp.int32)


def num_predicted(
  prediction: Prediction, topk_ids: Int32[Array, "T A"], num_experts: int
) -> Int32[Array, ""]:
  """Returns how many of the tokens' true selections the prediction held."""
  is_held = prediction.topk_ids[:, :, None] == topk_ids[:, None, :]  # [T, predicted, true]
  is_held &= (topk_ids < num_experts)[:, None, :]
  return jnp.sum(jnp.any(is_held, axis=1), dtype=jnp.int32)


def update_useful_rate(
  rate: Float32[Array, ""], prediction: Prediction, useful: Int32[Array, ""], decay: float
) -> Float32[Array, ""]:
  """Moves the mean share of right candidates; a step without candidates changes nothing."""
  count = jnp.sum(prediction.experts >= 0, dtype=jnp.int32)
  frac = useful.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
  return jnp.where(count > 0, decay * rate + (1 - decay) * frac, rate)
