"""What a compiled program may need: the bound on temporary device bytes, in a formula."""

import dataclasses

from moecore_jax.models.experts import expert_bytes
from moecore_jax.runtime import plan
from moecore_jax.specs import EngineSpec, ModelSpec


@dataclasses.dataclass(frozen=True)
class TempBound:
  """Most temporary bytes that a program may need; none of its terms knows slots or context
  capacity.

  Attributes:
    num_experts: experts that may lie there.
    expert_bytes: the largest stored expert.
    num_layers: layers whose experts may lie there.
    layer_bytes: all stored experts of the largest layer.
    dense_matrix_bytes: the largest dense matrix of a layer.
    activation_bytes: see `runtime.plan.activation_costs`.
  """

  num_experts: int
  expert_bytes: int
  num_layers: int
  layer_bytes: int
  dense_matrix_bytes: int
  activation_bytes: int

  @property
  def total_bytes(self) -> int:
    return (
      self.num_experts * self.expert_bytes
      + self.num_layers * self.layer_bytes
      + self.dense_matrix_bytes
      + self.activation_bytes
    )

  def __str__(self) -> str:
    return (
      f"{self.num_layers} layers of {self.layer_bytes} + {self.num_experts} experts of "
      f"{self.expert_bytes} + dense matrix of {self.dense_matrix_bytes} + activations of "
      f"{self.activation_bytes}"
    )


def temp_bound(
  model: ModelSpec, engine: EngineSpec, name: str, prefetch_experts: int = 0
) -> TempBound:
  """Returns the bound of a program.

  Args:
    model: the model.
    engine: shapes and formats.
    name: of the program, one of abstract.program_names.
    prefetch_experts: most experts that are copied ahead for a layer.
  """
  kind, _, length = name.partition("_")
  tokens, head_tokens = (int(length), 1) if length else (engine.batch_size,) * 2
  experts = [expert_bytes(group, engine.expert_format) for group in model.expert_groups]
  layers = [n * group.num_experts for n, group in zip(experts, model.expert_groups, strict=True)]
  costs, block = plan.activation_costs(model, engine), engine.prefill_block_tokens
  is_staged = kind == "staged"
  return TempBound(
    num_experts=1 if is_staged else plan.TEMPORARY_EXPERTS + prefetch_experts,
    expert_bytes=max(experts, default=0),
    num_layers=2 if is_staged else 0,
    layer_bytes=max(layers, default=0),
    dense_matrix_bytes=plan.dense_costs(model, engine).largest_bytes,
    activation_bytes=min(tokens, block) * costs.token_bytes
    + (tokens > block) * tokens * costs.stream_bytes
    + engine.batch_size * costs.row_bytes
    + head_tokens * costs.head_bytes,
  )
