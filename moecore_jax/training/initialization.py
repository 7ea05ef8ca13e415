"""Initial weights that let a small model copy from its context after a short training run.

Finding an option's letter takes two attention heads in a row: one that brings each token what
stands before it, and one that finds where the present token occurred. From random weights a small
model stays without either for thousands of steps. Here every layer starts with one head of each
kind; all weights are then trained as usual.

Source: of the idea, Trockman and Kolter, Mimetic Initialization of Self-Attention Layers (2023).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moecore_jax.models.attention.mla import MLAttention
from moecore_jax.models.layers import rope_frequencies
from moecore_jax.models.transformer import Transformer

_NUM_PAIRS = 3  # of rotary components, the fastest, that tell a token from its neighbours
_PAIR_LOGIT = 4.0  # of each at the previous token


def prepare_copying(model: Transformer, rngs: nnx.Rngs) -> None:
  """Changes an untrained model's embedding and decoder layers in place.

  The embedding [V, D] gets unit variance, so that early layers do not drown it, and one constant
  direction shared by all tokens, by which a head can attend to a position whatever it holds. In
  each layer of latent attention with direct queries (no q_lora_rank) the first head looks for the
  same token, the last for the previous position. Layers of another kind are left as they are.

  Args:
    model: a Transformer whose weights are float32.
    rngs: its stream `params` is drawn from.
  """
  dim = model.embed.embedding.shape[1]
  direction = jax.random.rademacher(rngs.params(), (dim,), jnp.float32)
  table = model.embed.embedding[...]
  model.embed.embedding[...] = table / table.std() + direction[None]
  for layer in model.layers:
    attention = layer.attention
    if isinstance(attention, MLAttention) and attention.spec.q_lora_rank is None:
      _prepare_heads(attention, direction / dim**0.5, rngs)


def _prepare_heads(attention: MLAttention, direction: jax.Array, rngs: nnx.Rngs) -> None:
  """Sets the first and the last head; `direction` [D] has length 1."""
  spec, dim = attention.spec, direction.shape[0]
  constant = (dim / 2) ** 0.5  # of a normed token along the direction, which has half its power
  frequencies = rope_frequencies(spec.rope)[0][:_NUM_PAIRS]
  size = (_PAIR_LOGIT / attention.scale) ** 0.5
  unit = jnp.stack([jnp.ones_like(frequencies), jnp.zeros_like(frequencies)], -1)
  turned = jnp.stack([jnp.cos(frequencies), -jnp.sin(frequencies)], -1)
  pad = (0, spec.qk_rope_head_dim - 2 * len(frequencies))
  here, before = (jnp.pad(size / constant * pairs.reshape(-1), pad) for pairs in (unit, turned))

  down = attention.kv_a_proj.kernel[...][:, : spec.kv_lora_rank]
  down -= jnp.outer(direction, direction @ down)
  attention.kv_a_proj.kernel[...] = jnp.concatenate([down, jnp.outer(direction, here)], axis=1)

  shape = (spec.qk_nope_head_dim, spec.kv_lora_rank)
  basis = jax.random.orthogonal(rngs.params(), max(shape))[: shape[0], : shape[1]]
  keys = attention.k_up_proj[...].at[0].set(basis)
  queries = attention.q_proj.kernel[...].reshape(dim, spec.num_heads, -1)
  queries = queries.at[:, 0].set(jnp.pad(down @ basis.T, ((0, 0), (0, spec.qk_rope_head_dim))))
  queries = queries.at[:, -1].set(
    jnp.pad(jnp.outer(direction, before), ((0, 0), (spec.qk_nope_head_dim, 0)))
  )
  attention.k_up_proj[...] = keys
  attention.q_proj.kernel[...] = queries.reshape(dim, -1)
