"""DeepSeek-V3: multi-head latent attention, sigmoid routing with a selection bias, shared expert,
MTP layers.

Source: DeepSeek-V3 technical report (2024) and the keys and config fields of its published
checkpoints.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moecore_jax.families import keymap as km
from moecore_jax.specs import (
  DenseSpec,
  LayerSpec,
  MLASpec,
  ModelSpec,
  MoESpec,
  RopeSpec,
  RouterSpec,
  YarnSpec,
)

MODEL_TYPE = "deepseek_v3"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  Args:
    config: the parsed file.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  get = _getter(config)
  if config.get("scoring_func", "sigmoid") != "sigmoid":
    raise ValueError(
      f"config.json: scoring_func is {config['scoring_func']!r}, {MODEL_TYPE} has 'sigmoid'"
    )
  if not config.get("rope_interleave", True):
    raise ValueError("config.json: rope_interleave is false, this family rotates interleaved pairs")
  if config.get("attention_bias"):
    raise ValueError("config.json: attention_bias is true, this family has no attention bias")
  attention = MLASpec(
    num_heads=get("num_attention_heads"),
    q_lora_rank=config.get("q_lora_rank"),
    kv_lora_rank=get("kv_lora_rank"),
    qk_nope_head_dim=get("qk_nope_head_dim"),
    qk_rope_head_dim=get("qk_rope_head_dim"),
    v_head_dim=get("v_head_dim"),
    rope=_rope(config, get("qk_rope_head_dim")),
  )
  router = RouterSpec(
    num_experts=get("n_routed_experts"),
    num_experts_per_tok=get("num_experts_per_tok"),
    num_groups=config.get("n_group") or 1,
    topk_groups=config.get("topk_group") or 1,
    norm_topk=config.get("norm_topk_prob", True),
    scale=float(config.get("routed_scaling_factor", 1.0)),
  )
  expert_dim = get("moe_intermediate_size")
  moe = LayerSpec(
    attention, MoESpec(router, expert_dim, expert_dim * (config.get("n_shared_experts") or 0))
  )
  num_layers, num_dense = get("num_hidden_layers"), config.get("first_k_dense_replace", 0)
  dense = LayerSpec(attention, DenseSpec(get("intermediate_size"))) if num_dense else moe
  eos = config.get("eos_token_id")
  return ModelSpec(
    family=MODEL_TYPE,
    vocab_size=get("vocab_size"),
    embed_dim=get("hidden_size"),
    layers=tuple(dense if i < num_dense else moe for i in range(num_layers)),
    mtp_layers=(moe,) * (config.get("num_nextn_predict_layers") or 0),
    rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
    tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    max_context_tokens=config.get("max_position_embeddings", 4096),
    eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
  )


def _getter(config: Mapping[str, Any]):
  def get(field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      raise ValueError(
        f"config.json: {field} is {value!r}, {MODEL_TYPE} needs a whole number of 1 or more"
      )
    return value

  return get


def _rope(config: Mapping[str, Any], dim: int) -> RopeSpec:
  """Reads both spellings: `rope_theta` with `rope_scaling`, or `rope_parameters` with
  everything.
  """
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  theta = float(rope.get("rope_theta") or config.get("rope_theta", 10000.0))
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind == "default":
    return RopeSpec(dim, theta)
  if kind != "yarn":
    raise ValueError(f"config.json: rope type {kind!r} is not one of 'default', 'yarn'")
  return RopeSpec(
    dim,
    theta,
    YarnSpec(
      factor=float(rope["factor"]),
      original_max_position=int(rope["original_max_position_embeddings"]),
      beta_fast=float(rope.get("beta_fast", 32)),
      beta_slow=float(rope.get("beta_slow", 1)),
      mscale=float(rope.get("mscale", 1.0)),
      mscale_all_dim=float(rope.get("mscale_all_dim", 0.0)),
    ),
  )


def key_map(spec: ModelSpec) -> km.KeyMap:
  """Returns the rules from published keys to our arrays."""
  rules = _Rules(spec)
  dim, vocab = spec.embed_dim, spec.vocab_size
  rules.dense(("embed", "embedding"), "model.embed_tokens.weight", (vocab, dim))
  rules.dense(("norm", "scale"), "model.norm.weight", (dim,))
  if spec.tie_embeddings:
    rules.skipped["lm_head.weight"] = "tied to the embedding"
  else:
    rules.kernel(("lm_head", "kernel"), (vocab, dim), "lm_head.weight")
  for i, layer in enumerate(spec.layers):
    bank = ("experts", *spec.group_of(i)) if isinstance(layer.mlp, MoESpec) else None
    rules.layer(("layers", i), f"model.layers.{i}.", layer, bank)
  for depth, layer in enumerate(spec.mtp_layers):
    prefix, path = f"model.layers.{len(spec.layers) + depth}.", ("mtp", depth)
    rules.dense((*path, "embed_norm", "scale"), prefix + "enorm.weight", (dim,))
    rules.dense((*path, "hidden_norm", "scale"), prefix + "hnorm.weight", (dim,))
    rules.kernel((*path, "merge_proj", "kernel"), (dim, 2 * dim), prefix + "eh_proj.weight")
    rules.dense((*path, "final_norm", "scale"), prefix + "shared_head.norm.weight", (dim,))
    rules.skipped[prefix + "embed_tokens.weight"] = "a copy of the embedding"
    rules.skipped[prefix + "shared_head.head.weight"] = "a copy of the head"
    rules.layer((*path, "block"), prefix, layer, ("mtp_experts", 0, depth))
  return km.KeyMap(tuple(rules.dense_rules), tuple(rules.expert_rules), rules.skipped, rules.shapes)


class _Rules:
  """Collects rules together with the expected shape of each source."""

  def __init__(self, spec: ModelSpec):
    self.spec = spec
    self.dense_rules: list[km.DenseRule] = []
    self.expert_rules: list[km.ExpertRule] = []
    self.skipped: dict[str, str] = {}
    self.shapes: dict[str, tuple[int, ...]] = {}

  def dense(
    self, target: km.Path, key: str, shape: tuple[int, ...], make=km.keep, entry_rows: int = 1
  ) -> None:
    self.shapes[key] = shape
    self.dense_rules.append(km.DenseRule(target, (key,), make, entry_rows=entry_rows))

  def kernel(self, target: km.Path, shape: tuple[int, int], *keys: str) -> None:
    """A kernel [in, out] of matrices that are published as [out, in], side by side."""
    self.shapes |= dict.fromkeys(keys, shape)
    self.dense_rules.append(km.DenseRule(target, keys, km.transpose, axis=1))

  def mlp(self, target: km.Path, prefix: str, hidden: int) -> None:
    dim = self.spec.embed_dim
    gate, up = prefix + "gate_proj.weight", prefix + "up_proj.weight"
    self.kernel((*target, "gate_up_proj", "kernel"), (hidden, dim), gate, up)
    self.kernel((*target, "down_proj", "kernel"), (dim, hidden), prefix + "down_proj.weight")

  def layer(
    self, path: km.Path, prefix: str, layer: LayerSpec, bank: tuple[str, int, int] | None
  ) -> None:
    dim = self.spec.embed_dim
    self.dense((*path, "attention_norm", "scale"), prefix + "input_layernorm.weight", (dim,))
    self.dense((*path, "mlp_norm", "scale"), prefix + "post_attention_layernorm.weight", (dim,))
    self.attention((*path, "attention"), prefix + "self_attn.", layer.attention)
    if isinstance(layer.mlp, DenseSpec):
      self.mlp((*path, "mlp"), prefix + "mlp.", layer.mlp.hidden_dim)
      return
    assert bank is not None
    moe, mlp = layer.mlp, prefix + "mlp."
    num_experts, width = moe.router.num_experts, moe.expert_dim
    self.kernel((*path, "mlp", "router", "kernel"), (num_experts, dim), mlp + "gate.weight")
    self.dense(
      (*path, "mlp", "router", "bias"), mlp + "gate.e_score_correction_bias", (num_experts,)
    )
    if moe.shared_dim:
      self.mlp((*path, "mlp", "shared"), mlp + "shared_experts.", moe.shared_dim)
    name, group, index = bank
    for e in range(num_experts):
      keys = tuple(f"{mlp}experts.{e}.{part}_proj.weight" for part in ("gate", "up", "down"))
      self.shapes |= dict(zip(keys, ((width, dim), (width, dim), (dim, width)), strict=True))
      self.expert_rules.append(
        km.ExpertRule(name, group, index * num_experts + e, keys, km.expert_arrays)
      )

  def attention(self, path: km.Path, prefix: str, spec: MLASpec) -> None:
    dim, heads, rank, nope = (
      self.spec.embed_dim,
      spec.num_heads,
      spec.kv_lora_rank,
      spec.qk_nope_head_dim,
    )
    query_dim = heads * (nope + spec.qk_rope_head_dim)
    if spec.q_lora_rank is None:
      self.kernel((*path, "q_proj", "kernel"), (query_dim, dim), prefix + "q_proj.weight")
    else:
      rank_q = spec.q_lora_rank
      self.kernel((*path, "q_a_proj", "kernel"), (rank_q, dim), prefix + "q_a_proj.weight")
      self.dense((*path, "q_a_norm", "scale"), prefix + "q_a_layernorm.weight", (rank_q,))
      self.kernel((*path, "q_b_proj", "kernel"), (query_dim, rank_q), prefix + "q_b_proj.weight")
    self.kernel(
      (*path, "kv_a_proj", "kernel"), (spec.latent_dim, dim), prefix + "kv_a_proj_with_mqa.weight"
    )
    self.dense((*path, "kv_a_norm", "scale"), prefix + "kv_a_layernorm.weight", (rank,))
    up, head = prefix + "kv_b_proj.weight", nope + spec.v_head_dim
    for name, part in (("k_up_proj", slice(nope)), ("v_up_proj", slice(nope, None))):
      self.dense((*path, name), up, (heads * head, rank), _part_of_heads(head, part), head)
    self.kernel(
      (*path, "o_proj", "kernel"), (dim, heads * spec.v_head_dim), prefix + "o_proj.weight"
    )


def _part_of_heads(head_rows: int, part: slice) -> Callable[[np.ndarray], np.ndarray]:
  """Returns what maps heads [n * head_rows, R] to one part of the rows of each, [n, rows, R]."""
  return lambda x: x.reshape(-1, head_rows, x.shape[1])[:, part]
