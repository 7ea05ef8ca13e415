"""Reads fields of a published config.json, with one clear sentence where a value is not one that
the family has.
"""

from collections.abc import Mapping
from typing import Any

from moecore_jax.specs import RopePairs, RopeSpec, YarnSpec


class ConfigReader:
  """A parsed config.json of one family; every fault is a ValueError that names the field."""

  def __init__(self, config: Mapping[str, Any], family: str):
    self.config, self.family = config, family

  def whole(self, *names: str) -> int:
    """Returns a number >= 1, under the first of `names` that is there."""
    name = next((n for n in names if self.config.get(n) is not None), names[0])
    value = self.config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      raise ValueError(
        f"config.json: {name} is {value!r}, {self.family} needs a whole number of 1 or more"
      )
    return value

  def number(self, name: str, default: float) -> float:
    """Returns a number, `default` where it is missing."""
    value = self.config.get(name)
    if value is None:
      return default
    if not isinstance(value, int | float) or isinstance(value, bool):
      raise ValueError(f"config.json: {name} is {value!r}, {self.family} needs a number")
    return float(value)

  def flag(self, name: str, default: bool) -> bool:
    """Returns a truth value, `default` where it is missing."""
    value = self.config.get(name)
    if value is None:
      return default
    if not isinstance(value, bool):
      raise ValueError(f"config.json: {name} is {value!r}, {self.family} needs true or false")
    return value

  def expect(self, name: str, *values: Any) -> None:
    """Refuses a field that is there with another value than the family has."""
    value = self.config.get(name)
    if value is not None and value not in values:
      expected = " or ".join(map(repr, values))
      raise ValueError(f"config.json: {name} is {value!r}, {self.family} has {expected}")

  def rope(self, dim: int, pairs: RopePairs, theta: float = 10000.0) -> RopeSpec:
    """Reads both spellings: `rope_theta` with `rope_scaling`, or `rope_parameters` with
    everything.
    """
    config = self.config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or theta)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
      return RopeSpec(dim, theta, None, pairs)
    if kind != "yarn":
      raise ValueError(f"config.json: rope type {kind!r} is not one of 'default', 'yarn'")
    yarn = YarnSpec(
      factor=float(rope["factor"]),
      original_max_position=int(rope["original_max_position_embeddings"]),
      beta_fast=float(rope.get("beta_fast") or 32),
      beta_slow=float(rope.get("beta_slow") or 1),
      mscale=float(rope.get("mscale") or 1.0),
      mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
      is_truncated=rope.get("truncate", True),
    )
    return RopeSpec(dim, theta, yarn, pairs)

  def common(self) -> dict[str, Any]:
    """Returns the fields of ModelSpec that every family spells alike."""
    eos = self.config.get("eos_token_id")
    return {
      "family": self.family,
      "vocab_size": self.whole("vocab_size"),
      "embed_dim": self.whole("hidden_size"),
      "rms_norm_eps": self.number("rms_norm_eps", 1e-6),
      "tie_embeddings": self.flag("tie_word_embeddings", False),
      "max_context_tokens": self.whole("max_position_embeddings")
      if "max_position_embeddings" in self.config
      else 4096,
      "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }

  def head_dim(self) -> int:
    """Returns the width of an attention head: its own field, else the stream over the heads."""
    if self.config.get("head_dim") is not None:
      return self.whole("head_dim")
    return self.whole("hidden_size") // self.whole("num_attention_heads")
