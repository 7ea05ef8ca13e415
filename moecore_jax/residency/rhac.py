"""RHAC: replacement by recent frequency, history, current router score and age.

Per expert e and generated token i of a layer with selected set S_i and selection scores r_i:

    f    = selections among the last W tokens
    fbar = rho * fbar + (1 - rho) * [e in S_i]
    q    = r_i(e), the maximum over the tokens of one step
    a    = 0 if e in S_i else a + 1
    p    = lam_f n(f) + lam_m n(fbar) + lam_q n(q) - lam_a n(a)        lowest p leaves

n maps the values of all experts of the layer to [0, 1]. Every program that a backend compiles gives
the same result to the last bit, so that a replay and the engine choose the same victims.

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
      total = total + _weighted(frequency, spec.frequency_weight)
    if spec.average_weight:
      total = total + _weighted(state.average, spec.average_weight)
    if spec.score_weight:
      total = total + _weighted(state.score, spec.score_weight)
    if spec.age_weight:
      total = total - _weighted(state.age, spec.age_weight)
    return total

  return base.Policy(init, observe, lambda state, expert: state, priority)


def _weighted(values: Float32[Array, "N"], weight: float) -> Float32[Array, "N"]:
  """Returns weight * n(values): n maps a layer's values to [0, 1], all to 0 where they are equal.

  Values that are not finite count as the smallest finite one. Left to itself, XLA would divide by
  the range in one program and multiply by its inverse in the next, and fuse the product with the
  sum that follows; hence one explicit scale, and a selection behind the product.
  """
  finite = jnp.isfinite(values)
  low = jnp.min(jnp.where(finite, values, jnp.inf))
  high = jnp.max(jnp.where(finite, values, -jnp.inf))
  scale = jnp.where(high > low, weight / (high - low), 0.0)
  return _apart((jnp.where(finite, values, low) - low) * scale)


def _apart(product: jax.Array) -> jax.Array:
  """Keeps a product of numbers >= 0 apart from a sum that follows; also drops negligible ones."""
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
