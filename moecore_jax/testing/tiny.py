"""Tiny random models and a driver that decodes with them, for tests of the runtime."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moecore_jax import memory
from moecore_jax.models.experts import HostExpert
from moecore_jax.models.transformer import Transformer
from moecore_jax.quantization import formats
from moecore_jax.residency.profiles import Profile, ProfileSet
from moecore_jax.runtime.engine import Engine
from moecore_jax.specs import (
  DenseSpec,
  EngineSpec,
  LayerSpec,
  MLASpec,
  ModelSpec,
  MoESpec,
  ResidencySpec,
  RopeSpec,
  RouterSpec,
)


def tiny_spec(
  *,
  num_moe_layers: int = 2,
  num_dense_layers: int = 1,
  num_experts: int = 8,
  num_experts_per_tok: int = 2,
  num_groups: int = 1,
  topk_groups: int = 1,
  shared_dim: int = 16,
  embed_dim: int = 32,
  expert_dim: int = 16,
  vocab_size: int = 64,
  q_lora_rank: int | None = None,
) -> ModelSpec:
  """Returns a DeepSeek-V3-like spec of a few thousand parameters."""
  attention = MLASpec(2, q_lora_rank, 16, 8, 8, 8, RopeSpec(8))
  router = RouterSpec(
    num_experts, num_experts_per_tok, num_groups, topk_groups, norm_topk=True, scale=1.5
  )
  layers = (LayerSpec(attention, DenseSpec(48)),) * num_dense_layers
  layers += (LayerSpec(attention, MoESpec(router, expert_dim, shared_dim)),) * num_moe_layers
  return ModelSpec("deepseek_v3", vocab_size, embed_dim, layers, max_context_tokens=256)


class Model(NamedTuple):
  """A random model in memory: spec, dense parameters by layer, and banks in pinned host memory."""

  spec: ModelSpec
  params: dict
  banks: tuple[dict[str, jax.Array], ...]


def random_model(spec: ModelSpec, engine: EngineSpec, seed: int = 0) -> Model:
  """Returns a model with lively routers: random biases and kernels whose selections differ."""
  rng = np.random.default_rng(seed)
  abstract = nnx.eval_shape(
    lambda: Transformer(spec, dtype=jnp.dtype(engine.dtype), rngs=nnx.Rngs(0))
  )
  _, bank, dense = nnx.split(abstract, HostExpert, ...)

  def draw(path, leaf) -> np.ndarray:
    values = rng.normal(size=leaf.shape).astype(np.float32)
    name = path[-1].key
    if name == "scale":
      return 1 + 0.1 * values
    if name == "bias":  # of a router
      return 0.1 * values
    return values if name == "embedding" else values / np.sqrt(leaf.shape[-2])

  params = jax.tree.map_with_path(
    lambda path, leaf: jnp.asarray(draw(path, leaf), leaf.dtype), nnx.to_pure_dict(dense)
  )
  host = memory.placement("pinned_host")
  banks = [
    jax.tree.map_with_path(
      lambda path, leaf, group=group: jax.device_put(
        formats.pack(draw(path, leaf), engine.expert_format, group.has_bias), host
      ),
      arrays,
    )
    for group, (_, arrays) in zip(
      spec.expert_groups, sorted(nnx.to_pure_dict(bank)["experts"].items()), strict=True
    )
  ]
  return Model(spec, params, tuple(banks))


def make_engine(
  model: Model, residency: ResidencySpec, engine: EngineSpec, **kwargs: Any
) -> Engine:
  """Returns an engine over a random model; further arguments go to `Engine`."""
  return Engine(model.spec, residency, engine, model.params, model.banks, **kwargs)


def random_profiles(
  spec: ModelSpec, domains: Sequence[str] = ("math", "qa"), seed: int = 0
) -> ProfileSet:
  """Returns profiles of a model by which each domain likes other experts."""
  rng = np.random.default_rng(seed)
  groups = [spec.expert_groups[spec.group_of(layer)[0]] for layer in spec.moe_layers]
  scores = rng.normal(size=(len(domains), len(groups), max(g.num_experts for g in groups)))
  for layer, group in enumerate(groups):
    scores[:, layer, group.num_experts :] = -np.inf
  profiles = (Profile(part, 7 + i) for i, part in enumerate(scores.astype(np.float32)))
  return ProfileSet(dict(zip(domains, profiles, strict=True)), "random")


class Trace(NamedTuple):
  """What a run of `decode_all` gave: logits of every prompt token and of every decoded token, and
  the tokens."""

  prompt_logits: list[np.ndarray]
  logits: np.ndarray
  tokens: np.ndarray


def decode_all(
  engine: Engine, prompts: Sequence[Sequence[int]], steps: int, domains: Sequence[str | None] = ()
) -> Trace:
  """Prefills one prompt a row, then decodes `steps` tokens in every row."""
  prefilled = [
    engine.prefill(r, p, steps + 1, all_logits=True, domain=domain)
    for r, (p, domain) in enumerate(zip(prompts, domains or (None,) * len(prompts), strict=True))
  ]
  outs = [jax.device_get(engine.decode_step()) for _ in range(steps)]
  tokens = np.stack([[p.token for p in prefilled], *(out.token[: len(prompts)] for out in outs)])
  logits = np.stack([out.logits[: len(prompts)] for out in outs])
  return Trace([p.logits for p in prefilled], logits, tokens)


def random_prompts(spec: ModelSpec, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
  """Returns prompts of the given lengths."""
  rng = np.random.default_rng(seed)
  return [rng.integers(0, spec.vocab_size, n).tolist() for n in lengths]
