"""RHAC: replacement by recent frequency, history, current router score and age.

Per expert e and generated token i of a layer with selected set S_i and selection scores r_i:

    f    = selections among the last W tokens
    fbar = rho * fbar + (1 - rho) * [e in S_i]
    q    = r_i(e), the maximum over the tokens of one step
    a    = 0 if e in S_i else a + 1
    p    = lam_f n(f) + lam_m n(fbar) + lam_q n(q) - lam_a n(a)        lowest p leaves

n maps the values of all experts of the layer to [0, 1]. Results are equal to the last bit in every
program that a backend compiles: each product is kept apart from the sum that follows it, so that
none is fused into one rounding.

Source: MoE-CORE, replacement by recency, history and current score.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from moecore_jax.residency import base
from moecore_jax.specs import RhacSpec

_NEGLIGIBLE = 1e-30  # averages below it are zero: subnormal numbers differ between backends
_UNROLLED_TOKENS = 8


class RhacState(NamedTuple):
  """Signals of one layer.

  Attributes:
    window: uint32 [N], bit j is set when the token j generated tokens ago selected the expert.
    average: float32 [N], exponential moving average of the selections, 0..1.
    score: float32 [N], selection score of the last step, maximum over its tokens; -inf where
      masked.
    age: float32 [N], whole number of generated tokens since the last selection.
  """

  window: UInt32[Array, "N"]
  average: Float32[Array, "N"]
  score: Float32[Array, "N"]
  age: Float32[Array, "N"]


def rhac(spec: RhacSpec) -> base.Policy:
  """Returns the RHAC policy.

  Raises:
    ValueError: a field of `spec` is outside its range.
  """
  _check(spec)
  window_mask = (1 << spec.window) - 1
  max_age = float(spec.age_cap) if spec.age_cap else base.MAX_COUNT

  def init(num_experts: int) -> RhacState:
    zeros = jnp.zeros(num_experts, jnp.float32)
    return RhacState(jnp.zeros(num_experts, jnp.uint32), zeros, zeros, zeros)

  def observe_token(state: RhacState, selected: Array, valid: Array) -> RhacState:
    window = ((state.window << 1) | selected.astype(jnp.uint32)) & jnp.uint32(window_mask)
    average = _apart(spec.decay * state.average)
    average = jnp.where(selected, average + (1.0 - spec.decay), average)
    age = jnp.where(selected, 0.0, jnp.minimum(state.age + 1.0, max_age))
    return RhacState(
      jnp.where(valid, window, state.window),
      jnp.where(valid, average, state.average),
      state.score,
      jnp.where(valid, age, state.age),
    )

  def observe(
    state: RhacState,
    topk_ids: Int32[Array, "T A"],
    scores: Float32[Array, "T N"],
    valid: Bool[Array, "T"],
  ) -> RhacState:
    num_tokens, num_experts = scores.shape
    selected = base.selections(topk_ids, valid, num_experts)  # [T, N]
    usable = jnp.isfinite(scores) & valid[:, None]
    score = jnp.max(jnp.where(usable, scores, -jnp.inf), axis=0)
    state = state._replace(score=jnp.where(jnp.any(valid), score, state.score))
    if num_tokens == 1:
      return observe_token(state, selected[0], valid[0])
    return lax.scan(
      lambda carry, token: (observe_token(carry, *token), None),
      state,
      (selected, valid),
      unroll=min(num_tokens, _UNROLLED_TOKENS),
    )[0]

  def priority(state: RhacState, key: Array) -> Float32[Array, "N"]:
    del key
    total = jnp.zeros(state.age.shape, jnp.float32)
    if spec.frequency_weight:
      frequency = lax.population_count(state.window).astype(jnp.float32)
      total = total + _apart(spec.frequency_weight * normalise(frequency))
    if spec.average_weight:
      total = total + _apart(spec.average_weight * normalise(state.average))
    if spec.score_weight:
      total = total + _apart(spec.score_weight * normalise(state.score))
    if spec.age_weight:
      total = total - _apart(spec.age_weight * normalise(state.age))
    return total

  return base.Policy(init, observe, lambda state, expert: state, priority)


def normalise(values: Float32[Array, "N"]) -> Float32[Array, "N"]:
  """Maps a layer's values to [0, 1], all to 0 where they are equal.

  Values that are not finite count as the smallest finite one.
  """
  finite = jnp.isfinite(values)
  low = jnp.min(jnp.where(finite, values, jnp.inf))
  high = jnp.max(jnp.where(finite, values, -jnp.inf))
  return jnp.where(finite & (high > low), (values - low) / (high - low), 0.0)


def _apart(product: jax.Array) -> jax.Array:
  """Keeps a product of numbers >= 0 from being fused with a sum; also drops what is negligible."""
  return jnp.where(product > _NEGLIGIBLE, product, 0.0)


def _check(spec: RhacSpec) -> None:
  if not 1 <= spec.window <= 32:
    raise ValueError(f"window is {spec.window}, expected 1..32 generated tokens")
  if not 0 <= spec.decay < 1:
    raise ValueError(f"decay is {spec.decay}, expected 0 <= decay < 1")
  if spec.age_cap < 0:
    raise ValueError(f"age_cap is {spec.age_cap}, expected 0 (no limit) or a number of tokens")
  for field in ("frequency_weight", "average_weight", "score_weight", "age_weight"):
    if not 0 <= getattr(spec, field) < float("inf"):
      raise ValueError(f"{field} is {getattr(spec, field)}, expected a finite number >= 0")
