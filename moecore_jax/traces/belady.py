"""Belady's offline policy: the expert whose next use lies farthest ahead leaves.

It bounds every policy that must load what it misses: for each counting rule of `replay` the hits
are the most that any choice of victims gives. What it observes in place of scores are the next uses
of the chosen experts, counted in tokens, or in single choices where these are served one by one.

Source: Belady (1966), "A study of replacement algorithms for a virtual-storage computer".
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from moecore_jax.residency import base

NEVER = 2**24
"""Time of a use that does not come: the end of float32's exact integers."""


def belady() -> base.Policy:
  """Returns the policy.

  The state is float32 [N], minus the time of each expert's next use; where experts are resident at
  the start it must hold their first uses. `scores` of `observe` are the next uses of `topk_ids`.
  """

  def init(num_experts: int) -> Float32[Array, "N"]:
    return jnp.full(num_experts, -NEVER, jnp.float32)

  def observe(
    state: Float32[Array, "N"],
    topk_ids: Int32[Array, "1 A"],
    scores: Float32[Array, "1 A"],
    valid: Bool[Array, "1"],
  ) -> Float32[Array, "N"]:
    chosen = base.matches(topk_ids[0], state.shape[0]) & valid[0]  # [A, N]
    coming = jnp.sum(jnp.where(chosen, -scores[0, :, None], 0.0), axis=0)
    return jnp.where(jnp.any(chosen, axis=0), coming, state)

  return base.Policy(
    init, observe, lambda state, expert: state, lambda state, key: state, evicts=True
  )


def next_uses(
  experts: np.ndarray, num_experts: int, one_by_one: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Returns when experts are used, in tokens, or in single choices.

  Args:
    experts: int [T, L, A], ids outside 0..N-1 are none.
    num_experts: N.
    one_by_one: count choices instead of tokens.

  Returns:
    float32 [T, L, A], the next use after each one, and float32 [L, N], the first; NEVER for none.

  Raises:
    ValueError: the trace is too long to count exactly.
  """
  num_tokens, num_layers, top_k = experts.shape
  uses = experts.transpose(1, 0, 2).reshape(num_layers, -1)  # [L, T * A]
  time = np.arange(uses.shape[1]) if one_by_one else np.repeat(np.arange(num_tokens), top_k)
  if uses.shape[1] >= NEVER:
    raise ValueError(
      f"the trace has {uses.shape[1]} choices a layer, expected less than {NEVER}; cut it"
    )
  following = np.full(uses.shape, NEVER, np.float32)
  first = np.full((num_layers, num_experts), NEVER, np.float32)
  for layer in range(num_layers):
    order = np.argsort(uses[layer], kind="stable")
    ids, times = uses[layer, order], time[order]
    is_same = ids[1:] == ids[:-1]
    following[layer, order[:-1][is_same]] = times[1:][is_same]
    begins = np.append(True, ~is_same) & (ids < num_experts) if len(ids) else np.zeros(0, bool)
    first[layer, ids[begins]] = times[begins]
  return following.reshape(num_layers, num_tokens, top_k).transpose(1, 0, 2), first
