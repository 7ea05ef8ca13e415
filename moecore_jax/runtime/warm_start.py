"""Warm starts: the experts of every layer are ranked by the profile of the request that comes.

An admission copies no expert and changes no signal. Ranks of all domains lie on the device from the
start, and one small program puts those of a domain in the tables. What acts on them: slots are
filled, and signals start anew, while layers are staged (`staging.fill_slots`); copies ahead in a
prefill that loads on demand bring what is still missing (`ahead.warm_ahead`); ties and prefill's
evictions go by rank.

Source: SPEC sections 4 and 5.
"""

import dataclasses

import jax
import numpy as np

from moecore_jax.config import RunConfig
from moecore_jax.memory import default_device
from moecore_jax.residency import profiles as profiles_lib
from moecore_jax.residency.profiles import ProfileSet
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
    model: of the engine.
    profiles: of the model.

  Raises:
    ValueError: the profiles have other layers or experts than the model.
  """

  def __init__(self, model: ModelSpec, profiles: ProfileSet):
    self._domains = {domain: i for i, domain in enumerate(profiles.domains)}
    all_profiles = [*map(profiles.lookup, profiles.domains), profiles.merged]
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

  def __call__(self, state: DecodeState, domain: str | None) -> DecodeState:
    """Ranks the experts for a request.

    Args:
      state: of the engine.
      domain: of the request; the merged profile serves an unknown or absent one.
    """
    number = self._domains.get(domain, len(self._domains)) if domain else len(self._domains)
    ranks = _ranks_of(self.ranks, np.int32(number))
    groups = tuple(
      dataclasses.replace(group, tables=dataclasses.replace(group.tables, warm_rank=rank))
      for group, rank in zip(state.groups, ranks, strict=True)
    )
    return dataclasses.replace(state, groups=groups)


@jax.jit
def _ranks_of(ranks: tuple[jax.Array, ...], number: jax.Array) -> tuple[jax.Array, ...]:
  return tuple(rank[number] for rank in ranks)
