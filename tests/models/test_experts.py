"""The ways of applying experts give what a plain loop over tokens gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax.models import experts
from moecore_jax.models.router import Routing
from moecore_jax.quantization import formats
from moecore_jax.specs import ActivationSpec, ExpertGroup

TOKENS, RANKS, EXPERTS, DIM, WIDTH = 20, 3, 7, 8, 6


@pytest.fixture
def case():
  rng = np.random.default_rng(0)
  h = rng.normal(size=(TOKENS, DIM)).astype(np.float32)
  gate_up = rng.normal(size=(EXPERTS, DIM, 2 * WIDTH)).astype(np.float32)
  down = rng.normal(size=(EXPERTS, WIDTH, DIM)).astype(np.float32)
  # Expert 6 has no token, expert 0 is everyone's first choice.
  ids = np.stack([np.append(0, 1 + rng.permutation(5)[: RANKS - 1]) for _ in range(TOKENS)])
  weights = rng.random((TOKENS, RANKS)).astype(np.float32)
  routing = Routing(jnp.zeros((TOKENS, EXPERTS)), jnp.asarray(ids, jnp.int32), jnp.asarray(weights))
  return h, gate_up, down, routing


def plain(h, gate_up, down, expert):
  gate, up = np.split(h @ gate_up[expert], 2, axis=-1)
  return (gate / (1 + np.exp(-gate)) * up) @ down[expert]


def rank_outputs(h, gate_up, down, ids):
  return np.stack(
    [[plain(h[t], gate_up, down, e) for e in row] for t, row in enumerate(np.asarray(ids))]
  )


def test_all_at_once(case):
  h, gate_up, down, routing = case
  y, load = experts.run_all_at_once(h, routing, gate_up, down, TOKENS)
  outputs = rank_outputs(h, gate_up, down, routing.topk_ids)
  wanted = (outputs * np.asarray(routing.topk_weights)[:, :, None]).sum(1)
  np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
  np.testing.assert_array_equal(load, np.bincount(routing.topk_ids.ravel(), minlength=EXPERTS))


def test_capacity_drops_the_later_tokens(case):
  h, gate_up, down, routing = case
  y, _ = experts.run_all_at_once(h, routing, gate_up, down, 5)
  full, _ = experts.run_all_at_once(h, routing, gate_up, down, TOKENS)
  first = np.abs(np.asarray(y - full)).max(-1) < 1e-3  # a dropped entry is of the order of 1
  assert first[:5].all()
  assert not first.all()


@pytest.mark.parametrize("block_rows", [2, 8, 32])
def test_blocks_and_all_rows_give_the_outputs_of_each_rank(case, block_rows):
  h, gate_up, down, routing = case
  valid = np.arange(TOKENS) != 4
  ids = jnp.where(valid[:, None], routing.topk_ids, EXPERTS)
  wanted = rank_outputs(h, gate_up, down, routing.topk_ids) * valid[:, None, None]
  dispatch = experts.sort_by_expert(ids, valid, EXPERTS, block_rows)
  by_block = by_row = jnp.zeros((TOKENS, RANKS, DIM))
  for e in range(EXPERTS):

    def apply(x, e=e):
      return experts.expert_mlp(x, gate_up[e], down[e])

    by_block = experts.run_on_blocks(by_block, h, dispatch, block_rows, jnp.int32(e), apply)
    by_row = experts.run_on_all_rows(by_row, h, ids, jnp.int32(e), apply)
  np.testing.assert_allclose(by_block, wanted, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(by_row, wanted, rtol=1e-4, atol=1e-4)


def test_gradients_reach_chosen_experts_only(case):
  h, gate_up, down, routing = case
  grads = jax.grad(lambda w: experts.run_all_at_once(h, routing, w, down, TOKENS)[0].sum())(gate_up)
  per_expert = np.abs(np.asarray(grads)).sum((1, 2))
  assert (per_expert[:6] > 0).all()
  assert per_expert[6] == 0


@pytest.mark.parametrize("fmt", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_expert_bytes(fmt, has_bias):
  group = ExpertGroup((0,), 2, 1, embed_dim=16, expert_dim=6, has_bias=has_bias)
  rows = [(16 + has_bias, 2 * 6), (6 + has_bias, 16)]
  stored = [formats.pack(np.zeros(shape, np.float32), fmt) for shape in rows]
  assert experts.expert_bytes(group, fmt) == sum(array.nbytes for array in stored)


def test_activation_and_biases():
  rng = np.random.default_rng(3)
  x, gate_up, down = (rng.normal(size=s).astype(np.float32) for s in ((3, 4), (5, 12), (7, 4)))
  activation = ActivationSpec(alpha=1.702, up_shift=1.0, limit=0.7)
  gate, up = np.split(x @ gate_up[:4] + gate_up[4], 2, axis=-1)
  gate, up = np.minimum(gate, 0.7), np.clip(up, -0.7, 0.7)
  wanted = ((up + 1) * gate / (1 + np.exp(-1.702 * gate))) @ down[:6] + down[6]
  np.testing.assert_allclose(experts.expert_mlp(x, gate_up, down, activation), wanted, atol=1e-5)
