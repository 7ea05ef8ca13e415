"""The training step, resuming, and the export that our own loader reads back."""

import functools
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from moecore_jax import families
from moecore_jax.config import ModelConfig, RunConfig, TrainConfig
from moecore_jax.testing.published import load_module
from moecore_jax.training import export, heldout, objective, trainer
from moecore_jax.training.batches import READ_WEIGHT, make_batch
from moecore_jax.training.tokenizer import EOS_ID, PAD_ID

pytestmark = pytest.mark.cover

PUBLISHED = {
  "model_type": "deepseek_v3",
  "vocab_size": 1024,
  "hidden_size": 32,
  "num_hidden_layers": 2,
  "num_nextn_predict_layers": 1,
  "first_k_dense_replace": 1,
  "intermediate_size": 48,
  "moe_intermediate_size": 16,
  "n_routed_experts": 8,
  "n_shared_experts": 1,
  "num_experts_per_tok": 2,
  "num_attention_heads": 2,
  "q_lora_rank": None,
  "kv_lora_rank": 16,
  "qk_nope_head_dim": 8,
  "qk_rope_head_dim": 8,
  "v_head_dim": 8,
  "eos_token_id": 1,
}
SPEC = families.model_spec(PUBLISHED)
TRAIN = TrainConfig(num_steps=6, batch_rows=2, checkpoint_every=2, warmup_steps=2)


@pytest.fixture(autouse=True)
def _optax_promotes_dtypes():
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(scope="module")
def words(tmp_path_factory):
  return trainer._tokenizer(tmp_path_factory.mktemp("words"), 0)


@pytest.fixture
def config(words, monkeypatch):
  """A run of six steps; the tokenizer is already trained, and runs share their programs."""
  for module, name in ((objective, "make_step"), (heldout, "make_evaluate")):
    monkeypatch.setattr(module, name, functools.partial(_once, {}, getattr(module, name)))
  monkeypatch.setattr(trainer.tokenizer, "train", lambda seed: words)
  monkeypatch.setattr(trainer, "NUM_VALIDATION", 4)
  return RunConfig(model=ModelConfig(published_config=PUBLISHED), train=TRAIN)


def _once(made, make, *args):
  if not made:
    made[0] = make(*args)
  return made[0]


def _weights(folder):
  return safetensors.numpy.load_file(folder / "export" / "model.safetensors")


def _state(seed=0, train=TRAIN):
  graphdef, params, biases = objective.create(SPEC, seed)
  optimizer = objective.make_optimizer(train)
  zero = jnp.zeros((), jnp.int32)
  state = objective.TrainState(params, biases, optimizer.init(params), zero)
  return graphdef, optimizer, state


def test_batches_hold_whole_documents(words):
  batch = make_batch(words, 0, 5, 4, 128)
  assert batch.tokens.shape == batch.weights.shape == (4, 128)
  assert (batch.tokens != PAD_ID).mean() > 0.9
  assert set(np.unique(batch.weights)) == {0.0, np.float32(READ_WEIGHT), 1.0}
  np.testing.assert_array_equal(batch.weights == 0, batch.tokens == PAD_ID)
  for row in batch.tokens:
    used = row[row != PAD_ID]
    assert used[-1] == EOS_ID
    text = words.decode(used.tolist())
    assert text.startswith(("Problem: ", "Question: ", "Atlas: ", "Options: ", "def ", "user: "))
  again, other = make_batch(words, 0, 5, 4, 128), make_batch(words, 0, 6, 4, 128)
  np.testing.assert_array_equal(batch.tokens, again.tokens)
  assert (batch.tokens != other.tokens).any()


def test_a_batch_is_learnt_and_biases_follow_loads(words):
  train = TrainConfig(num_steps=40, batch_rows=1, warmup_steps=2, learning_rate=1e-2)
  graphdef, optimizer, state = _state(train=train)
  step = objective.make_step(graphdef, optimizer, train)
  batch = make_batch(words, 0, 0, 1, 128)
  losses, mtp_losses = [], []
  for _ in range(40):
    state, metrics = step(state, batch)
    losses.append(float(metrics.loss))
    mtp_losses.append(float(metrics.mtp_loss))
  assert losses[-1] < 0.5 * losses[0]
  assert mtp_losses[-1] < 0.5 * mtp_losses[0]
  for bias in jax.tree.leaves(state.biases):
    steps = np.abs(np.asarray(bias)) / train.balance_rate
    np.testing.assert_allclose(steps, steps.round(), atol=1e-2)
    assert steps.max() > 0


def test_the_schedule_warms_up_and_ends_at_a_hundredth():
  train = TrainConfig(num_steps=400, warmup_steps=10, learning_rate=1.0)
  schedule = objective.make_schedule(train)
  rates = [float(schedule(step)) for step in (0, 10, 205, 400)]
  np.testing.assert_allclose(rates, [0, 1, 0.505, 0.01], atol=1e-6)


def test_balance_moves_towards_the_mean():
  _, _, biases = objective.create(SPEC, 0)
  loads = [jnp.asarray([4, 4, 4, 4, 9, 0, 4, 3], jnp.int32)] * 2
  moved = objective.balance(biases, loads, 0.5)
  for bias in jax.tree.leaves(moved):
    np.testing.assert_array_equal(bias, [0, 0, 0, 0, -0.5, 0.5, 0, 0.5])


def test_the_selection_bias_has_no_gradient_and_does_not_weigh():
  graphdef, params, biases = objective.create(SPEC, 0)
  tokens = jnp.arange(16, dtype=jnp.int32)[None]
  lifted = jax.tree.map(lambda b: b + 3.0, biases)
  logits = jax.jit(lambda b: nnx.merge(graphdef, params, b)(tokens).logits)
  np.testing.assert_allclose(logits(biases), logits(lifted), atol=1e-5)


def test_mtp_loss_looks_two_tokens_ahead(words):
  """The MTP loss of a model is that of its own draft logits, position by position."""
  graphdef, params, biases = objective.create(SPEC, 0)
  batch = make_batch(words, 0, 0, 2, 128)

  @jax.jit
  def run(tokens):
    model = nnx.merge(graphdef, params, biases)
    _, (_, mtp_loss, loads) = objective.loss_fn(model, batch, 0.2, 100.0)
    positions = jnp.broadcast_to(jnp.arange(127, dtype=jnp.int32), (2, 127))
    draft = model.draft(0, model(tokens).hidden[:, :-1], tokens[:, 1:], positions)
    return mtp_loss, loads, jax.nn.log_softmax(draft.logits)

  mtp_loss, loads, logp = run(batch.tokens)
  logp = np.asarray(logp)
  wanted = -np.take_along_axis(logp[:, :-1], batch.tokens[:, 2:, None], -1)[..., 0]
  expected = (wanted * batch.weights[:, 2:]).sum() / batch.weights[:, 1:].sum()
  np.testing.assert_allclose(mtp_loss, expected, rtol=1e-5)
  assert [int(load.sum()) for load in loads] == [2 * 128 * 2] * 2


def test_an_interrupted_run_ends_as_an_uninterrupted_one(config, tmp_path, monkeypatch):
  last = trainer.run(config, tmp_path / "whole")
  made = trainer.make_batch

  def interrupted(words, seed, step, *shape):
    if step == 3:
      raise KeyboardInterrupt
    return made(words, seed, step, *shape)

  monkeypatch.setattr(trainer, "make_batch", interrupted)
  with pytest.raises(KeyboardInterrupt):
    trainer.run(config, tmp_path / "cut")
  assert not (tmp_path / "cut" / "export").exists()
  monkeypatch.setattr(trainer, "make_batch", made)
  assert trainer.run(config, tmp_path / "cut")["loss"] == last["loss"]
  whole, cut = _weights(tmp_path / "whole"), _weights(tmp_path / "cut")
  assert whole.keys() == cut.keys()
  for key, value in whole.items():
    np.testing.assert_array_equal(value, cut[key], err_msg=key)
  rows = [json.loads(line) for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
  assert [row["step"] for row in rows] == [2, 4, 6]
  assert rows[-1]["tokens"] == 6 * 2 * 128
  assert {path.name for path in (tmp_path / "cut" / "export").iterdir()} == {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "workloads",
  }


def test_a_workdir_belongs_to_one_run(config, tmp_path):
  trainer._check_asked(tmp_path, {"seed": 0})
  with pytest.raises(ValueError, match="belongs to another training run"):
    trainer.run(config, tmp_path)


@pytest.mark.parametrize(
  ("published", "message"),
  [({}, "published_config is empty"), ({**PUBLISHED, "vocab_size": 512}, "vocab_size is 512")],
)
def test_wrong_models_are_refused_before_anything_is_written(tmp_path, published, message):
  config = RunConfig(model=ModelConfig(published_config=published), train=TRAIN)
  with pytest.raises(ValueError, match=message):
    trainer.run(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_export_reads_back_as_the_trained_model(words, tmp_path):
  graphdef, params, biases = objective.create(SPEC, 3)
  keys = iter(jax.random.split(jax.random.key(0), 2))
  biases = jax.tree.map(lambda b: jax.random.normal(next(keys), b.shape) * 0.1, biases)
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params)
  export.write(tmp_path, PUBLISHED, SPEC, params, biases, words)
  loaded, trained = load_module(tmp_path), nnx.merge(graphdef, params, biases)
  tokens = jnp.arange(40, dtype=jnp.int32)[None]
  routers = [layer.mlp.router for layer in trained.layers if layer.is_moe]
  for ours, theirs in zip(routers, [x.mlp.router for x in loaded.layers if x.is_moe], strict=True):
    np.testing.assert_array_equal(ours.bias[...], theirs.bias[...])

  @jax.jit
  def run(model):
    out = model(tokens)
    return out.logits, model.draft(0, out.hidden, tokens, jnp.arange(40, dtype=jnp.int32)[None])

  for mine, theirs in zip(jax.tree.leaves(run(trained)), jax.tree.leaves(run(loaded)), strict=True):
    np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_overlap_of_top_quarters():
  a = np.zeros((2, 8), np.int32)
  a[:, :2] = 5
  b = np.roll(a, 1, axis=1)
  c = np.roll(a, 4, axis=1)
  overlap = heldout.top_quarter_overlap({"a": a, "b": b, "c": c, "d": a})
  assert overlap == {"a-b": 0.5, "a-c": 0.0, "a-d": 1.0, "b-c": 0.0, "b-d": 0.5, "c-d": 0.0}


def test_exact_match_counts_targets_alone(words):
  """The rate is that of rows whose targets the model predicts one and all."""
  graphdef, params, biases = objective.create(SPEC, 0)
  domain = heldout.load(words, 4)["math"]
  forward = jax.jit(lambda tokens: nnx.merge(graphdef, params, biases)(tokens).logits)
  likeliest = np.asarray(jnp.argmax(forward(domain.tokens), -1))
  none = heldout.make_evaluate(graphdef, {"math": domain})(params, biases)[0]
  assert none == {"math": 0.0}
  is_target = np.zeros_like(domain.is_target)
  is_target[:, 1:] = likeliest[:, :-1] == domain.tokens[:, 1:]
  all_right = {"math": domain._replace(is_target=is_target)}
  rates, counts = heldout.make_evaluate(graphdef, all_right)(params, biases)
  assert rates == {"math": 1.0}
  assert counts["math"].shape == (1, 8)
  assert (counts["math"].sum(1) == 2 * (domain.tokens != PAD_ID).sum()).all()


@pytest.mark.slow
def test_kill_9_and_the_same_command_again(tmp_path):
  command = [
    *(sys.executable, "-m", "moecore_jax.cli.main", "train", "--config=configs/demo_train.py"),
    *(f"--workdir={tmp_path / 'run'}", "--config.train.num_steps=3"),
    *("--config.train.batch_rows=1", "--config.train.checkpoint_every=1"),
  ]
  log = tmp_path / "run" / "log.jsonl"
  process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"})
  while not (log.exists() and log.read_text()):
    assert process.poll() is None
    time.sleep(0.05)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}).returncode == 0
  assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3]
