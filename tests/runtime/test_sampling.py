"""Drawing tokens: greedy ties, and the filters keep exactly what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax.runtime.sampling import sample
from moecore_jax.specs import SamplingSpec

LOGITS = jnp.log(jnp.array([[0.5, 0.2, 0.2, 0.07, 0.03]]))


def draws(spec, count=400):
  keys = jax.random.split(jax.random.key(0), count)
  return np.asarray(jax.vmap(lambda key: sample(LOGITS, key, spec)[0])(keys))


def test_greedy_takes_the_first_of_equals():
  logits = jnp.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
  assert sample(logits, jax.random.key(0), SamplingSpec()).tolist() == [1, 0]


def test_temperature_one_follows_the_distribution():
  shares = np.bincount(draws(SamplingSpec(temperature=1.0), 4000), minlength=5) / 4000
  np.testing.assert_allclose(shares, [0.5, 0.2, 0.2, 0.07, 0.03], atol=0.03)


@pytest.mark.parametrize(
  ("spec", "kept"),
  [
    (SamplingSpec(temperature=1.0, top_k=1), {0}),
    (SamplingSpec(temperature=1.0, top_k=3), {0, 1, 2}),
    (SamplingSpec(temperature=1.0, top_k=99), {0, 1, 2, 3, 4}),
    (SamplingSpec(temperature=1.0, top_p=0.4), {0}),
    (SamplingSpec(temperature=1.0, top_p=0.95), {0, 1, 2, 3}),
    (SamplingSpec(temperature=1.0, top_p=1e-9), {0}),
    (SamplingSpec(temperature=1e-3), {0}),
  ],
)
def test_filters(spec, kept):
  assert set(draws(spec).tolist()) == kept
