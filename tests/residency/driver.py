"""Uses the residency functions in the order in which a decode step does, without weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moecore_jax import residency


class StepLog(NamedTuple):
  """What one step did to a layer.

  Attributes:
    plan: the step's plan.
    slots: int32 [U], row each member was loaded into; -1 transient, -2 no load at this index.
    evicted: int32 [U], expert that left for it, -1 if none.
  """

  plan: residency.StepPlan
  slots: jax.Array
  evicted: jax.Array


def run_step(policy, max_slots, tables, state, layer, topk_ids, scores, valid, key):
  """Observes, plans and loads the tokens of one step; returns (tables, state, StepLog)."""
  state = policy.observe(state, topk_ids, scores, valid)
  resident = residency.resident(tables, layer)
  plan = residency.plan_step(topk_ids, valid, resident, tables.num_slots[layer], policy.evicts)
  size = plan.order.shape[0]

  def visit(i, carry):
    tables, state, slots, evicted = carry
    expert = plan.order[i]
    absent = tables.expert_to_slot[layer, jnp.minimum(expert, scores.shape[1] - 1)] < 0
    loads = (i < plan.num_experts) & absent
    held = residency.protected(plan) if policy.evicts else jnp.ones_like(resident)
    slot, victim = residency.choose_slot(
      tables, layer, policy.priority(state, jax.random.fold_in(key, i)), held, max_slots
    )
    placed = loads & (slot >= 0)
    tables = residency.place(tables, layer, expert, jnp.where(placed, slot, -1))
    state = jax.tree.map(
      lambda new, old: jnp.where(placed, new, old), policy.placed(state, expert), state
    )
    slots = slots.at[i].set(jnp.where(loads, slot, -2))
    return tables, state, slots, evicted.at[i].set(jnp.where(placed, victim, -1))

  empty = jnp.full(size, -2, jnp.int32), jnp.full(size, -1, jnp.int32)
  tables, state, slots, evicted = lax.fori_loop(0, size, visit, (tables, state, *empty))
  return tables, state, StepLog(plan, slots, evicted)


def run_stream(policy, max_slots, tables, layer, topk_ids, scores, valid, key):
  """Runs S steps on one layer from a cold start.

  Args:
    topk_ids: int32 [S, T, A]; scores: float32 [S, T, N]; valid: bool [S, T].

  Returns:
    (tables, state, StepLog), each with a leading axis of S: what holds after every step.
  """

  def body(carry, step):
    index, *tokens = step
    tables, state, log = run_step(
      policy, max_slots, *carry, layer, *tokens, jax.random.fold_in(key, index)
    )
    return (tables, state), (tables, state, log)

  start = tables, policy.init(scores.shape[-1])
  steps = jnp.arange(topk_ids.shape[0]), topk_ids, scores, valid
  return lax.scan(body, start, steps)[1]


def make_streams(num_experts, top_k, num_tokens, num_steps, rng):
  """Returns {name: (topk_ids, scores, valid)} of random and adversarial streams."""
  shape = (num_steps, num_tokens)
  scores = rng.normal(size=(*shape, num_experts)).astype(np.float32)
  skewed = scores + np.linspace(2, 0, num_experts, dtype=np.float32)
  masked = np.where(rng.random(scores.shape) < 0.3, -np.inf, scores).astype(np.float32)
  masked[..., :top_k] = scores[..., :top_k]  # never fewer candidates than selections
  count = np.arange(num_steps * num_tokens * top_k).reshape(*shape, top_k)
  cyclic = count % num_experts
  phase = (np.arange(num_steps) // 7 % 2)[:, None, None]
  flips = (np.arange(top_k) + phase * (num_experts // 2)) % num_experts
  all_valid = np.ones(shape, bool)
  some_valid = rng.random(shape) < 0.6

  def top(values):
    return np.argsort(-values, axis=-1, kind="stable")[..., :top_k]

  ids = {
    "random": (top(scores), scores, all_valid),
    "skewed": (top(skewed), skewed, all_valid),
    "masked": (top(masked), masked, all_valid),
    "padded": (top(skewed), skewed, some_valid),
    "cyclic": (cyclic, scores, all_valid),  # the worst case of LRU and FIFO
    "flips": (np.broadcast_to(flips, cyclic.shape), np.zeros_like(scores), all_valid),  # many ties
  }
  return {name: (i.astype(np.int32), s, v) for name, (i, s, v) in ids.items()}
