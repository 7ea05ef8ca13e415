"""The two heads that every layer of an untrained model starts with."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moecore_jax
from moecore_jax.config_loading import load_config
from moecore_jax.families import model_spec
from moecore_jax.models.transformer import Transformer
from moecore_jax.testing.tiny import tiny_spec
from moecore_jax.training import initialization

CONFIG = pathlib.Path(moecore_jax.__file__).parents[1] / "configs" / "demo_train.py"
NUM_TOKENS = 96


@pytest.fixture(scope="module")
def model():
  published = {**load_config(str(CONFIG)).model.published_config, "num_hidden_layers": 2}
  rngs = nnx.Rngs(0)
  model = Transformer(model_spec(published), rngs=rngs)
  initialization.prepare_copying(model, rngs)
  return model


@pytest.fixture(scope="module")
def tokens():
  """Two different orders of the same 48 tokens: int32 [1, 96]."""
  rng = np.random.default_rng(0)
  chosen = rng.choice(1024, NUM_TOKENS // 2, replace=False)
  return jnp.asarray(np.concatenate([chosen, rng.permutation(chosen)])[None], jnp.int32)


@pytest.fixture(scope="module", params=[0, 1])
def weights(model, tokens, request):
  """Attention weights of a layer on the embedded tokens: [H, T, T]."""
  layer = model.layers[request.param]
  x = layer.attention_norm(model.embed(tokens))
  positions = jnp.arange(NUM_TOKENS, dtype=jnp.int32)[None]
  queries = layer.attention.queries(x, positions)[0]
  scores = jnp.einsum("qhd,kd->hqk", queries, layer.attention.latents(x, positions)[0])
  causal = jnp.tril(jnp.ones((NUM_TOKENS, NUM_TOKENS), bool))
  return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)


def test_the_first_head_finds_the_same_token(weights, tokens):
  occurs = np.asarray(tokens[0])
  same = (occurs[:, None] == occurs[None]) & ~np.eye(NUM_TOKENS, dtype=bool)
  second = np.arange(NUM_TOKENS // 2, NUM_TOKENS)
  others = np.where(np.eye(NUM_TOKENS, dtype=bool), 0, weights[0])[second]
  assert (others.argmax(-1) == same[second].argmax(-1)).mean() > 0.95
  assert np.where(same[second], weights[0][second], 0).sum(-1).mean() > 5 / NUM_TOKENS


def test_the_last_head_finds_the_previous_position(weights):
  found = np.asarray(weights[-1]).argmax(-1)
  np.testing.assert_array_equal(found[1:], np.arange(NUM_TOKENS - 1))
  assert np.diagonal(weights[-1], -1).mean() > 0.5


def test_compressed_queries_are_left_as_they_are():
  rngs = nnx.Rngs(0)
  model = Transformer(tiny_spec(q_lora_rank=8), rngs=rngs)
  before = jax.tree.map(jnp.copy, nnx.state(model.layers, nnx.Param))
  initialization.prepare_copying(model, rngs)
  jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model.layers, nnx.Param))
