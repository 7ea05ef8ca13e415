"""Frozen, hashable descriptions of a model, its residency and its engine: data only, the lowest
tier.

A spec says what something is, in numbers; it never holds arrays, opens files or imports modules of
this package. Specs are static arguments of jitted functions, so two equal specs share one compiled
program.

Vocabulary: a *MoE layer* is a decoder layer with routed experts; an *expert group* is the set of
layers whose routed experts have one shape, and therefore share one bank in host memory and one slot
pool on the device.
"""

import dataclasses
import functools
from typing import Literal

ExpertFormat = Literal[
  "float32", "bfloat16", "w8a8", "w4a8", "w4a8_g32", "w4a8_g64", "w4a8_g128", "w4a8_g256"
]
"""Storage format of a routed expert: float32 as it is, every other format packed in uint32 words.
w8a8: int8 weights with a scale for each output channel; w4a8: int4 ones, or with a scale for each
channel and group of so many inputs; activations int8 at run time.
"""


DenseFormat = Literal["float", "w8a8"]


@dataclasses.dataclass(frozen=True)
class YarnSpec:
  """YaRN context extension of rotary embeddings.

  Attributes:
    factor: extension of the context.
    original_max_position: context before it, tokens.
    beta_fast, beta_slow: rotations in that context between which frequencies change over.
    mscale, mscale_all_dim: of the factors on cosines and on the softmax scale; 0 is none.
    is_truncated: the bounds of the change are rounded to whole components.

  Source: YaRN (Peng et al., 2023).
  """

  factor: float
  original_max_position: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  mscale: float = 1.0
  mscale_all_dim: float = 0.0
  is_truncated: bool = True


RopePairs = Literal["interleaved", "halves"]


@dataclasses.dataclass(frozen=True)
class RopeSpec:
  """Rotary position embedding over `dim` components.

  Attributes:
    dim: rotated components.
    theta: base of the frequencies.
    yarn: context extension.
    pairs: components that turn together, (2i, 2i + 1) or (i, i + dim / 2).
    is_trailing: a vector's last components turn, not its first.
  """

  dim: int
  theta: float = 10000.0
  yarn: YarnSpec | None = None
  pairs: RopePairs = "interleaved"
  is_trailing: bool = False


@dataclasses.dataclass(frozen=True)
class IndexerSpec:
  """Chooses the keys that sparse attention reads.

  Attributes:
    num_heads: query heads of the indexer.
    head_dim: their width.
    topk: keys that a query attends to.
    rope: of `rope.dim` components of each head.
    is_shared: the layer has no indexer and takes the choice of the one before.

  Source: DeepSeek-V3.2 (2025), section 2.1.
  """

  num_heads: int
  head_dim: int
  topk: int
  rope: RopeSpec
  is_shared: bool = False


@dataclasses.dataclass(frozen=True)
class MLASpec:
  """Multi-head latent attention.

  Attributes:
    num_heads: heads.
    q_lora_rank: rank of the query projection, None: direct.
    kv_lora_rank: width of the compressed keys and values.
    qk_nope_head_dim, qk_rope_head_dim: parts of a query and key head, without and with rotation.
    v_head_dim: width of a value head.
    rope: of the rotated part.
    indexer: sparse attention; None: dense.

  Source: DeepSeek-V2 (2024), section 2.1.
  """

  num_heads: int
  q_lora_rank: int | None
  kv_lora_rank: int
  qk_nope_head_dim: int
  qk_rope_head_dim: int
  v_head_dim: int
  rope: RopeSpec
  indexer: IndexerSpec | None = None

  @property
  def latent_dim(self) -> int:
    """Numbers cached per token: the compressed kv vector and the rotated shared key."""
    return self.kv_lora_rank + self.qk_rope_head_dim


QKNorm = Literal["none", "head", "full"]


@dataclasses.dataclass(frozen=True)
class GQASpec:
  """Grouped-query attention.

  Attributes:
    num_heads: query heads.
    num_kv_heads: key and value heads, each shared by num_heads / num_kv_heads query heads.
    head_dim: width of a head.
    rope: of the first `rope.dim` components of each query and key head.
    qkv_bias, o_bias: which projections have a bias.
    qk_norm: RMS norm of queries and keys before the rotation: none, over each head, or over the
      full width of all heads.
    window: tokens that a query sees, itself included; None: all before it.
    has_sinks: each head has a logit without a value in its softmax.
    scale: of the scores; None: head_dim ** -0.5.

  Source: GQA (Ainslie et al., 2023); sinks: gpt-oss model card (2025).
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope: RopeSpec
  qkv_bias: bool = False
  o_bias: bool = False
  qk_norm: QKNorm = "none"
  window: int | None = None
  has_sinks: bool = False
  scale: float | None = None


@dataclasses.dataclass(frozen=True)
class CompressionSpec:
  """Entries of a cache that stand for windows of tokens.

  Attributes:
    ratio: tokens of a window (m); its entry exists from its last token on.
    overlaps: an entry mixes its own window and the one before, each by projections of its own.
    indexer: chooses the entries that a query sees, by entries of its own; None: it sees all.
  """

  ratio: int
  overlaps: bool = False
  indexer: IndexerSpec | None = None

  @property
  def held_tokens(self) -> int:
    """Earlier tokens that may still enter an entry."""
    return (2 if self.overlaps else 1) * self.ratio - 1


@dataclasses.dataclass(frozen=True)
class CompressedSpec:
  """Attention to the last tokens, and to compressed entries of all tokens.

  What is cached is one vector a token or entry, key and value of all heads. Every head has a logit
  without a value in its softmax.

  Attributes:
    num_heads: query heads.
    head_dim: width of a head.
    q_lora_rank: rank of the query projection.
    o_groups: groups of consecutive heads that are projected apart, each to o_lora_rank numbers.
    o_lora_rank: their width.
    window: tokens that a query sees, itself included.
    rope: of `rope.dim` components of queries, keys and, turned back, of what is attended.
    compression: of the tokens; None: the window is all.

  Source: DeepSeek-V4 (2026); in its words without compression sliding, with an indexer CSA,
    without one HCA.
  """

  num_heads: int
  head_dim: int
  q_lora_rank: int
  o_groups: int
  o_lora_rank: int
  window: int
  rope: RopeSpec
  compression: CompressionSpec | None = None


AttentionSpec = MLASpec | GQASpec | CompressedSpec

Scoring = Literal["sigmoid", "softmax", "softmax_topk", "sqrt_softplus"]
RouterBias = Literal["none", "selection", "logits"]
GroupScore = Literal["top2", "max"]


@dataclasses.dataclass(frozen=True)
class RouterSpec:
  """How tokens choose experts.

  Attributes:
    num_experts: N.
    num_experts_per_tok: A.
    num_groups: groups of consecutive experts.
    topk_groups: groups that a token may choose from.
    norm_topk: mixing weights are divided by their sum.
    scale: factor on the mixing weights.
    scoring: scores are the logits' sigmoid, softmax or root of softplus; softmax_topk chooses by
      logits and takes the softmax over the chosen ones.
    bias: none; on the scores that decide, not on the weights; or on the logits.
    group_score: a group's worth: the sum of its two largest scores, or its largest.
    is_hash: a table chooses by token id; the scores give the weights only.

  Source: DeepSeek-V3 (2024), section 2.1.2; of the softmax forms, Mixtral (2024), gpt-oss (2025);
    of hash routing, DeepSeek-V4 (2026).
  """

  num_experts: int
  num_experts_per_tok: int
  num_groups: int = 1
  topk_groups: int = 1
  norm_topk: bool = True
  scale: float = 1.0
  scoring: Scoring = "sigmoid"
  bias: RouterBias = "selection"
  group_score: GroupScore = "top2"
  is_hash: bool = False


@dataclasses.dataclass(frozen=True)
class ActivationSpec:
  """The gated unit of experts and dense blocks: (up + up_shift) * gate * sigmoid(alpha * gate).

  Attributes:
    alpha: slope of the sigmoid; 1 is SwiGLU.
    up_shift: added to the linear half.
    limit: bound of the gate from above and of the linear half from both sides; None: unbounded.
  """

  alpha: float = 1.0
  up_shift: float = 0.0
  limit: float | None = None


@dataclasses.dataclass(frozen=True)
class DenseSpec:
  """A SwiGLU block that every token passes."""

  hidden_dim: int


@dataclasses.dataclass(frozen=True)
class MoESpec:
  """A mixture-of-experts block.

  Attributes:
    router: how tokens choose.
    expert_dim: width of a routed expert.
    shared_dim: width of the shared expert, 0: none.
    has_shared_gate: the shared expert is weighted by the sigmoid of a linear map.
    has_expert_bias: routed experts have biases.
  """

  router: RouterSpec
  expert_dim: int
  shared_dim: int = 0
  has_shared_gate: bool = False
  has_expert_bias: bool = False


@dataclasses.dataclass(frozen=True)
class LayerSpec:
  """One decoder layer."""

  attention: AttentionSpec
  mlp: DenseSpec | MoESpec


@dataclasses.dataclass(frozen=True)
class ExpertGroup:
  """Layers whose routed experts have one shape; they share a bank and a pool.

  Attributes:
    layers: indices into `ModelSpec.layers`, ascending.
    num_experts: routed experts of each of these layers (N).
    num_experts_per_tok: fan-out (A).
    embed_dim: input and output width of an expert (D).
    expert_dim: hidden width of an expert (F).
    has_bias: an expert has biases, stored as one more row of each of its arrays.
  """

  layers: tuple[int, ...]
  num_experts: int
  num_experts_per_tok: int
  embed_dim: int
  expert_dim: int
  has_bias: bool = False

  @property
  def num_rows(self) -> int:
    """Rows of the group's bank: one for each expert of each layer, row = index_of(layer) *
    num_experts + expert.
    """
    return len(self.layers) * self.num_experts

  @property
  def params_per_expert(self) -> int:
    return 3 * self.embed_dim * self.expert_dim

  def index_of(self, layer: int) -> int:
    """Position of `ModelSpec.layers[layer]` among the group's layers."""
    return self.layers.index(layer)


@dataclasses.dataclass(frozen=True)
class HyperSpec:
  """Hyper-connections: several residual streams, mixed around each block by learned maps.

  Attributes:
    num_streams: streams (n).
    sinkhorn_iters: normalisations, by columns and rows in turn, of the map between streams.
    eps: added to the maps and to the sums that they are divided by.

  Source: DeepSeek-V4 (2026).
  """

  num_streams: int
  sinkhorn_iters: int = 20
  eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class ModelSpec:
  """A decoder-only MoE language model.

  Attributes:
    family: name of its module in moecore_jax.families.
    vocab_size: V.
    embed_dim: D.
    layers: the decoder layers, in order.
    mtp_layers: of multi-token prediction.
    activation: of experts and dense blocks.
    rms_norm_eps: of the norms of the stream.
    tie_embeddings: the head is the embedding.
    max_context_tokens: prompt and output together.
    eos_token_ids: tokens that end an output.
    embedding_multiplier, residual_multiplier, logits_divisor: factors on the embeddings and on
      what is added to the stream, divisor of the logits.
    hyper: hyper-connections; None: one stream.
  """

  family: str
  vocab_size: int
  embed_dim: int
  layers: tuple[LayerSpec, ...]
  mtp_layers: tuple[LayerSpec, ...] = ()
  activation: ActivationSpec = ActivationSpec()
  rms_norm_eps: float = 1e-6
  tie_embeddings: bool = False
  max_context_tokens: int = 4096
  eos_token_ids: tuple[int, ...] = ()
  embedding_multiplier: float = 1.0
  residual_multiplier: float = 1.0
  logits_divisor: float = 1.0
  hyper: HyperSpec | None = None

  @functools.cached_property
  def moe_layers(self) -> tuple[int, ...]:
    """Indices of the layers that have routed experts."""
    return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoESpec))

  @functools.cached_property
  def expert_groups(self) -> tuple[ExpertGroup, ...]:
    """Groups of MoE layers of the main stack, in order of their first layer."""
    return _group(self.layers, self.embed_dim)

  @functools.cached_property
  def mtp_expert_groups(self) -> tuple[ExpertGroup, ...]:
    """Groups of the MTP layers; `layers` then indexes `mtp_layers`."""
    return _group(self.mtp_layers, self.embed_dim)

  def group_of(self, layer: int) -> tuple[int, int]:
    """Returns (index of the expert group, index of the layer within the group) of a MoE layer."""
    for g, group in enumerate(self.expert_groups):
      if layer in group.layers:
        return g, group.index_of(layer)
    raise ValueError(f"layer {layer} has no routed experts")


def _group(layers: tuple[LayerSpec, ...], embed_dim: int) -> tuple[ExpertGroup, ...]:
  members: dict[ExpertGroup, list[int]] = {}
  for i, layer in enumerate(layers):
    if isinstance(layer.mlp, MoESpec):
      moe, router = layer.mlp, layer.mlp.router
      key = ExpertGroup(
        (),
        router.num_experts,
        router.num_experts_per_tok,
        embed_dim,
        moe.expert_dim,
        moe.has_expert_bias,
      )
      members.setdefault(key, []).append(i)
  return tuple(dataclasses.replace(key, layers=tuple(ids)) for key, ids in members.items())


@dataclasses.dataclass(frozen=True)
class RhacSpec:
  """Weights and horizons of the RHAC replacement priority.

  Attributes:
    window: W, decoded tokens in the recent-frequency window, 1..32.
    decay: rho of the exponential moving average, 0 <= decay < 1.
    frequency_weight: lam_f, weight of the recent frequency.
    average_weight: lam_m, weight of the moving average.
    score_weight: lam_q, weight of the current router score.
    age_weight: lam_a, weight of the age, subtracted.
    age_cap: ages are counted up to this many tokens; 0 means without limit.

  Source: MoE-CORE, replacement by recency, history and current score.
  """

  window: int = 16
  decay: float = 0.98
  frequency_weight: float = 0.0
  average_weight: float = 3.0
  score_weight: float = 0.0
  age_weight: float = 0.5
  age_cap: int = 0


PredictorInput = Literal["literal", "renorm"]
Placement = Literal["in_flight", "slot"]


@dataclasses.dataclass(frozen=True)
class PrefetchSpec:
  """Copies of experts that the next layer is predicted to need.

  Attributes:
    max_experts: n_max, copies on the way to one layer; 0 prefetches nothing.
    link_experts: n_comm of each MoE layer, whole transfers that fit between its prediction and its
      routing; empty: no bound. A layer copies min(n_max, n_comm) experts or none.
    predictor_input: "literal" gives the next router what the present one got; "renorm" gives it the
      un-normed stream through the next layer's own norm.
    placement: "in_flight" keeps arrivals apart until the layer has routed; "slot" evicts at once.
    min_useful_frac: a layer whose recent share of right predictions is lower issues nothing.
    useful_decay: of that share's moving average, 0 <= decay < 1.

  Source: MoE-CORE, cross-layer prefetch.
  """

  max_experts: int = 0
  link_experts: tuple[int, ...] = ()
  predictor_input: PredictorInput = "literal"
  placement: Placement = "in_flight"
  min_useful_frac: float = 0.0
  useful_decay: float = 0.95


SlotFill = Literal["none", "profile", "prompt", "both"]


@dataclasses.dataclass(frozen=True)
class StagingSpec:
  """Complete layer staging in prefill.

  Attributes:
    enabled: layers for which a prompt has at least ceil(K_l / k_l) tokens are copied whole.
    fill: what orders the experts that are copied from a staged layer into its slots: its domain's
      profile, the prompt's own scores, both, or nothing is.
    reuses_residents: residents are copied from their slots instead of over the link.

  Source: MoE-CORE, prefill.
  """

  enabled: bool = False
  fill: SlotFill = "both"
  reuses_residents: bool = False


@dataclasses.dataclass(frozen=True)
class LayerPrefetchSpec:
  """The layer-prefetch baseline: some layers are streamed whole, in prefill and decode alike.

  Attributes:
    group_layers: MoE layers of a group; the last group may be shorter. 0: no layer is streamed.
    streamed_layers: of each group so many are streamed: those from place group_layers -
      streamed_layers on.
    prefetch_step: layer buffers; the copy of the streamed layer i + prefetch_step starts when the
      streamed layer i is done.

  Source: SPEC section 10.
  """

  group_layers: int = 0
  streamed_layers: int = 0
  prefetch_step: int = 2

  def streams(self, moe_index: int) -> bool:
    """Tells whether a MoE layer is streamed."""
    size, streamed = self.group_layers, self.streamed_layers
    return bool(size) and moe_index % size >= size - streamed


PolicyName = Literal["rhac", "lru", "lfu", "fifo", "random", "static"]


@dataclasses.dataclass(frozen=True)
class ResidencySpec:
  """Which experts stay on the device.

  Attributes:
    policy: replacement policy.
    slots: decode slots K_l of each MoE layer, in layer order; the length is the number of MoE
      layers. 0 where the layer is streamed.
    rhac: settings of the policy `rhac`, unused by the others.
    prefetch: copies ahead of the routing, in decode.
    substitution_threshold: alpha of approximate expert substitution in decode, 0 <= alpha < 1; 0 is
      exact.
    staging: how prefill brings in the layers of long prompts.
    layer_prefetch: which layers are streamed whole instead; experts are then not prefetched.
    reset_between_requests: empty the cache before each request instead of keeping what is resident.
  """

  policy: PolicyName
  slots: tuple[int, ...]
  rhac: RhacSpec = RhacSpec()
  prefetch: PrefetchSpec = PrefetchSpec()
  substitution_threshold: float = 0.0
  staging: StagingSpec = StagingSpec()
  layer_prefetch: LayerPrefetchSpec = LayerPrefetchSpec()
  reset_between_requests: bool = False


@dataclasses.dataclass(frozen=True)
class SamplingSpec:
  """How the next token is drawn. temperature 0 is greedy; top_k 0 and top_p 1 switch those filters
  off.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class EngineSpec:
  """Shapes and formats of the compiled programs.

  Attributes:
    batch_size: rows decoded together (B).
    context_tokens: capacity of a row's KV cache, prompt and output together; a multiple of
      kv_block_tokens.
    prefill_buckets: chunk lengths that prefill is compiled for, ascending; a longer prompt is cut
      in chunks of the last.
    prefill_block_tokens: tokens that a layer takes at a time; a longer bucket is a multiple.
    kv_block_tokens: tokens of one block of the attention loop.
    dtype: activations and dense weights, float32 or bfloat16.
    expert_format: storage of routed experts.
    dense_format: storage of the linear maps of decoder layers: "float" is dtype, "w8a8" is int8
      with int8 activations.
    layer_loop: "unrolled" (fast steps) or "scanned" (fast compilation).
    sampling: how tokens are drawn.
  """

  batch_size: int = 1
  context_tokens: int = 512
  prefill_buckets: tuple[int, ...] = (64,)
  prefill_block_tokens: int = 2048
  kv_block_tokens: int = 128
  dtype: Literal["float32", "bfloat16"] = "float32"
  expert_format: ExpertFormat = "float32"
  dense_format: DenseFormat = "float"
  layer_loop: Literal["unrolled", "scanned"] = "unrolled"
  sampling: SamplingSpec = SamplingSpec()


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
  """The accelerator that a plan is made for.

  Attributes:
    memory_bytes: device memory that may be used; 0 means whatever the device has.
    usable_frac: share of memory_bytes that the plan may fill.
    host_memory_bytes: pinned host memory that may be used; 0 means without limit.
  """

  memory_bytes: int = 0
  usable_frac: float = 0.95
  host_memory_bytes: int = 0
