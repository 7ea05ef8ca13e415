"""The whole-sequence forward pass against reference activations of a random checkpoint."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax.testing.published import load_module

FOLDER = pathlib.Path(__file__).parents[1] / "oracles" / "deepseek_v3"
ATOL = 1e-4


@pytest.fixture(scope="module")
def oracle():
  return np.load(FOLDER / "oracle.npz")


@pytest.fixture(scope="module")
def model():
  return load_module(FOLDER)


def test_logits_routes_and_weights(model, oracle):
  tokens = oracle["input_ids"]
  out = jax.jit(lambda t: model(t))(tokens)
  np.testing.assert_allclose(out.logits, oracle["logits"], atol=ATOL, rtol=0)
  for layer, routing in zip(model.spec.moe_layers, out.routings, strict=True):
    order = np.argsort(routing.topk_ids, axis=-1)
    shape = (*tokens.shape, -1)
    ids = np.take_along_axis(np.asarray(routing.topk_ids), order, -1).reshape(shape)
    weights = np.take_along_axis(np.asarray(routing.topk_weights), order, -1).reshape(shape)
    np.testing.assert_array_equal(ids, oracle[f"layer{layer}_topk_idx"])
    np.testing.assert_allclose(weights, oracle[f"layer{layer}_topk_w"], atol=ATOL, rtol=0)


def test_capacity_of_the_mean_drops_entries(model, oracle):
  full = jax.jit(lambda t: model(t))(oracle["input_ids"])
  tight = jax.jit(lambda t: model(t, capacity_factor=0.5))(oracle["input_ids"])
  assert np.abs(full.logits - tight.logits).max() > 1e-2


def test_mtp_chain(model, oracle):
  tokens = oracle["input_ids"][:1]
  length = tokens.shape[1]
  out = jax.jit(lambda t: model(t))(tokens)
  hidden = out.hidden
  np.testing.assert_allclose(hidden, oracle["mtp_hidden_in"], atol=ATOL, rtol=0)
  tokens = np.concatenate([tokens, np.argmax(out.logits[:, -1:], -1)], axis=1)
  for depth in range(len(model.mtp)):
    following = jnp.asarray(tokens[:, depth + 1 : depth + 1 + length], jnp.int32)
    positions = jnp.arange(length, dtype=jnp.int32)[None] + depth
    out = jax.jit(model.draft, static_argnums=0)(depth, hidden, following, positions)
    hidden = out.hidden
    np.testing.assert_allclose(hidden, oracle[f"mtp_hidden_d{depth + 1}"], atol=ATOL, rtol=0)
    np.testing.assert_allclose(out.logits[:, -1], oracle["mtp_logits"][:, depth], atol=ATOL, rtol=0)
    tokens = np.concatenate([tokens, np.argmax(out.logits[:, -1:], -1)], axis=1)
  np.testing.assert_array_equal(tokens[0, -len(model.mtp) :], oracle["mtp_tokens"][0])
