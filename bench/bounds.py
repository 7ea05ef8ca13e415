"""What a compiled program may need: the bound on temporary device bytes, in a formula, and on
compile time."""

import dataclasses

from moecore_jax.models.experts import expert_bytes
from moecore_jax.runtime import plan
from moecore_jax.specs import EngineSpec, ModelSpec


@dataclasses.dataclass(frozen=True)
class TempBound:
  """Most temporary bytes that a program may need; none of its terms knows slots or context
  capacity.

  Attributes:
    expert_bytes: the largest stored expert.
    dense_matrix_bytes: the largest dense matrix of a layer.
    activation_bytes: see `runtime.plan.activation_costs`.
  """

  expert_bytes: int
  dense_matrix_bytes: int
  activation_bytes: int

  @property
  def total_bytes(self) -> int:
    return (
      plan.TEMPORARY_EXPERTS * self.expert_bytes + self.dense_matrix_bytes + self.activation_bytes
    )


def temp_bound(model: ModelSpec, engine: EngineSpec, tokens: int, head_tokens: int) -> TempBound:
  """Returns the bound of a program.

  Args:
    model: the model.
    engine: shapes and formats.
    tokens: tokens that a step computes.
    head_tokens: tokens whose logits it computes.
  """
  experts = [expert_bytes(group, engine.expert_format) for group in model.expert_groups]
  costs = plan.activation_costs(model, engine)
  return TempBound(
    expert_bytes=max(experts, default=0),
    dense_matrix_bytes=plan.dense_costs(model, engine).largest_bytes,
    activation_bytes=tokens * costs.token_bytes
    + engine.batch_size * costs.row_bytes
    + head_tokens * costs.head_bytes,
  )
