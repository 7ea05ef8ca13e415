"""Warm starts: the experts of every layer are ranked by the profile of the request that comes.

An admission copies no expert. Ranks of all domains lie on the device from the start, and one small
program puts those of a domain in the tables. What acts on them: slots are filled while layers are
staged, copies ahead in a prefill that loads on demand bring what is still missing, and ties and
prefill's evictions go by rank. While other rows decode, the signals and the residents stay.

Source: SPEC sections 4 and 5.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moecore_jax.config import RunConfig
from moecore_jax.memory import default_device
from moecore_jax.residency import profiles as profiles_lib
from moecore_jax.residency.base import PolicyState
from moecore_jax.residency.profiles import ProfileSet
from moecore_jax.runtime.program import Program
from moecore_jax.runtime.state import DecodeState
from moecore_jax.specs import ModelSpec


def read_profiles(config: RunConfig, model: ModelSpec, fingerprint: str = "") -> ProfileSet | None:
  """Reads the domain profiles of a config, None where it has or uses none.

  Args:
    config: `residency.profiles` names the file.
    model: that they must fit.
    fingerprint: of its weights; "": not known yet.

  Raises:
    ValueError: the file is missing, damaged, or of another model or other weights.
  """
  path = config.residency.profiles
  if not path or config.residency.layer_prefetch.enabled:
    return None
  experts = [model.expert_groups[model.group_of(i)[0]].num_experts for i in model.moe_layers]
  try:
    return profiles_lib.load(path, fingerprint or None, experts)
  except ValueError as error:
    raise ValueError(f"config field residency.profiles: {error}, or leave it empty") from None


class WarmStart:
  """Ranks experts by domain.

  Args:
    program: of the engine.
    profiles: of its model.

  Raises:
    ValueError: the profiles have other layers or experts than the model.
  """

  def __init__(self, program: Program, profiles: ProfileSet):
    self._program = program
    self._domains = {domain: i for i, domain in enumerate(profiles.domains)}
    all_profiles = [*map(profiles.lookup, profiles.domains), profiles.merged]
    model = program.model
    groups = model.expert_groups
    expected = len(model.moe_layers), max(group.num_experts for group in groups)
    if (got := profiles.merged.mean_scores.shape) != expected:
      raise ValueError(
        f"profiles have {list(got)} layers and experts, the model has {list(expected)}; "
        "profile again"
      )
    ranks = np.stack([profiles_lib.warm_rank(p.mean_scores) for p in all_profiles])
    index = {layer: i for i, layer in enumerate(model.moe_layers)}
    self.ranks = tuple(
      jax.device_put(
        ranks[:, [index[layer] for layer in group.layers], : group.num_experts], default_device()
      )
      for group in groups
    )
    """int32 [domains + 1, L, N] of each expert group, device memory; the last is the merged one."""

  def __call__(
    self, state: DecodeState, row: int, domain: str | None
  ) -> tuple[DecodeState, jax.Array]:
    """Ranks the experts for a request.

    Args:
      state: of the engine, with the row as it is before the request's prefill.
      row: that the request gets.
      domain: of the request; the merged profile serves an unknown or absent one.

    Returns:
      The state, and bool []: no other row decodes, so that the policy's signals started anew.
    """
    number = self._domains.get(domain, len(self._domains)) if domain else len(self._domains)
    groups = state.groups
    ranks, signals, is_whole = _rank(
      self._program,
      self.ranks,
      tuple(group.policy for group in groups),
      state.active,
      np.int32(number),
      np.int32(row),
    )
    groups = tuple(
      dataclasses.replace(
        group, tables=dataclasses.replace(group.tables, warm_rank=rank), policy=policy
      )
      for group, rank, policy in zip(groups, ranks, signals, strict=True)
    )
    return dataclasses.replace(state, groups=groups), is_whole


@functools.partial(jax.jit, static_argnums=0)
def _rank(
  program: Program,
  ranks: tuple[jax.Array, ...],
  signals: tuple[PolicyState, ...],
  active: jax.Array,
  number: jax.Array,
  row: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[PolicyState, ...], jax.Array]:
  """Returns the ranks of domain `number`, the signals after the admission, and whether it starts
  the cache as a whole.
  """
  rows = jnp.arange(active.shape[0], dtype=jnp.int32)
  is_whole = ~jnp.any(active & (rows != row))
  policy = program.make_policy()
  fresh = tuple(policy.init(group.num_experts) for group in program.model.expert_groups)
  started = jax.tree.map(
    lambda kept, new: jnp.where(is_whole, jnp.broadcast_to(new, kept.shape), kept), signals, fresh
  )
  return tuple(rank[number] for rank in ranks), started, is_whole
