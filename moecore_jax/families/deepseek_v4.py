"""DeepSeek-V4: attention to a window and to compressed entries, hyper-connections, hash routing in
the first layers.

Source: DeepSeek-V4 (2026) and the keys and config fields of its published checkpoints.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moecore_jax.families import keymap as km
from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.deepseek_v3 import moe_block
from moecore_jax.families.rules import Bank, MoENames, Rules
from moecore_jax.specs import (
  ActivationSpec,
  CompressedSpec,
  CompressionSpec,
  HyperSpec,
  IndexerSpec,
  LayerSpec,
  ModelSpec,
  MoESpec,
  RopeSpec,
  RouterSpec,
)

MODEL_TYPE = "deepseek_v4"
_SLIDING, _SPARSE, _HEAVY = (
  "sliding_attention",
  "compressed_sparse_attention",
  "heavily_compressed_attention",
)
_SPARSE_RATIO = 4  # windows of so many tokens overlap and have an indexer, longer ones have not
_MOST_SINKHORN_ITERS = 100


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json, in either of two spellings.

  Attention is told by `compress_ratios`, or by `layer_types` and `compress_rates`; hash routing by
  `num_hash_layers`, or by `mlp_layer_types`; rotation by flat fields, or by `rope_parameters` of
  "main" and "compress".

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  reader.expect("scoring_func", "sqrtsoftplus")
  reader.expect("norm_topk_prob", True)
  reader.expect("attention_bias", False)
  reader.expect("num_key_value_heads", 1)
  count = reader.layers("num_hidden_layers")
  num_mtp = reader.layers("num_nextn_predict_layers", 0)
  router = RouterSpec(
    num_experts=reader.whole("n_routed_experts"),
    num_experts_per_tok=reader.whole("num_experts_per_tok"),
    scale=reader.number("routed_scaling_factor", 1.0),
    scoring="sqrt_softplus",
  )
  hashed = dataclasses.replace(router, bias="none", is_hash=True)
  attention = [_attention(reader, *window) for window in _windows(reader, count + num_mtp)]
  mlps = [
    moe_block(reader, hashed if is_hash else router) for is_hash in _hashed(reader, count, num_mtp)
  ]
  layers = tuple(map(LayerSpec, attention, mlps))
  return ModelSpec(
    layers=layers[:count],
    mtp_layers=layers[count:],
    activation=ActivationSpec(limit=reader.number("swiglu_limit", 10.0, True)),
    hyper=HyperSpec(
      reader.whole("hc_mult"),
      reader.whole("hc_sinkhorn_iters", most=_MOST_SINKHORN_ITERS),
      reader.number("hc_eps", 1e-6),
    ),
    **reader.common(),
  )


def _windows(reader: ConfigReader, count: int) -> list[tuple[int, bool]]:
  """Returns (tokens of a compressed window, 0: none; an indexer chooses) of each layer.

  Layers behind those that are told, of multi-token prediction, have none.
  """
  num_layers = reader.layers("num_hidden_layers")
  ratios = reader.config.get("compress_ratios")
  if ratios is not None:
    if not isinstance(ratios, list) or len(ratios) < num_layers or not all(map(_is_window, ratios)):
      reader.refuse("compress_ratios", f"a window in tokens for each of {num_layers} layers")
    windows = [(ratio, ratio == _SPARSE_RATIO) for ratio in ratios]
  else:
    rates = reader.nested("compress_rates")
    known = {_SLIDING: 0} | {kind: rates.whole(kind, least=0) for kind in rates.config}
    kinds = reader.kinds("layer_types", list(known), num_layers)
    if kinds is None:
      reader.refuse("layer_types", "one of compress_rates for each layer, or compress_ratios")
    windows = [(known[kind], kind == _SPARSE) for kind in kinds]
  windows += [(0, False)] * (count - len(windows))
  return windows[:count]


def _is_window(value: Any) -> bool:
  return type(value) is int and 0 <= value < 2**31


def _hashed(reader: ConfigReader, count: int, num_mtp: int) -> list[bool]:
  """Returns for each layer whether a table routes it; MTP layers come last."""
  kinds = reader.kinds("mlp_layer_types", ("hash_moe", "moe"), count)
  if kinds is None:
    num_hash = reader.layers("num_hash_layers", 0)
    kinds = ["hash_moe" if i < num_hash else "moe" for i in range(count)]
  if len(kinds) != count:
    reader.refuse("mlp_layer_types", f"one for each of {count} layers")
  return [kind == "hash_moe" for kind in kinds] + [False] * num_mtp


def _attention(reader: ConfigReader, ratio: int, is_sparse: bool) -> CompressedSpec:
  rope, indexer = _rope(reader, is_compressed=ratio > 0), None
  if is_sparse:
    heads, width = reader.whole("index_n_heads"), reader.whole("index_head_dim")
    indexer = IndexerSpec(heads, width, reader.whole("index_topk"), rope)
  return CompressedSpec(
    num_heads=reader.whole("num_attention_heads"),
    head_dim=reader.whole("head_dim"),
    q_lora_rank=reader.whole("q_lora_rank"),
    o_groups=reader.whole("o_groups"),
    o_lora_rank=reader.whole("o_lora_rank"),
    window=reader.whole("sliding_window"),
    rope=rope,
    compression=CompressionSpec(ratio, is_sparse, indexer) if ratio else None,
  )


def _rope(reader: ConfigReader, is_compressed: bool) -> RopeSpec:
  """Reads the rotation of layers with or without compression; YaRN leaves magnitudes alone here."""
  config, nested = reader.config, reader.nested("rope_parameters")
  kind = "compress" if is_compressed else "main"
  if nested.has(kind):
    fields = {"rope_parameters": nested.nested(kind).config}
  elif is_compressed:
    fields = {"rope_theta": config.get("compress_rope_theta")} | {
      "rope_scaling": config.get("rope_scaling")
    }
  else:
    fields = {"rope_theta": config.get("rope_theta")}
  if reader.has("qk_rope_head_dim"):
    dim = reader.whole("qk_rope_head_dim")
  else:
    dim = int(reader.whole("head_dim") * reader.number("partial_rotary_factor", 0.125, True))
  theta = 160000.0 if is_compressed else 10000.0
  rope = ConfigReader(fields, MODEL_TYPE).rope(dim, "interleaved", theta)
  yarn = rope.yarn
  if yarn is not None:
    yarn = dataclasses.replace(yarn, mscale=0.0, mscale_all_dim=0.0)
  return dataclasses.replace(rope, yarn=yarn, is_trailing=True)


class _Rules(Rules):
  names = MoENames(
    router="ffn.gate.weight",
    bias="ffn.gate.bias",
    experts=(
      "ffn.experts.{}.w1.weight",
      "ffn.experts.{}.w3.weight",
      "ffn.experts.{}.w2.weight",
    ),
    shared="ffn.shared_experts.",
  )
  embed, norm, head, layers = "embed.weight", "norm.weight", "head.weight", "layers."

  def _build(self) -> km.KeyMap:
    self.hyper(("hyper_head",), "hc_head_", self._streams, 1)
    return super()._build()

  @property
  def _streams(self) -> int:
    assert self.spec.hyper is not None
    return self.spec.hyper.num_streams

  def hyper(self, path: km.Path, prefix: str, size: int, parts: int) -> None:
    """Hyper-connections: a map of all streams to `size` numbers, scaled in `parts`."""
    shape = (size, self._streams * self.spec.embed_dim)
    self.kernel((*path, "maps", "kernel"), shape, prefix + "fn")
    self.dense((*path, "maps", "base"), prefix + "base", (size,))
    self.dense((*path, "maps", "scale"), prefix + "scale", (parts,))

  def layer(self, path: km.Path, prefix: str, layer: LayerSpec, bank: Bank | None) -> None:
    n = self._streams
    assert isinstance(layer.attention, CompressedSpec), layer.attention
    assert isinstance(layer.mlp, MoESpec), layer.mlp
    assert bank is not None
    for ours, theirs in (("attention", "attn"), ("mlp", "ffn")):
      self.hyper((*path, f"{ours}_hyper"), f"{prefix}hc_{theirs}_", (2 + n) * n, 3)
      self.scale((*path, f"{ours}_norm"), f"{prefix}{theirs}_norm", self.spec.embed_dim)
    self.attention((*path, "attention"), prefix + "attn.", layer.attention)
    self.moe((*path, "mlp"), prefix, layer.mlp, bank)

  def scale(self, path: km.Path, key: str, width: int) -> None:
    self.dense((*path, "scale"), key + ".weight", (width,))

  def attention(self, path: km.Path, prefix: str, spec: CompressedSpec) -> None:
    dim, width, compression = self.spec.embed_dim, spec.head_dim, spec.compression
    total, rank = spec.num_heads * width, spec.q_lora_rank
    self.linear((*path, "q_a_proj"), prefix + "wq_a", (rank, dim))
    self.scale((*path, "q_a_norm"), prefix + "q_norm", rank)
    self.linear((*path, "q_b_proj"), prefix + "wq_b", (total, rank))
    self.linear((*path, "kv_proj"), prefix + "wkv", (width, dim))
    self.scale((*path, "kv_norm"), prefix + "kv_norm", width)
    self.dense((*path, "sinks"), prefix + "attn_sink", (spec.num_heads,))
    groups, rows = spec.o_groups, spec.o_lora_rank
    shape = (groups * rows, total // groups)
    self.dense((*path, "o_a_proj"), prefix + "wo_a.weight", shape, _by_groups(rows), rows)
    self.linear((*path, "o_b_proj"), prefix + "wo_b", (dim, groups * rows))
    if compression is not None:
      self.compressor((*path, "compressor"), prefix + "compressor.", compression, width)
      if (indexer := compression.indexer) is not None:
        path, prefix, inner = (*path, "indexer"), prefix + "indexer.", indexer.head_dim
        self.linear((*path, "q_proj"), prefix + "wq_b", (indexer.num_heads * inner, rank))
        self.linear((*path, "weights_proj"), prefix + "weights_proj", (indexer.num_heads, dim))
        self.compressor((*path, "compressor"), prefix + "compressor.", compression, inner)

  def compressor(self, path: km.Path, prefix: str, spec: CompressionSpec, width: int) -> None:
    total, dim = width * (2 if spec.overlaps else 1), self.spec.embed_dim
    self.linear((*path, "kv_proj"), prefix + "wkv", (total, dim))
    self.linear((*path, "gate_proj"), prefix + "wgate", (total, dim))
    self.dense((*path, "position_bias"), prefix + "ape", (spec.ratio, total))
    self.scale((*path, "norm"), prefix + "norm", width)

  def moe(self, path: km.Path, prefix: str, moe: MoESpec, bank: Bank) -> None:
    super().moe(path, prefix, moe, bank)
    if moe.router.is_hash:
      key = prefix + "ffn.gate.tid2eid"
      shape = (self.spec.vocab_size, moe.router.num_experts_per_tok)
      path = (*path, "router", "table")
      self.dense(path, key, shape, lambda ids: ids.T.astype(np.int32), axis=1)
      self.id_tables[key] = moe.router.num_experts

  def mlp(self, target: km.Path, prefix: str, hidden: int) -> None:
    dim = self.spec.embed_dim
    gate, up = prefix + "w1.weight", prefix + "w3.weight"
    self.kernel((*target, "gate_up_proj", "kernel"), (hidden, dim), gate, up)
    self.linear((*target, "down_proj"), prefix + "w2", (dim, hidden))

  def mtp_layer(self, depth: int, layer: LayerSpec) -> None:
    dim, prefix, path = self.spec.embed_dim, f"mtp.{depth}.", ("mtp", depth)
    for ours, theirs in (("embed", "e"), ("hidden", "h")):
      self.scale((*path, f"{ours}_norm"), f"{prefix}{theirs}norm", dim)
      self.linear((*path, f"{ours}_proj"), f"{prefix}{theirs}_proj", (dim, dim))
    self.hyper((*path, "hyper_head"), prefix + "hc_head_", self._streams, 1)
    self.scale((*path, "final_norm"), prefix + "norm", dim)
    self.layer((*path, "block"), prefix, layer, ("mtp_experts", 0, depth))


def _by_groups(rows: int) -> Callable[[np.ndarray], np.ndarray]:
  """Returns what maps the groups' matrices [n * rows, R], one below the other, to [n, rows, R]."""
  return lambda x: x.reshape(-1, rows, x.shape[1])


key_map = _Rules.build_for
