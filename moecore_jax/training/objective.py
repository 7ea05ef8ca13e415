"""The training loss, the balancing of selection biases, and one optimiser step."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from moecore_jax.config import TrainConfig
from moecore_jax.models.router import SelectionBias
from moecore_jax.models.transformer import Transformer
from moecore_jax.specs import ModelSpec
from moecore_jax.training import initialization
from moecore_jax.training.batches import Batch


class TrainState(NamedTuple):
  """Everything that a step changes.

  Attributes:
    params: nnx state of the trained parameters, float32.
    biases: nnx state of the routers' selection biases.
    opt_state: of the optimiser.
    step: int32 [], steps done.
  """

  params: nnx.State
  biases: nnx.State
  opt_state: Any
  step: jax.Array


class StepMetrics(NamedTuple):
  """Figures of one step, all float32 [].

  Attributes:
    loss: mean weighted cross-entropy of the next token, nats.
    mtp_loss: the same for the token after it, by the MTP layer; 0 without one.
    max_load: largest load of an expert over the mean load, averaged over layers.
    grad_norm: before clipping.
  """

  loss: jax.Array
  mtp_loss: jax.Array
  max_load: jax.Array
  grad_norm: jax.Array


def create(spec: ModelSpec, seed: int) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
  """Returns (graph definition, parameters, selection biases) of an untrained model."""
  rngs = nnx.Rngs(seed)
  model = Transformer(spec, rngs=rngs)
  initialization.prepare_copying(model, rngs)
  graphdef, params, biases = nnx.split(model, nnx.Param, SelectionBias)
  return graphdef, params, biases


def make_schedule(train: TrainConfig) -> optax.Schedule:
  """Linear warm-up and a cosine to a hundredth of the peak."""
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=train.learning_rate,
    warmup_steps=train.warmup_steps,
    decay_steps=max(train.num_steps, train.warmup_steps + 1),
    end_value=train.learning_rate / 100,
  )


def make_optimizer(train: TrainConfig) -> optax.GradientTransformation:
  """AdamW with clipping, on `make_schedule`."""
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
      make_schedule(train),
      b1=0.9,
      b2=0.95,
      weight_decay=train.weight_decay,
      mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
  )


def loss_fn(
  model: Transformer, batch: Batch, mtp_weight: float, capacity_factor: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, list[jax.Array]]]:
  """Weighted cross-entropy of a batch.

  Args:
    model: a Transformer.
    batch: packed rows.
    mtp_weight: weight of the MTP layers' loss, averaged over them.
    capacity_factor: tokens that an expert takes, as a multiple of the mean.

  Returns:
    The loss, and (next-token loss, MTP loss, loads: int32 [N] of each MoE layer, then of each MTP
    layer).
  """
  tokens, weights = jnp.asarray(batch.tokens), jnp.asarray(batch.weights)
  out = model(tokens, capacity_factor)
  total = weights[:, 1:].sum()
  loss = _cross_entropy(out.logits, tokens, weights, 1) / total
  loads, mtp_loss = list(out.loads), jnp.zeros((), jnp.float32)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  hidden = out.hidden
  for depth in range(len(model.mtp)):
    following = jnp.roll(tokens, -1 - depth, axis=1)
    draft = model.draft(depth, hidden, following, positions + depth, capacity_factor)
    hidden = draft.hidden
    mtp_loss += _cross_entropy(draft.logits, tokens, weights, 2 + depth) / total / len(model.mtp)
    loads += draft.loads
  return loss + mtp_weight * mtp_loss, (loss, mtp_loss, loads)


def _cross_entropy(
  logits: jax.Array, tokens: jax.Array, weights: jax.Array, ahead: int
) -> jax.Array:
  """Sum of weighted losses where position t predicts the token at t + ahead."""
  losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-ahead], tokens[:, ahead:])
  return (losses * weights[:, ahead:]).sum()


def balance(biases: nnx.State, loads: list[jax.Array], rate: float) -> nnx.State:
  """Moves each selection bias by `rate` towards equal loads.

  Args:
    biases: float32 [N] leaves in the order of `loads`.
    loads: int32 [N] of each router.
    rate: step of the bias.

  Source: DeepSeek-V3 (2024), section 2.1.2, auxiliary-loss-free load balancing.
  """
  leaves, structure = jax.tree.flatten(biases)
  moved = [
    bias + rate * jnp.sign(load.mean() - load.astype(jnp.float32))
    for bias, load in zip(leaves, loads, strict=True)
  ]
  return jax.tree.unflatten(structure, moved)


def make_step(
  graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation, train: TrainConfig
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
  """Returns the jitted step (state, batch) -> (state, metrics); the state is donated."""

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    def loss_of(params):
      model = nnx.merge(graphdef, params, state.biases)
      return loss_fn(model, batch, train.mtp_weight, train.capacity_factor)

    (_, (loss, mtp_loss, loads)), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    max_load = jnp.stack([load.max().astype(jnp.float32) / load.mean() for load in loads]).mean()
    return (
      TrainState(
        cast(nnx.State, optax.apply_updates(state.params, updates)),
        balance(state.biases, loads, train.balance_rate),
        opt_state,
        state.step + 1,
      ),
      StepMetrics(loss, mtp_loss, max_load, optax.tree.norm(grads)),
    )

  return jax.jit(step, donate_argnums=0)
