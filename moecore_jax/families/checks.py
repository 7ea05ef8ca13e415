"""What the numbers of a config.json must be to one another."""

from collections.abc import Iterator

from moecore_jax.specs import (
  CompressedSpec,
  GQASpec,
  LayerSpec,
  MLASpec,
  ModelSpec,
  MoESpec,
  RopeSpec,
  RouterSpec,
)


def check(spec: ModelSpec) -> None:
  """Checks a model that a config.json describes.

  Raises:
    ValueError: says what does not fit together.
  """
  if not spec.moe_layers:
    raise ValueError("config.json: no layer has routed experts; such models are not supported")
  for layer in dict.fromkeys((*spec.layers, *spec.mtp_layers)):
    for fault in _faults(layer):
      raise ValueError(f"config.json: {fault}")


def _faults(layer: LayerSpec) -> Iterator[str]:
  attention = layer.attention
  if isinstance(attention, MLASpec):
    yield from _of_rope(attention.rope, attention.qk_rope_head_dim)
    indexer = attention.indexer
  elif isinstance(attention, GQASpec):
    yield from _of_rope(attention.rope, attention.head_dim)
    yield from _of_parts("heads", attention.num_heads, "key heads", attention.num_kv_heads)
    indexer = None
  else:
    yield from _of_compressed(attention)
    indexer = attention.compression.indexer if attention.compression else None
  if indexer is not None:
    yield from _of_rope(indexer.rope, indexer.head_dim)
  if isinstance(layer.mlp, MoESpec):
    yield from _of_router(layer.mlp.router)


def _of_compressed(spec: CompressedSpec) -> Iterator[str]:
  yield from _of_rope(spec.rope, spec.head_dim)
  yield from _of_parts("heads", spec.num_heads, "o_groups", spec.o_groups)


def _of_router(router: RouterSpec) -> Iterator[str]:
  yield from _of_parts("experts", router.num_experts, "groups", router.num_groups)
  if router.topk_groups > router.num_groups:
    yield f"{router.topk_groups} of {router.num_groups} groups of experts cannot be chosen"
  candidates = router.num_experts // router.num_groups * router.topk_groups
  if router.num_experts_per_tok > candidates:
    yield f"a token cannot choose {router.num_experts_per_tok} of {candidates} experts"


def _of_rope(rope: RopeSpec, head_dim: int) -> Iterator[str]:
  if not 0 < rope.dim <= head_dim or rope.dim % 2:
    yield f"{rope.dim} components of a head cannot be rotated, it has {head_dim}"


def _of_parts(whole: str, count: int, part: str, parts: int) -> Iterator[str]:
  if count % parts:
    yield f"{count} {whole} cannot be shared by {parts} {part}"
