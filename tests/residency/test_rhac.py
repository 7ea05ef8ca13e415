"""RHAC's signals and priority against their definition, and the numbers that must not creep in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax import residency
from moecore_jax.specs import RhacSpec
from tests.residency import driver

N, A = 10, 3
ALL_TERMS = RhacSpec(
  window=6,
  decay=0.93,
  frequency_weight=1.3,
  average_weight=0.7,
  score_weight=0.9,
  age_weight=0.4,
)


def states_of(policy, topk_ids, scores, valid):
  """Returns the state after every step of a stream of S steps."""

  def body(state, step):
    state = policy.observe(state, *step)
    return state, state

  return jax.lax.scan(body, policy.init(scores.shape[-1]), (topk_ids, scores, valid))[1]


def normalise(values):
  values = np.asarray(values, np.float64)
  finite = values[np.isfinite(values)]
  low, high = finite.min(), finite.max()
  values = np.where(np.isfinite(values), values, low)
  return (values - low) / (high - low) if high > low else np.zeros_like(values)


@pytest.mark.parametrize("kind", ["random", "masked", "cyclic"])
def test_closed_form_in_float64(kind):
  """The sums of the definition, not the recursion, in twice the precision."""
  topk_ids, scores, valid = driver.make_streams(N, A, 1, 40, np.random.default_rng(0))[kind]
  policy = residency.make_policy("rhac", ALL_TERMS)
  states = jax.device_get(jax.jit(states_of, static_argnums=0)(policy, topk_ids, scores, valid))
  selected = (topk_ids[:, 0, :, None] == np.arange(N)).any(1)  # [S, N]
  for i in range(40):
    past = selected[: i + 1]
    weights = (1 - 0.93) * 0.93 ** np.arange(i, -1, -1)
    average = weights @ past
    last = np.where(past.any(0), i - np.argmax(past[::-1], axis=0), -1)
    age = i - last
    frequency = past[-6:].sum(0)
    np.testing.assert_allclose(states.average[i], average, rtol=1e-5)
    np.testing.assert_array_equal(states.age[i], age)
    np.testing.assert_array_equal([int(w).bit_count() for w in states.window[i]], frequency)
    np.testing.assert_array_equal(states.score[i], scores[i, 0])
    expected = (
      1.3 * normalise(frequency)
      + 0.7 * normalise(average)
      + 0.9 * normalise(scores[i, 0])
      - 0.4 * normalise(age)
    )
    state = jax.tree.map(lambda x, i=i: x[i], states)
    np.testing.assert_allclose(policy.priority(state, None), expected, atol=1e-5)


def test_several_tokens_in_one_step_equal_one_after_the_other():
  """Window, average and age follow the tokens in order, to the last bit; q is their maximum."""
  topk_ids, scores, valid = driver.make_streams(N, A, 1, 24, np.random.default_rng(1))["padded"]
  policy = residency.make_policy("rhac", ALL_TERMS)
  one = jax.jit(states_of, static_argnums=0)(policy, topk_ids, scores, valid)
  for num_tokens in (3, 12):
    wide = [x.reshape(-1, num_tokens, *x.shape[2:]) for x in (topk_ids, scores, valid)]
    many = jax.jit(states_of, static_argnums=0)(policy, *wide)
    for field in ("window", "average", "age"):
      np.testing.assert_array_equal(
        getattr(many, field), getattr(one, field)[num_tokens - 1 :: num_tokens]
      )
    best = np.where(wide[2][..., None], wide[1], -np.inf).max(1)
    has_token = wide[2].any(1)
    np.testing.assert_array_equal(many.score[has_token], best[has_token])


def test_same_bits_however_the_program_is_compiled():
  """Operation by operation, fused, and vmapped: no product may be fused into its sum's rounding."""
  policy = residency.make_policy("rhac", ALL_TERMS)
  topk_ids, scores, valid = driver.make_streams(256, 8, 1, 30, np.random.default_rng(2))["skewed"]

  def last_priority(topk_ids, scores, valid):
    state = policy.init(256)
    for i in range(topk_ids.shape[0]):
      state = policy.observe(state, topk_ids[i], scores[i], valid[i])
    return state, policy.priority(state, None)

  step = [jnp.asarray(x[-4:]) for x in (topk_ids, scores, valid)]
  with jax.disable_jit():
    eager = last_priority(*step)
  fused = jax.jit(last_priority)(*step)
  mapped = jax.jit(jax.vmap(last_priority))(*(x[None] for x in step))
  jax.tree.map(np.testing.assert_array_equal, fused, eager)
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[0], mapped), eager)


def test_nothing_before_the_first_token():
  policy = residency.make_policy("rhac", ALL_TERMS)
  np.testing.assert_array_equal(policy.priority(policy.init(N), None), np.zeros(N))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_count_as_masked(poison):
  policy = residency.make_policy("rhac", RhacSpec(average_weight=0, age_weight=0, score_weight=1.0))
  scores = jnp.asarray([[2.0, poison, 4.0, 3.0]], jnp.float32)
  state = policy.observe(policy.init(4), jnp.zeros((1, 1), jnp.int32), scores, jnp.ones(1, bool))
  np.testing.assert_array_equal(policy.priority(state, None), [0, 0, 1, 0.5])
  all_poison = jnp.full((1, 4), poison, jnp.float32)
  state = policy.observe(state, jnp.zeros((1, 1), jnp.int32), all_poison, jnp.ones(1, bool))
  np.testing.assert_array_equal(policy.priority(state, None), np.zeros(4))


def test_average_never_becomes_subnormal():
  policy = residency.make_policy("rhac", RhacSpec(decay=0.5))
  state = policy.init(2)._replace(average=jnp.asarray([3e-30, 1.5e-30], jnp.float32))
  ids, scores = jnp.full((1, 1), 7, jnp.int32), jnp.zeros((1, 2))
  state = policy.observe(state, ids, scores, jnp.ones(1, bool))
  np.testing.assert_array_equal(state.average, np.array([1.5e-30, 0], np.float32))


def test_age_stops_at_the_cap_and_at_the_end_of_exact_integers():
  ids, scores = jnp.full((1, 1), 1, jnp.int32), jnp.zeros((1, 2))
  for age_cap, end in ((3, 3), (0, 2**24)):
    policy = residency.make_policy("rhac", RhacSpec(age_cap=age_cap))
    state = policy.init(2)._replace(age=jnp.asarray([end - 1, end], jnp.float32))
    for _ in range(3):
      state = policy.observe(state, ids, scores, jnp.ones(1, bool))
    np.testing.assert_array_equal(state.age, [end, 0])


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("window", 0),
    ("window", 33),
    ("decay", 1.0),
    ("decay", -0.1),
    ("age_cap", -1),
    ("frequency_weight", -1.0),
    ("average_weight", float("nan")),
    ("score_weight", float("inf")),
    ("age_weight", -0.5),
  ],
)
def test_settings_out_of_range_are_refused(field, value):
  with pytest.raises(ValueError, match=f"^{field} is {value}, expected"):
    residency.make_policy("rhac", RhacSpec(**{field: value}))
