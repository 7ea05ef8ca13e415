"""The decoder: layers, expert banks and head as one nnx tree, and its whole-sequence forward pass.

The tree defines parameters and layer mathematics only. Inference splits it, `nnx.split(model,
HostExpert, ...)`, passes plain pytrees through jit, and merges inside the trace; see
moecore_jax.runtime.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moecore_jax.models import hyper
from moecore_jax.models.attention.compressed import CompressedAttention
from moecore_jax.models.attention.gqa import GQAttention
from moecore_jax.models.attention.mla import MLAttention
from moecore_jax.models.experts import RoutedExperts, run_all_at_once
from moecore_jax.models.layers import GatedMLP, linear, rms_norm
from moecore_jax.models.router import Router, Routing
from moecore_jax.specs import (
  AttentionSpec,
  CompressedSpec,
  DenseSpec,
  ExpertFormat,
  LayerSpec,
  MLASpec,
  ModelSpec,
  MoESpec,
)


class MoEBlock(nnx.Module):
  """Router and shared expert of one layer; the routed experts belong to the group's
  RoutedExperts.
  """

  def __init__(self, spec: MoESpec, model: ModelSpec, dtype: jnp.dtype, rngs: nnx.Rngs):
    dim = model.embed_dim
    self.router = Router(spec.router, dim, model.vocab_size, rngs)
    self.shared = (
      GatedMLP(dim, spec.shared_dim, model.activation, dtype, rngs) if spec.shared_dim else None
    )
    self.shared_gate = linear(dim, 1, dtype, rngs) if spec.has_shared_gate else None

  def add_shared(self, routed: jax.Array, h: jax.Array) -> jax.Array:
    """Returns routed [T, D] plus the shared expert's output for h [T, D]."""
    if self.shared is None:
      return routed
    shared = self.shared(h)
    if self.shared_gate is not None:
      shared = jax.nn.sigmoid(self.shared_gate(h)) * shared
    return routed + shared


Attention = MLAttention | GQAttention | CompressedAttention


def make_attention(
  spec: AttentionSpec, model: ModelSpec, dtype: jnp.dtype, rngs: nnx.Rngs
) -> Attention:
  """Returns the attention of one layer."""
  if isinstance(spec, MLASpec):
    return MLAttention(spec, model.embed_dim, dtype, rngs)
  if isinstance(spec, CompressedSpec):
    return CompressedAttention(spec, model.embed_dim, model.rms_norm_eps, dtype, rngs)
  return GQAttention(spec, model.embed_dim, model.rms_norm_eps, dtype, rngs)


class DecoderLayer(nnx.Module):
  """Pre-norm attention and a dense or mixture-of-experts block.

  The stream is [B, T, D], or with hyper-connections [B, T, n, D].
  """

  def __init__(self, spec: LayerSpec, model: ModelSpec, dtype: jnp.dtype, rngs: nnx.Rngs):
    dim, eps = model.embed_dim, model.rms_norm_eps
    self.residual_multiplier = model.residual_multiplier
    self.attention_norm = rms_norm(dim, eps, dtype, rngs)
    self.attention = make_attention(spec.attention, model, dtype, rngs)
    self.mlp_norm = rms_norm(dim, eps, dtype, rngs)
    if isinstance(spec.mlp, DenseSpec):
      self.mlp: GatedMLP | MoEBlock = GatedMLP(
        dim, spec.mlp.hidden_dim, model.activation, dtype, rngs
      )
    else:
      self.mlp = MoEBlock(spec.mlp, model, dtype, rngs)

    self.attention_hyper = self.mlp_hyper = None
    if model.hyper is not None:
      for name in ("attention_hyper", "mlp_hyper"):
        setattr(self, name, nnx.data(hyper.HyperConnection(model.hyper, dim, eps, rngs)))

  def attention_input(self, x: jax.Array) -> tuple[jax.Array, hyper.Mix | None]:
    """Returns the normed input of the attention, [B, T, D], and what `add` needs of the stream."""
    x, mix = (x, None) if self.attention_hyper is None else self.attention_hyper(x)
    return self.attention_norm(x), mix

  def mlp_input(self, x: jax.Array) -> tuple[jax.Array, hyper.Mix | None]:
    """Returns the same of the dense or mixture-of-experts block."""
    x, mix = (x, None) if self.mlp_hyper is None else self.mlp_hyper(x)
    return self.mlp_norm(x), mix

  def add(self, x: jax.Array, y: jax.Array, mix: hyper.Mix | None = None) -> jax.Array:
    """Returns the stream after a block that gave y [B, T, D] for the stream x."""
    if mix is not None:
      return hyper.add(x, y, mix)
    return x + (y if self.residual_multiplier == 1 else y * self.residual_multiplier)

  @property
  def is_moe(self) -> bool:
    return isinstance(self.mlp, MoEBlock)


class ForwardOut(NamedTuple):
  """Results of a whole-sequence pass.

  Attributes:
    logits: float32 [B, T, V].
    hidden: what an MTP layer goes on from: [B, T, D], the stream after the final norm, or with
      hyper-connections [B, T, n, D], the streams before they are summed.
    routings: one Routing of B * T tokens for each MoE layer.
    loads: int32 [N] for each MoE layer, tokens that chose each expert.
    picks: for each layer the keys or entries that its sparse attention read, int32 [B, T, topk],
      None where attention is dense.
  """

  logits: jax.Array
  hidden: jax.Array
  routings: tuple[Routing, ...]
  loads: tuple[jax.Array, ...]
  picks: tuple[jax.Array | None, ...] = ()


class MTPLayer(nnx.Module):
  """One multi-token-prediction depth: merges the stream with the next token's embedding and runs a
  decoder layer.

  With hyper-connections the embedding enters each stream, and the layer's streams are summed for
  the head by weights of its own.

  Source: DeepSeek-V3 (2024), section 2.2; with hyper-connections, DeepSeek-V4 (2026).
  """

  def __init__(self, spec: LayerSpec, model: ModelSpec, dtype: jnp.dtype, rngs: nnx.Rngs):
    embed_dim, eps = model.embed_dim, model.rms_norm_eps
    self.embed_norm = rms_norm(embed_dim, eps, dtype, rngs)
    self.hidden_norm = rms_norm(embed_dim, eps, dtype, rngs)
    self.hyper_head = None
    if model.hyper is None:
      self.merge_proj = linear(2 * embed_dim, embed_dim, dtype, rngs)
    else:
      self.embed_proj = linear(embed_dim, embed_dim, dtype, rngs)
      self.hidden_proj = linear(embed_dim, embed_dim, dtype, rngs)
      self.hyper_head = nnx.data(hyper.HyperHead(model.hyper, embed_dim, eps, rngs))
    self.block = DecoderLayer(spec, model, dtype, rngs)
    self.final_norm = rms_norm(embed_dim, eps, dtype, rngs)

  def merge(self, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
    """Returns the block's stream from next-token embeddings [B, T, D] and the hidden states below.

    Those are as in ForwardOut, and the stream is of their shape.
    """
    embedded, hidden = self.embed_norm(embedded), self.hidden_norm(hidden)
    if self.hyper_head is not None:
      return self.embed_proj(embedded)[:, :, None] + self.hidden_proj(hidden)
    return self.merge_proj(jnp.concatenate([embedded, hidden], axis=-1))


class Transformer(nnx.Module):
  """A decoder-only MoE language model.

  Args:
    spec: shapes.
    dtype: activations and dense parameters; router parameters are float32 always.
    expert_format: storage of the routed experts.
    rngs: initialises parameters.
  """

  def __init__(
    self,
    spec: ModelSpec,
    *,
    dtype: jnp.dtype = jnp.float32,
    expert_format: ExpertFormat = "float32",
    rngs: nnx.Rngs,
  ):
    self.spec, self.dtype = spec, dtype
    dim, eps = spec.embed_dim, spec.rms_norm_eps
    self.embed = nnx.Embed(spec.vocab_size, dim, dtype=dtype, param_dtype=dtype, rngs=rngs)
    self.layers = nnx.List([DecoderLayer(layer, spec, dtype, rngs) for layer in spec.layers])
    self.experts = nnx.List(
      [RoutedExperts(g, expert_format, dtype, rngs) for g in spec.expert_groups]
    )
    self.hyper_head = hyper.HyperHead(spec.hyper, dim, eps, rngs) if spec.hyper else None
    self.norm = rms_norm(dim, eps, dtype, rngs)
    self.lm_head = None if spec.tie_embeddings else linear(dim, spec.vocab_size, dtype, rngs)
    self.mtp = nnx.List([MTPLayer(layer, spec, dtype, rngs) for layer in spec.mtp_layers])
    self.mtp_experts = nnx.List(
      [RoutedExperts(g, expert_format, dtype, rngs) for g in spec.mtp_expert_groups]
    )

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Maps final-norm hidden states [..., D] to float32 logits [..., V]."""
    logits = self.embed.attend(hidden) if self.lm_head is None else self.lm_head(hidden)
    return logits.astype(jnp.float32) / self.spec.logits_divisor

  def __call__(self, tokens: jax.Array, capacity_factor: float | None = None) -> ForwardOut:
    """Runs whole sequences without a cache.

    Args:
      tokens: int32 [B, T].
      capacity_factor: tokens an expert takes, as a multiple of the mean; None drops nothing.

    Returns:
      ForwardOut.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    x = hyper.expand(self.embed(tokens) * self.spec.embedding_multiplier, self.spec.hyper)
    routings, loads = [], []
    picks: list[jax.Array | None] = [None]
    for i, layer in enumerate(self.layers):
      h, mix = layer.attention_input(x)
      y, chosen = layer.attention(h, positions, picks[-1])
      x = layer.add(x, y, mix)
      picks.append(chosen)
      if layer.is_moe:
        group, index = self.spec.group_of(i)
        x, routing, load = run_moe(
          self.spec, layer, self.experts[group], index, x, tokens, capacity_factor
        )
        routings.append(routing)
        loads.append(load)
      else:
        h, mix = layer.mlp_input(x)
        x = layer.add(x, layer.mlp(h), mix)
    logits, hidden = self._finish(x, self.hyper_head, self.norm)
    return ForwardOut(logits, hidden, tuple(routings), tuple(loads), tuple(picks[1:]))

  def _finish(
    self, x: jax.Array, head: hyper.HyperHead | None, norm: nnx.RMSNorm
  ) -> tuple[jax.Array, jax.Array]:
    """Returns logits and hidden states, as in ForwardOut, of the stream after the last layer."""
    normed = norm(x if head is None else head(x))
    return self.logits(normed), normed if head is None else x

  def draft(
    self,
    depth: int,
    hidden: jax.Array,
    next_tokens: jax.Array,
    positions: jax.Array,
    capacity_factor: float | None = None,
  ) -> ForwardOut:
    """Runs MTP depth `depth` over whole sequences.

    Args:
      depth: index of the MTP layer.
      hidden: `ForwardOut.hidden` of the depth below (of the main model for depth 0).
      next_tokens: int32 [B, T], the token that follows each position of `hidden`'s own input.
      positions: int32 [B, T], rotary positions.
      capacity_factor: as in `__call__`.

    Returns:
      ForwardOut; its logits predict the token after `next_tokens`.
    """
    mtp = self.mtp[depth]
    group = next(
      g for g, members in enumerate(self.spec.mtp_expert_groups) if depth in members.layers
    )
    index = self.spec.mtp_expert_groups[group].index_of(depth)
    x = mtp.merge(self.embed(next_tokens), hidden)
    block = mtp.block
    h, mix = block.attention_input(x)
    x = block.add(x, block.attention(h, positions)[0], mix)
    x, routing, load = run_moe(
      self.spec, block, self.mtp_experts[group], index, x, next_tokens, capacity_factor
    )
    logits, hidden = self._finish(x, mtp.hyper_head, mtp.final_norm)
    return ForwardOut(logits, hidden, (routing,), (load,))


def run_moe(
  model: ModelSpec,
  layer: DecoderLayer,
  experts: RoutedExperts,
  index: int,
  x: jax.Array,
  tokens: jax.Array,
  capacity_factor: float | None,
) -> tuple[jax.Array, Routing, jax.Array]:
  """Runs the MoE block of one layer over whole sequences with all its experts fetched.

  Args:
    model: the model.
    layer: the decoder layer.
    experts: bank of its group.
    index: position of the layer in the group.
    x: stream after the layer's attention.
    tokens: int32 [B, T].
    capacity_factor: tokens an expert takes, as a multiple of the mean; None drops nothing.

  Returns:
    The stream, the routing of the B * T tokens, and int32 [N] tokens that chose each
    expert.
  """
  normed, mix = layer.mlp_input(x)
  h = normed.reshape(-1, x.shape[-1])
  assert isinstance(layer.mlp, MoEBlock)
  routing = layer.mlp.router(h, tokens.reshape(-1))
  capacity = h.shape[0]
  if capacity_factor is not None:
    mean = h.shape[0] * routing.topk_ids.shape[1] / routing.selection_scores.shape[1]
    capacity = min(capacity, max(1, round(capacity_factor * mean)))
  weights = experts.layer_weights(index)
  routed, load = run_all_at_once(h, routing, *weights, capacity, model.activation)
  y = layer.mlp.add_shared(routed, h).reshape(normed.shape)
  return layer.add(x, y, mix), routing, load
