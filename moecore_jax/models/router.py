"""The router: selection scores, the chosen experts and their mixing weights."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moecore_jax.specs import RouterSpec


class Routing(NamedTuple):
  """What a router says of T tokens.

  Attributes:
    selection_scores: float32 [T, N], the numbers whose top-k decides; -inf where group-limited
      routing masks an expert. Where a table decides: 1 for its choice, 0 for the others.
    topk_ids: int32 [T, A], chosen experts by falling selection score.
    topk_weights: float32 [T, A], mixing weights; they carry no selection bias.
  """

  selection_scores: jax.Array
  topk_ids: jax.Array
  topk_weights: jax.Array


class SelectionBias(nnx.Variable):
  """Per-expert bias of the selection scores; balanced by the trainer, never by a gradient."""


class HashTable(nnx.Variable):
  """The experts of each token id, int32 [A, V]; published with the weights, never trained."""


class Router(nnx.Module):
  """A linear router, in float32. Its `bias` is a SelectionBias or a Param of the logits, as the
  spec says.

  Source: DeepSeek-V3 (2024), sections 2.1.2 and 2.1.3.
  """

  def __init__(self, spec: RouterSpec, embed_dim: int, vocab_size: int, rngs: nnx.Rngs):
    self.spec = spec
    init = nnx.initializers.lecun_normal()
    self.kernel = nnx.Param(init(rngs.params(), (embed_dim, spec.num_experts), jnp.float32))
    if spec.bias != "none":
      kind = SelectionBias if spec.bias == "selection" else nnx.Param
      self.bias = kind(jnp.zeros((spec.num_experts,), jnp.float32))
    if spec.is_hash:
      shape = (vocab_size, spec.num_experts_per_tok)
      rows = jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)
      self.table = HashTable(rows.T % spec.num_experts)

  def __call__(self, h: jax.Array, token_ids: jax.Array) -> Routing:
    """Routes tokens.

    Args:
      h: [T, D], the normed stream.
      token_ids: int32 [T], the tokens; hash routing goes by them.

    Returns:
      Routing of the T tokens.
    """
    spec = self.spec
    logits = jnp.matmul(h.astype(jnp.float32), self.kernel[...], precision=lax.Precision.HIGHEST)
    if spec.bias == "logits":
      logits = logits + self.bias[...][None, :]
    scores = selection = _SCORES[spec.scoring](logits)
    if spec.bias == "selection":
      selection = scores + self.bias[...][None, :]
    if spec.num_groups > 1:
      selection = _keep_best_groups(selection, spec)
    if spec.is_hash:
      # Single numbers, not columns: for those, XLA for TPU pads the table to 128 lanes a token.
      columns = jnp.arange(spec.num_experts_per_tok) * self.table.shape[1]
      places = columns[None, :] + token_ids[:, None]
      topk_ids = jnp.take(self.table[...].reshape(-1), places, mode="clip")
      selection = jax.nn.one_hot(topk_ids, spec.num_experts, dtype=jnp.float32).max(1)
    else:
      _, topk_ids = lax.top_k(selection, spec.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, topk_ids, axis=-1)
    if spec.scoring == "softmax_topk":
      weights = jax.nn.softmax(weights, axis=-1)
    elif spec.norm_topk:
      weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(selection, topk_ids, weights * spec.scale)


_SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
  "sigmoid": jax.nn.sigmoid,
  "softmax": jax.nn.softmax,
  "softmax_topk": lambda logits: logits,
  "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}


def _keep_best_groups(selection: jax.Array, spec: RouterSpec) -> jax.Array:
  """Masks with -inf all but the best `topk_groups` groups."""
  tokens = selection.shape[0]
  grouped = selection.reshape(tokens, spec.num_groups, -1)
  largest = 2 if spec.group_score == "top2" else 1
  worth = lax.top_k(grouped, largest)[0].sum(-1)  # [T, G]
  _, best = lax.top_k(worth, spec.topk_groups)
  kept = jnp.any(best[:, :, None] == jnp.arange(spec.num_groups)[None, None, :], axis=1)
  return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(selection.shape)
