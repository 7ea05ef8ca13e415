"""What a run is told: a tree of mutable dataclasses, validated and frozen into specs.

A file in `configs/` returns a `RunConfig`; the command line overrides single fields
(`--config.residency.policy=lru`); `RunConfig.freeze` checks every field against the model and gives
the hashable specs that programs are compiled for. A field that may be left open has an empty value
("", 0 or ()) with a stated meaning, never None.

A *system* is a way of serving a model that an evaluation compares: `moecore` (as configured), `lod`
(load on demand, the baseline), `layer_prefetch` (whole layers stream through a ring of buffers, the
other baseline) and `all_resident` (every expert on the device, the upper bound). A *variant* is a
system of a config's own. Both are changes of residency fields.
"""

import copy
import dataclasses
import functools
import typing
from collections.abc import Iterator
from typing import Any

from moecore_jax import allocation as allocation_file
from moecore_jax import planner, specs

POLICIES: tuple[str, ...] = typing.get_args(specs.PolicyName)
EXPERT_FORMATS: tuple[str, ...] = typing.get_args(specs.ExpertFormat)
DENSE_FORMATS: tuple[str, ...] = typing.get_args(specs.DenseFormat)

_ON_DEMAND = {
  "residency.prefetch.max_experts": 0,
  "residency.substitution_threshold": 0.0,
  "residency.staging.enabled": False,
  "residency.layer_prefetch.enabled": False,
  "residency.profiles": "",
}
_CHANGES: dict[str, dict[str, Any]] = {
  "moecore": {},
  "lod": {**_ON_DEMAND, "residency.policy": "lru", "residency.is_uniform": True},
  "layer_prefetch": {"residency.layer_prefetch.enabled": True, "residency.profiles": ""},
  "all_resident": {**_ON_DEMAND, "residency.all_resident": True},
}
"""What each system changes of a config."""
SYSTEMS = tuple(_CHANGES)


@dataclasses.dataclass
class ModelConfig:
  """Which model is run.

  Attributes:
    checkpoint: folder of a converted (Orbax) or published (safetensors) checkpoint; empty: the demo
      model.
    published_config: content of a published config.json, for programs that need shapes but no
      weights; empty: the checkpoint's own.
  """

  checkpoint: str = ""
  published_config: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class RhacConfig:
  """Settings of the policy `rhac`, unused by the others; meanings and units as in `specs.RhacSpec`.

  Attributes:
    window: decoded tokens in the recent-frequency window, 1..32.
    decay: decay of the moving average per decoded token, 0 <= decay < 1.
    frequency_weight: weight of the recent frequency, >= 0.
    average_weight: weight of the moving average, >= 0.
    score_weight: weight of the current router score, >= 0.
    age_weight: weight of the age, which is subtracted, >= 0.
    age_cap: ages are counted up to this many tokens; 0: without limit.
  """

  window: int = 16
  decay: float = 0.98
  frequency_weight: float = 0.0
  average_weight: float = 3.0
  score_weight: float = 0.0
  age_weight: float = 0.5
  age_cap: int = 0


@dataclasses.dataclass
class PrefetchConfig:
  """Copies of experts that the next layer is predicted to need, in decode.

  Attributes:
    max_experts: copies on the way to one layer, 0..num_experts_per_tok; 0: no prefetch.
    link_experts: whole transfers that fit between a prediction and the routing, for each MoE layer;
      empty: no bound. A layer copies min(max_experts, link_experts) experts or none.
    predictor_input: literal (the next router gets what the present one got) or renorm (the stream
      through the next layer's own norm).
    placement: in_flight (arrivals wait until the layer has routed) or slot (they evict at once).
    min_useful_frac: a layer whose recent share of right predictions is lower issues nothing until
      it recovers, 0 <= min_useful_frac <= 1.
    useful_decay: of that share's moving average, 0 <= useful_decay < 1.
  """

  max_experts: int = 0
  link_experts: tuple[int, ...] = ()
  predictor_input: str = "literal"
  placement: str = "in_flight"
  min_useful_frac: float = 0.0
  useful_decay: float = 0.95


@dataclasses.dataclass
class StagingConfig:
  """Complete layer staging in prefill.

  Attributes:
    enabled: copy layers whole for prompts of at least ceil(slots / experts per token) tokens.
    fill: what orders the experts that go from a staged layer into its slots: profile (of the
      request's domain), prompt (its own scores), both, or none.
    reuses_residents: copy residents from their slots instead of over the link.
  """

  enabled: bool = False
  fill: str = "both"
  reuses_residents: bool = False


@dataclasses.dataclass
class LayerPrefetchConfig:
  """The layer-prefetch baseline: of each group of MoE layers the last are streamed whole through a
  ring of buffers, in prefill and decode alike; all experts of the others are resident.

  Attributes:
    enabled: serve so. Slots and staging then only give the budget where `group_layers` is 0; of
      the residency's other settings only `reset_between_requests` is used.
    group_layers: MoE layers of a group, >= 0; 0: the choice that keeps most layers resident while
      these and the ring need no more bytes than all slots and, where it is enabled, staging.
    streamed_layers: of each group the last so many are streamed, 0..group_layers.
    prefetch_step: layer buffers of the ring, >= 1; the copy of the streamed layer i + prefetch_step
      starts after layer i. At most 2 where engine.layer_loop is scanned.
  """

  enabled: bool = False
  group_layers: int = 0
  streamed_layers: int = 0
  prefetch_step: int = 2


@dataclasses.dataclass
class ResidencyConfig:
  """Which experts stay on the device.

  Attributes:
    policy: which expert leaves a full cache: rhac, lru, lfu, fifo, random, or static (none does).
    slots_per_layer: experts of each MoE layer that the device holds, 1..num_experts; unused where
      `slots` is set.
    slots: the same for each MoE layer by itself, in layer order; empty: `slots_per_layer`
      everywhere.
    allocation: JSON file of `moecore allocate` that gives `slots`; empty: none.
    is_uniform: spread the total of `slots` or `allocation` evenly, rounded down.
    all_resident: hold every expert on the device; the four above are then unused.
    rhac: settings of the policy `rhac`.
    prefetch: copies ahead of the routing.
    substitution_threshold: alpha of approximate expert substitution in decode, 0 <= alpha < 1; 0 is
      exact.
    staging: how prefill brings in the layers of long prompts.
    layer_prefetch: serve by streaming whole layers instead.
    reset_between_requests: empty the cache before each request instead of keeping what is resident.
    profiles: file of `moecore profile` that ranks the experts by the domain of each request; empty:
      none.
  """

  policy: str = "rhac"
  slots_per_layer: int = 8
  slots: tuple[int, ...] = ()
  allocation: str = ""
  is_uniform: bool = False
  all_resident: bool = False
  rhac: RhacConfig = dataclasses.field(default_factory=RhacConfig)
  prefetch: PrefetchConfig = dataclasses.field(default_factory=PrefetchConfig)
  substitution_threshold: float = 0.0
  staging: StagingConfig = dataclasses.field(default_factory=StagingConfig)
  layer_prefetch: LayerPrefetchConfig = dataclasses.field(default_factory=LayerPrefetchConfig)
  reset_between_requests: bool = False
  profiles: str = ""


@dataclasses.dataclass
class EngineConfig:
  """Shapes and formats of the compiled programs.

  Attributes:
    batch_size: requests decoded together, >= 1.
    context_tokens: capacity of one request, prompt and output together; a multiple of
      kv_block_tokens, at most the model's context.
    prefill_buckets: chunk lengths that prefill is compiled for, ascending; a longer prompt is cut
      in chunks of the last.
    prefill_block_tokens: tokens that a layer takes at a time, >= 2; a longer bucket is a multiple.
    kv_block_tokens: tokens of one block of the attention loop, >= 1.
    dtype: activations and dense weights, float32 or bfloat16.
    expert_format: storage of routed experts: float32, bfloat16, w8a8 (int8 weights by output
      channel, int8 activations) or w4a8 (int4 weights; w4a8_g128: by groups of 128 inputs, also 32,
      64, 256); no wider than dtype.
    dense_format: storage of the linear maps of decoder layers: float (dtype), or w8a8 (int8 weights
      by output channel, int8 activations), made while loading.
    layer_loop: unrolled (fast steps) or scanned (fast compilation of deep models: MoE layers that
      are equal or take turns are one loop, and staged together, from their largest threshold).
  """

  batch_size: int = 1
  context_tokens: int = 512
  prefill_buckets: tuple[int, ...] = (64,)
  prefill_block_tokens: int = 2048
  kv_block_tokens: int = 128
  dtype: str = "float32"
  expert_format: str = "float32"
  dense_format: str = "float"
  layer_loop: str = "unrolled"


@dataclasses.dataclass
class SamplingConfig:
  """How the next token is drawn.

  Attributes:
    temperature: 0 is greedy, >= 0.
    top_k: draw among this many likeliest tokens; 0: among all.
    top_p: draw among the likeliest tokens that together have this probability, 0 < top_p <= 1.
    seed: seed of the random numbers, >= 0.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0


@dataclasses.dataclass
class DeviceConfig:
  """The accelerator's memory.

  Attributes:
    memory_bytes: device memory that may be used; 0: whatever the device has.
    usable_frac: share of memory_bytes that may be filled, 0 < usable_frac <= 1.
    host_memory_bytes: pinned host memory that may be used; 0: without limit.
  """

  memory_bytes: int = 0
  usable_frac: float = 0.95
  host_memory_bytes: int = 0


@dataclasses.dataclass
class EvalConfig:
  """The batch evaluation.

  Attributes:
    tasks: names of the tasks, run one after another.
    systems: systems compared, of moecore, lod, layer_prefetch, all_resident and the variants; each
      answers every item.
    variants: further systems: name to the residency fields that it changes, such as {"lfu":
      {"residency.policy": "lfu"}}.
    items_per_task: the first so many items of each task; 0: all.
    max_new_tokens: cap on the tokens of an answer; 0: each item's own.
  """

  tasks: tuple[str, ...] = ("math", "qa", "code", "agent")
  systems: tuple[str, ...] = SYSTEMS
  variants: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  items_per_task: int = 0
  max_new_tokens: int = 0


@dataclasses.dataclass
class TrainConfig:
  """Training from scratch.

  The model's shapes are those of `model.published_config`.

  Attributes:
    seed: seed of initialisation, text and order, >= 0.
    num_steps: steps in all, >= 1.
    batch_rows: rows of packed documents in a step, >= 1.
    row_tokens: tokens of a row; a document is never cut, so at least its longest, >= 128.
    learning_rate: peak of the schedule, > 0; it ends at a hundredth.
    warmup_steps: steps of linear warm-up, >= 0; a cosine follows.
    weight_decay: of matrices, decoupled, >= 0.
    mtp_weight: weight of the loss of the multi-token-prediction layer, >= 0.
    balance_rate: change of an expert's selection bias a step, towards equal loads, >= 0.
    capacity_factor: tokens that an expert takes in a step, as a multiple of the mean, >= 1.
    checkpoint_every: steps from one checkpoint and held-out evaluation to the next, >= 1.
  """

  seed: int = 0
  num_steps: int = 2000
  batch_rows: int = 32
  row_tokens: int = 128
  learning_rate: float = 3e-3
  warmup_steps: int = 100
  weight_decay: float = 0.05
  mtp_weight: float = 0.2
  balance_rate: float = 1e-3
  capacity_factor: float = 1.5
  checkpoint_every: int = 100


@dataclasses.dataclass
class RunConfig:
  """Everything that a run can be told.

  Attributes:
    model: which model is run.
    residency: which experts stay on the device.
    engine: shapes and formats of the compiled programs.
    sampling: how the next token is drawn.
    device: the accelerator's memory.
    eval: the batch evaluation.
    train: training from scratch.
  """

  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  residency: ResidencyConfig = dataclasses.field(default_factory=ResidencyConfig)
  engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
  sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
  device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
  eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
  train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

  def validate(self) -> None:
    """Checks what can be checked without a model.

    Raises:
      ValueError: a field has the wrong type or is out of range; says which, what was got, expected,
        and what to do.
    """
    for name, kind, value in leaves(self):
      _check_type(name, kind, value)
    res, eng, rhac = self.residency, self.engine, self.residency.rhac
    _one_of("residency.policy", res.policy, POLICIES)
    _at_least("residency.slots_per_layer", res.slots_per_layer, 1)
    for i, slots in enumerate(res.slots):
      _at_least(f"residency.slots[{i}]", slots, 1)
    if res.slots and res.allocation:
      raise _fault(
        "residency.allocation", res.allocation, "none beside residency.slots", "drop one"
      )
    _within("residency.rhac.window", rhac.window, 1, 32)
    if not 0 <= rhac.decay < 1:
      raise _fault("residency.rhac.decay", rhac.decay, "0 <= decay < 1", "try 0.98")
    self._validate_prefetch()
    self._validate_layer_prefetch()
    for name in ("frequency_weight", "average_weight", "score_weight", "age_weight", "age_cap"):
      _at_least(f"residency.rhac.{name}", getattr(rhac, name), 0)
    _at_least("engine.batch_size", eng.batch_size, 1)
    _at_least("engine.kv_block_tokens", eng.kv_block_tokens, 1)
    _at_least("engine.context_tokens", eng.context_tokens, 1)
    block = eng.kv_block_tokens
    if eng.context_tokens % block:
      expected = f"a multiple of engine.kv_block_tokens = {block}"
      fix = f"use {-(-eng.context_tokens // block) * block}"
      raise _fault("engine.context_tokens", eng.context_tokens, expected, fix)
    buckets = eng.prefill_buckets
    if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
      raise _fault("engine.prefill_buckets", buckets, "ascending positive lengths", "try (64,)")
    if buckets[-1] > eng.context_tokens:
      expected = f"lengths up to engine.context_tokens = {eng.context_tokens}"
      raise _fault("engine.prefill_buckets", buckets, expected, "drop the longer ones")
    tokens = eng.prefill_block_tokens
    _at_least("engine.prefill_block_tokens", tokens, 2)
    for uneven in (n for n in buckets if n > tokens and n % tokens):
      expected = f"multiples of engine.prefill_block_tokens = {tokens} beyond it"
      fix = f"use {-(-uneven // tokens) * tokens} for {uneven}"
      raise _fault("engine.prefill_buckets", buckets, expected, fix)
    _one_of("engine.dtype", eng.dtype, ("float32", "bfloat16"))
    _one_of("engine.expert_format", eng.expert_format, EXPERT_FORMATS)
    if eng.dtype == "bfloat16" and eng.expert_format == "float32":
      # Some compilers would convert the whole pool outside the loop over experts.
      expected = "bfloat16, for engine.dtype is bfloat16"
      raise _fault("engine.expert_format", eng.expert_format, expected, "set both to bfloat16")
    _one_of("engine.dense_format", eng.dense_format, DENSE_FORMATS)
    _one_of("engine.layer_loop", eng.layer_loop, ("unrolled", "scanned"))
    _at_least("sampling.temperature", self.sampling.temperature, 0)
    _at_least("sampling.top_k", self.sampling.top_k, 0)
    _share("sampling.top_p", self.sampling.top_p)
    _within("sampling.seed", self.sampling.seed, 0, 2**31 - 1)
    _at_least("device.memory_bytes", self.device.memory_bytes, 0)
    _share("device.usable_frac", self.device.usable_frac)
    _at_least("device.host_memory_bytes", self.device.host_memory_bytes, 0)
    for name in ("tasks", "systems"):
      names = getattr(self.eval, name)
      if not names or len(set(names)) < len(names):
        raise _fault(f"eval.{name}", names, "distinct names, at least one", "list each once")
    self._validate_variants()
    for system in self.eval.systems:
      _one_of("eval.systems", system, self.systems)
    _at_least("eval.items_per_task", self.eval.items_per_task, 0)
    _at_least("eval.max_new_tokens", self.eval.max_new_tokens, 0)
    self._validate_train()

  def _validate_variants(self) -> None:
    fields = [name for name, _, _ in leaves(self) if name.startswith("residency.")]
    for variant, changes in self.eval.variants.items():
      name = f"eval.variants[{variant!r}]"
      if variant in SYSTEMS:
        raise _fault(name, changes, f"a name besides {', '.join(SYSTEMS)}", "rename it")
      if not isinstance(changes, dict) or not set(changes) <= set(fields):
        raise _fault(name, changes, "a dict of residency fields", "see moecore eval --help")

  def _validate_prefetch(self) -> None:
    res, prefetch = self.residency, self.residency.prefetch
    _at_least("residency.prefetch.max_experts", prefetch.max_experts, 0)
    for i, count in enumerate(prefetch.link_experts):
      _at_least(f"residency.prefetch.link_experts[{i}]", count, 0)
    _one_of("residency.prefetch.predictor_input", prefetch.predictor_input, ("literal", "renorm"))
    _one_of("residency.staging.fill", res.staging.fill, ("none", "profile", "prompt", "both"))
    _one_of("residency.prefetch.placement", prefetch.placement, ("in_flight", "slot"))
    _within("residency.prefetch.min_useful_frac", prefetch.min_useful_frac, 0, 1)
    if not 0 <= prefetch.useful_decay < 1:
      got = prefetch.useful_decay
      raise _fault("residency.prefetch.useful_decay", got, "0 <= decay < 1", "try 0.95")
    if not 0 <= res.substitution_threshold < 1:
      got = res.substitution_threshold
      raise _fault("residency.substitution_threshold", got, "0 <= alpha < 1", "try 0.1")

  def _validate_layer_prefetch(self) -> None:
    ring, name = self.residency.layer_prefetch, "residency.layer_prefetch"
    _at_least(f"{name}.group_layers", ring.group_layers, 0)
    _within(f"{name}.streamed_layers", ring.streamed_layers, 0, ring.group_layers)
    _at_least(f"{name}.prefetch_step", ring.prefetch_step, 1)
    if self.engine.layer_loop == "scanned" and ring.prefetch_step > 2:
      expected = "1 or 2, for engine.layer_loop is scanned"
      raise _fault(f"{name}.prefetch_step", ring.prefetch_step, expected, "set it to unrolled")
    if ring.enabled and self.residency.all_resident:
      raise _fault(f"{name}.enabled", True, "none beside residency.all_resident", "drop one")

  def _validate_train(self) -> None:
    train = self.train
    _at_least("train.seed", train.seed, 0)
    _at_least("train.row_tokens", train.row_tokens, 128)
    for name in ("num_steps", "batch_rows", "capacity_factor", "checkpoint_every"):
      _at_least(f"train.{name}", getattr(train, name), 1)
    for name in ("warmup_steps", "weight_decay", "mtp_weight", "balance_rate"):
      _at_least(f"train.{name}", getattr(train, name), 0)
    if not train.learning_rate > 0:
      raise _fault("train.learning_rate", train.learning_rate, "above 0", "try 3e-3")

  def freeze(
    self, model_spec: specs.ModelSpec, fingerprint: str = ""
  ) -> tuple[specs.ResidencySpec, specs.EngineSpec, specs.DeviceSpec]:
    """Validates every field, against the model too, and gives the specs of programs.

    Args:
      model_spec: the model that will be run.
      fingerprint: of its weights; "": not known yet.

    Returns:
      The residency with one number of slots for each MoE layer, the engine, and the device.

    Raises:
      ValueError: as `validate`; or the slots or the context do not fit the model, or the
        allocation was made for other weights.
    """
    self.validate()
    if self.engine.context_tokens > model_spec.max_context_tokens:
      expected = f"at most {model_spec.max_context_tokens}, the model's context"
      raise _fault("engine.context_tokens", self.engine.context_tokens, expected, "lower it")
    sampling = specs.SamplingSpec(**_fields(self.sampling))
    engine = specs.EngineSpec(**_fields(self.engine), sampling=sampling)
    residency = self._freeze_residency(model_spec, fingerprint)
    return residency, engine, specs.DeviceSpec(**_fields(self.device))

  def _freeze_residency(self, model_spec: specs.ModelSpec, fingerprint: str) -> specs.ResidencySpec:
    res = self.residency
    source = "allocation" if res.allocation else "slots"
    experts = [_num_experts(model_spec, layer) for layer in model_spec.moe_layers]
    if res.all_resident:
      slots = tuple(experts)
    elif slots := self._slots_by_layer(fingerprint):
      if len(slots) != len(experts):
        expected = f"one number for each of the {len(experts)} MoE layers"
        raise _fault(f"residency.{source}", slots, expected, "or set residency.slots_per_layer")
      if res.is_uniform:
        slots = (sum(slots) // len(slots),) * len(slots)
    else:
      slots = (res.slots_per_layer,) * len(experts)
    for i, (have, most) in enumerate(zip(slots, experts, strict=True)):
      if have > most:
        name = f"{source}[{i}]" if res.slots or res.allocation else "slots_per_layer"
        expected = f"1..{most}, the experts of MoE layer {i}"
        fix = "lower it, or set residency.all_resident"
        raise _fault(f"residency.{name}", have, expected, fix)
    if res.layer_prefetch.enabled:
      return self._freeze_layer_prefetch(model_spec, slots)
    return specs.ResidencySpec(
      policy=typing.cast(specs.PolicyName, res.policy),
      slots=slots,
      rhac=specs.RhacSpec(**_fields(res.rhac)),
      prefetch=self._freeze_prefetch(model_spec),
      substitution_threshold=res.substitution_threshold,
      staging=specs.StagingSpec(**_fields(res.staging)),
      reset_between_requests=res.reset_between_requests,
    )

  def _freeze_layer_prefetch(
    self, model_spec: specs.ModelSpec, slots: tuple[int, ...]
  ) -> specs.ResidencySpec:
    """Returns the residency that streams layers; `slots` and staging give its budget."""
    ring, layers = self.residency.layer_prefetch, []
    for layer in model_spec.moe_layers:
      group = model_spec.expert_groups[model_spec.group_of(layer)[0]]
      layers.append((group.num_experts, group.params_per_expert))
    size, streamed = ring.group_layers, ring.streamed_layers
    if not size:
      costs = [count * each for count, each in layers]
      budget = sum(k * each for k, (_, each) in zip(slots, layers, strict=True))
      budget += 2 * max(costs) * self.residency.staging.enabled
      size, streamed = planner.streamed_groups(costs, budget, ring.prefetch_step)
    spec = specs.LayerPrefetchSpec(size, streamed, ring.prefetch_step)
    counts = [0 if spec.streams(i) else count for i, (count, _) in enumerate(layers)]
    return specs.ResidencySpec(
      "static",
      tuple(counts),
      layer_prefetch=spec,
      reset_between_requests=self.residency.reset_between_requests,
    )

  def _slots_by_layer(self, fingerprint: str = "") -> tuple[int, ...]:
    """Returns the slots that the config gives layer by layer, () where they are uniform."""
    path = self.residency.allocation
    if not path:
      return self.residency.slots
    made = allocation_file.read(path)
    if fingerprint and made.fingerprint and fingerprint != made.fingerprint:
      expected = f"one for the weights {fingerprint[:12]}, not {made.fingerprint[:12]}"
      raise _fault("residency.allocation", path, expected, "run moecore allocate again")
    return made.slots

  def _freeze_prefetch(self, model_spec: specs.ModelSpec) -> specs.PrefetchSpec:
    prefetch, fan_outs = (
      self.residency.prefetch,
      [g.num_experts_per_tok for g in model_spec.expert_groups],
    )
    if prefetch.max_experts > min(fan_outs):
      expected = f"0..{min(fan_outs)}, the experts of a token"
      raise _fault("residency.prefetch.max_experts", prefetch.max_experts, expected, "lower it")
    bounds, layers = prefetch.link_experts, len(model_spec.moe_layers)
    if bounds and len(bounds) != layers:
      expected = f"one number for each of the {layers} MoE layers"
      raise _fault("residency.prefetch.link_experts", bounds, expected, "or leave it empty")
    return specs.PrefetchSpec(**_fields(prefetch))

  @property
  def systems(self) -> tuple[str, ...]:
    """The names that `for_system` takes."""
    return (*SYSTEMS, *self.eval.variants)

  def for_system(self, system: str) -> "RunConfig":
    """Returns a copy that serves the same model as another system, on one expert budget.

    Args:
      system: `moecore` (as configured), `lod` (LRU, the same total of slots spread uniformly),
        `layer_prefetch`, `all_resident` or a variant.

    Raises:
      ValueError: the system is unknown.
    """
    _one_of("eval.systems", system, self.systems)
    config = copy.deepcopy(self)
    for name, value in (_CHANGES | self.eval.variants)[system].items():
      *path, last = name.split(".")
      setattr(functools.reduce(getattr, path, config), last, copy.deepcopy(value))
    return config

  def to_dict(self) -> dict[str, Any]:
    """Returns the tree as nested dicts of JSON types, tuples as lists."""
    return _plain(dataclasses.asdict(self))


def from_plain(kind: Any, value: Any) -> Any:
  """Returns what `to_dict`, or `dataclasses.asdict` and JSON, made of a tree of dataclasses with
  fields of simple types, as it was.

  Args:
    kind: type of the tree.
    value: what became of it; what is left out of it has its default.

  Raises:
    ValueError: a field is unknown.
  """
  if not dataclasses.is_dataclass(kind):
    return tuple(value) if isinstance(value, list) else value
  if value is None:
    return None
  hints = typing.get_type_hints(kind)
  unknown = sorted(set(value) - set(hints))
  if unknown:
    raise ValueError(f"{kind.__name__} has an unknown field {unknown[0]!r}")
  make: Any = kind
  return make(**{name: from_plain(hints[name], field) for name, field in value.items()})


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
  """Yields (dotted name, annotated type, value) of each leaf of a tree of dataclasses."""
  for field in dataclasses.fields(config):
    name, value = prefix + field.name, getattr(config, field.name)
    if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
      if not isinstance(value, field.type):
        raise _fault(name, value, f"a {field.type.__name__}", "change its fields instead")
      yield from leaves(value, name + ".")
    else:
      yield name, field.type, value


def _fields(config: Any) -> dict[str, Any]:
  return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  return value


def _num_experts(model_spec: specs.ModelSpec, layer: int) -> int:
  group, _ = model_spec.group_of(layer)
  return model_spec.expert_groups[group].num_experts


def _check_type(name: str, kind: Any, value: Any) -> None:
  if typing.get_origin(kind) is tuple:
    element = typing.get_args(kind)[0]
    if not isinstance(value, tuple) or not all(_is_a(item, element) for item in value):
      raise _fault(name, value, f"a tuple of {element.__name__}", "write (a, b) or (a,)")
  elif not _is_a(value, typing.get_origin(kind) or kind):
    raise _fault(name, value, f"a value of type {kind.__name__}", "correct its type")


def _is_a(value: Any, kind: type) -> bool:
  if isinstance(value, bool):
    return kind is bool
  return isinstance(value, int | float if kind is float else kind)


def _fault(field: str, got: object, expected: str, next_step: str) -> ValueError:
  return ValueError(f"config field {field}: got {got!r}, expected {expected}; {next_step}")


def _one_of(field: str, got: str, known: tuple[str, ...]) -> None:
  if got not in known:
    raise _fault(field, got, "one of " + ", ".join(known), "choose one of these")


def _at_least(field: str, got: float, least: int) -> None:
  if not got >= least:
    raise _fault(field, got, f"at least {least}", "raise it")


def _within(field: str, got: float, least: int, most: int) -> None:
  if not least <= got <= most:
    raise _fault(field, got, f"{least}..{most}", "choose a value in this range")


def _share(field: str, got: float) -> None:
  if not 0 < got <= 1:
    raise _fault(field, got, "a share above 0 and at most 1", "choose a value in this range")
