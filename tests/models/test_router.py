"""Routers against plain NumPy, token by token, where what decides and what weighs are far apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moecore_jax.models.router import Router
from moecore_jax.specs import RouterSpec

DIM, TOKENS, EXPERTS, PER_TOKEN = 6, 32, 12, 4
SCORES = {
  "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
  "softmax": lambda z: np.exp(z - z.max()) / np.exp(z - z.max()).sum(),
  "softmax_topk": lambda z: z,
  "sqrt_softplus": lambda z: np.sqrt(np.log1p(np.exp(z))),
}
SPECS = {
  "biased": RouterSpec(EXPERTS, PER_TOKEN, norm_topk=False, scale=2.5),
  "biased, normalised": RouterSpec(EXPERTS, PER_TOKEN, scale=2.5),
  "groups by two": RouterSpec(EXPERTS, PER_TOKEN, 4, 2, scale=2.5),
  "groups by one": RouterSpec(
    EXPERTS, PER_TOKEN, 4, 2, False, 16.0, "softmax", "none", group_score="max"
  ),
  "softmax": RouterSpec(EXPERTS, PER_TOKEN, norm_topk=False, scoring="softmax", bias="none"),
  "softmax, normalised": RouterSpec(EXPERTS, PER_TOKEN, scoring="softmax", bias="none"),
  "of the chosen": RouterSpec(EXPERTS, PER_TOKEN, scoring="softmax_topk", bias="logits"),
  "root": RouterSpec(EXPERTS, PER_TOKEN, scale=1.5, scoring="sqrt_softplus"),
}


def route(spec, logits, bias):
  """Returns the chosen experts, best first, their weights, and whether biases had a say."""
  if spec.bias == "logits":
    logits = logits + bias
  scores = SCORES[spec.scoring](logits)
  ranked = scores + bias if spec.bias == "selection" else scores
  size = spec.num_experts // spec.num_groups
  groups = [range(g * size, (g + 1) * size) for g in range(spec.num_groups)]
  largest = 2 if spec.group_score == "top2" else 1
  worth = [sum(sorted(ranked[e] for e in group)[-largest:]) for group in groups]
  kept = sorted(range(spec.num_groups), key=lambda g: -worth[g])[: spec.topk_groups]
  allowed = [e for g in kept for e in groups[g]]
  chosen = sorted(allowed, key=lambda e: -ranked[e])[: spec.num_experts_per_tok]
  weights = scores[chosen]
  if spec.scoring == "softmax_topk":
    weights = SCORES["softmax"](weights)
  elif spec.norm_topk:
    weights = weights / weights.sum()
  return chosen, weights * spec.scale


@pytest.mark.parametrize("name", SPECS)
def test_biases_decide_and_do_not_weigh(name):
  """Biases of -10 to 2 outdo all scores, and most of what is ranked is negative."""
  spec, rng = SPECS[name], np.random.default_rng(0)
  kernel = rng.normal(size=(DIM, EXPERTS)).astype(np.float32)
  bias = rng.uniform(-10, 2, EXPERTS).astype(np.float32)
  router = Router(spec, DIM, 1, nnx.Rngs(0))
  router.kernel[...] = jnp.asarray(kernel)
  if spec.bias != "none":
    router.bias[...] = jnp.asarray(bias)
  h = rng.normal(size=(TOKENS, DIM)).astype(np.float32)
  routing = jax.jit(lambda h: router(h, jnp.zeros(TOKENS, jnp.int32)))(h)
  wanted = [route(spec, z, bias.astype(float)) for z in h.astype(float) @ kernel.astype(float)]
  np.testing.assert_array_equal(routing.topk_ids, [chosen for chosen, _ in wanted])
  np.testing.assert_allclose(routing.topk_weights, [weights for _, weights in wanted], rtol=1e-5)
