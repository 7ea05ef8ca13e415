"""Collects the rules of a checkpoint, each with the expected shape of its sources, from the parts
that families share.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from moecore_jax.families import keymap as km
from moecore_jax.specs import (
  DenseSpec,
  GQASpec,
  IndexerSpec,
  LayerSpec,
  MLASpec,
  ModelSpec,
  MoESpec,
)


@dataclasses.dataclass(frozen=True)
class MoENames:
  """How a family names the parts of a MoE block, behind the layer's prefix.

  Attributes:
    router: of the router's matrix.
    bias: of its bias.
    experts: of gate, up and down of one expert, with {} for its number.
    shared: prefix of the shared expert.
    shared_gate: of the matrix that weighs it.
  """

  router: str = "mlp.gate.weight"
  bias: str = "mlp.gate.e_score_correction_bias"
  experts: tuple[str, str, str] = (
    "mlp.experts.{}.gate_proj.weight",
    "mlp.experts.{}.up_proj.weight",
    "mlp.experts.{}.down_proj.weight",
  )
  shared: str = "mlp.shared_experts."
  shared_gate: str = ""


Bank = tuple[str, int, int]
"""Name of a bank, expert group, and index of the layer within it."""


class Rules:
  """Rules of one model; families override what they name or lay out otherwise."""

  names = MoENames()
  embed, norm, head = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
  layers = "model.layers."

  def __init__(self, spec: ModelSpec):
    self.spec = spec
    self.dense_rules: list[km.DenseRule] = []
    self.expert_rules: list[km.ExpertRule] = []
    self.skipped: dict[str, str] = {}
    self.shapes: dict[str, tuple[int, ...]] = {}
    self.id_tables: dict[str, int] = {}

  @classmethod
  def build_for(cls, spec: ModelSpec) -> km.KeyMap:
    """Returns the rules of a whole model."""
    return cls(spec)._build()

  def _build(self) -> km.KeyMap:
    spec, dim, vocab = self.spec, self.spec.embed_dim, self.spec.vocab_size
    self.dense(("embed", "embedding"), self.embed, (vocab, dim))
    self.dense(("norm", "scale"), self.norm, (dim,))
    if spec.tie_embeddings:
      self.skipped[self.head] = "tied to the embedding"
    else:
      self.kernel(("lm_head", "kernel"), (vocab, dim), self.head)
    for i, layer in enumerate(spec.layers):
      bank = ("experts", *spec.group_of(i)) if isinstance(layer.mlp, MoESpec) else None
      self.layer(("layers", i), f"{self.layers}{i}.", layer, bank)
    for depth, layer in enumerate(spec.mtp_layers):
      self.mtp_layer(depth, layer)
    return km.KeyMap(
      tuple(self.dense_rules),
      tuple(self.expert_rules),
      self.skipped,
      self.shapes,
      self.id_tables,
    )

  # Single parameters.

  def dense(
    self,
    target: km.Path,
    key: str,
    shape: tuple[int, ...],
    make: Callable[[np.ndarray], np.ndarray] = km.keep,
    entry_rows: int = 1,
    axis: int = 0,
  ) -> None:
    self.shapes[key] = shape
    self.dense_rules.append(km.DenseRule(target, (key,), make, axis, entry_rows))

  def kernel(self, target: km.Path, shape: tuple[int, int], *keys: str) -> None:
    """A kernel [in, out] of matrices that are published as [out, in], side by side."""
    self.shapes |= dict.fromkeys(keys, shape)
    self.dense_rules.append(km.DenseRule(target, keys, km.transpose, axis=1))

  def linear(
    self, target: km.Path, prefix: str, shape: tuple[int, int], has_bias: bool = False
  ) -> None:
    """A linear map [in, out], published as PREFIX.weight [out, in] and PREFIX.bias."""
    self.kernel((*target, "kernel"), shape, prefix + ".weight")
    if has_bias:
      self.dense((*target, "bias"), prefix + ".bias", shape[:1])

  # Blocks.

  def layer(self, path: km.Path, prefix: str, layer: LayerSpec, bank: Bank | None) -> None:
    dim = self.spec.embed_dim
    self.dense((*path, "attention_norm", "scale"), prefix + "input_layernorm.weight", (dim,))
    self.dense((*path, "mlp_norm", "scale"), prefix + "post_attention_layernorm.weight", (dim,))
    if isinstance(layer.attention, MLASpec):
      self.mla((*path, "attention"), prefix + "self_attn.", layer.attention)
    elif isinstance(layer.attention, GQASpec):
      self.gqa((*path, "attention"), prefix + "self_attn.", layer.attention)
    if isinstance(layer.mlp, DenseSpec):
      self.mlp((*path, "mlp"), prefix + "mlp.", layer.mlp.hidden_dim)
    else:
      assert bank is not None
      self.moe((*path, "mlp"), prefix, layer.mlp, bank)

  def mlp(self, target: km.Path, prefix: str, hidden: int) -> None:
    dim = self.spec.embed_dim
    gate, up = prefix + "gate_proj.weight", prefix + "up_proj.weight"
    self.kernel((*target, "gate_up_proj", "kernel"), (hidden, dim), gate, up)
    self.linear((*target, "down_proj"), prefix + "down_proj", (dim, hidden))

  def moe(self, path: km.Path, prefix: str, moe: MoESpec, bank: Bank) -> None:
    names, dim, num_experts = self.names, self.spec.embed_dim, moe.router.num_experts
    self.kernel((*path, "router", "kernel"), (num_experts, dim), prefix + names.router)
    if moe.router.bias != "none":
      self.dense((*path, "router", "bias"), prefix + names.bias, (num_experts,))
    if moe.shared_dim:
      self.mlp((*path, "shared"), prefix + names.shared, moe.shared_dim)
    if moe.has_shared_gate:
      self.kernel((*path, "shared_gate", "kernel"), (1, dim), prefix + names.shared_gate)
    self.experts(prefix, moe, bank)

  def experts(self, prefix: str, moe: MoESpec, bank: Bank) -> None:
    """Experts published one by one: gate and up [F, D], down [D, F]."""
    dim, width, count = self.spec.embed_dim, moe.expert_dim, moe.router.num_experts
    name, group, index = bank
    for e in range(count):
      keys = tuple(prefix + key.format(e) for key in self.names.experts)
      self.shapes |= dict(zip(keys, ((width, dim), (width, dim), (dim, width)), strict=True))
      self.expert_rules.append(
        km.ExpertRule(name, group, index * count + e, keys, km.expert_arrays)
      )

  def fused_experts(
    self,
    bank: Bank,
    count: int,
    shapes: Mapping[str, tuple[int, ...]],
    make: Callable[..., tuple[np.ndarray, np.ndarray]],
  ) -> None:
    """Experts published in arrays whose first axis is the expert; `make` gets one of each."""
    name, group, index = bank
    self.shapes |= {key: (count, *shape) for key, shape in shapes.items()}
    for e in range(count):
      self.expert_rules.append(
        km.ExpertRule(name, group, index * count + e, tuple(shapes), make, entry=e)
      )

  def gqa(self, path: km.Path, prefix: str, spec: GQASpec) -> None:
    dim = self.spec.embed_dim
    query_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for name, width in (("q", query_dim), ("k", kv_dim), ("v", kv_dim)):
      self.linear((*path, f"{name}_proj"), f"{prefix}{name}_proj", (width, dim), spec.qkv_bias)
    self.linear((*path, "o_proj"), prefix + "o_proj", (dim, query_dim), spec.o_bias)
    if spec.qk_norm != "none":
      for name, width in (("q", query_dim), ("k", kv_dim)):
        width = width if spec.qk_norm == "full" else spec.head_dim
        self.dense((*path, f"{name}_norm", "scale"), f"{prefix}{name}_norm.weight", (width,))
    if spec.has_sinks:
      self.dense((*path, "sinks"), prefix + "sinks", (spec.num_heads,))

  def mla(self, path: km.Path, prefix: str, spec: MLASpec) -> None:
    dim, heads, rank, nope = (
      self.spec.embed_dim,
      spec.num_heads,
      spec.kv_lora_rank,
      spec.qk_nope_head_dim,
    )
    query_dim = heads * (nope + spec.qk_rope_head_dim)
    if spec.q_lora_rank is None:
      self.linear((*path, "q_proj"), prefix + "q_proj", (query_dim, dim))
    else:
      rank_q = spec.q_lora_rank
      self.linear((*path, "q_a_proj"), prefix + "q_a_proj", (rank_q, dim))
      self.dense((*path, "q_a_norm", "scale"), prefix + "q_a_layernorm.weight", (rank_q,))
      self.linear((*path, "q_b_proj"), prefix + "q_b_proj", (query_dim, rank_q))
    self.linear((*path, "kv_a_proj"), prefix + "kv_a_proj_with_mqa", (spec.latent_dim, dim))
    self.dense((*path, "kv_a_norm", "scale"), prefix + "kv_a_layernorm.weight", (rank,))
    up, head = prefix + "kv_b_proj.weight", nope + spec.v_head_dim
    for name, part in (("k_up_proj", slice(nope)), ("v_up_proj", slice(nope, None))):
      self.dense((*path, name), up, (heads * head, rank), _part_of_heads(head, part), head)
    self.linear((*path, "o_proj"), prefix + "o_proj", (dim, heads * spec.v_head_dim))
    indexer, rank_q = spec.indexer, spec.q_lora_rank
    if indexer is not None and rank_q is not None and not indexer.is_shared:
      self.indexer((*path, "indexer"), prefix + "indexer.", indexer, rank_q)

  def indexer(self, path: km.Path, prefix: str, spec: IndexerSpec, query_dim: int) -> None:
    dim, width = self.spec.embed_dim, spec.head_dim
    self.linear((*path, "q_proj"), prefix + "wq_b", (spec.num_heads * width, query_dim))
    self.linear((*path, "k_proj"), prefix + "wk", (width, dim))
    self.dense((*path, "k_norm", "scale"), prefix + "k_norm.weight", (width,))
    self.dense((*path, "k_norm", "bias"), prefix + "k_norm.bias", (width,))
    self.linear((*path, "weights_proj"), prefix + "weights_proj", (spec.num_heads, dim))

  def mtp_layer(self, depth: int, layer: LayerSpec) -> None:
    """A layer of multi-token prediction, published behind the model's own layers."""
    dim = self.spec.embed_dim
    prefix, path = f"{self.layers}{len(self.spec.layers) + depth}.", ("mtp", depth)
    self.dense((*path, "embed_norm", "scale"), prefix + "enorm.weight", (dim,))
    self.dense((*path, "hidden_norm", "scale"), prefix + "hnorm.weight", (dim,))
    self.linear((*path, "merge_proj"), prefix + "eh_proj", (dim, 2 * dim))
    self.dense((*path, "final_norm", "scale"), prefix + "shared_head.norm.weight", (dim,))
    self.skipped[prefix + "embed_tokens.weight"] = "a copy of the embedding"
    self.skipped[prefix + "shared_head.head.weight"] = "a copy of the head"
    self.layer((*path, "block"), prefix, layer, ("mtp_experts", 0, depth))


def _part_of_heads(head_rows: int, part: slice) -> Callable[[np.ndarray], np.ndarray]:
  """Returns what maps heads [n * head_rows, R] to the same rows of each, [n, rows, R]."""
  return lambda x: x.reshape(-1, head_rows, x.shape[1])[:, part]
