"""Domain profiles: how much the router likes each expert on average over a domain's tokens.

A profile is recorded once from full selection scores (`ScoreSum`), stored with those of other
domains (`ProfileSet`), and orders the experts for a warm start (`warm_rank`). Host arrays in NumPy;
layers are the model's MoE layers in order, and a layer with fewer experts than the widest has -inf
in the columns that it lacks.

Source: SPEC section 4.
"""

import dataclasses
import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
  """Mean selection scores of one domain.

  Attributes:
    mean_scores: float32 [L, N], mu of each expert; -inf in the columns that a layer lacks.
    num_tokens: tokens in the mean, >= 1.
  """

  mean_scores: Float32[np.ndarray, "L N"]
  num_tokens: int


class ScoreSum:
  """Gathers the scores of a domain's tokens; takes them in any number of pieces.

  Args:
    num_experts: experts of each MoE layer (N_l).
  """

  def __init__(self, num_experts: Sequence[int]):
    experts = np.arange(max(num_experts))
    self._is_expert = experts < np.asarray(num_experts)[:, None]  # [L, N]
    self._total = np.zeros(self._is_expert.shape, np.float64)
    self.num_tokens = 0

  def add(self, scores: Float32[np.ndarray, "T L N"]) -> None:
    """Adds tokens.

    Args:
      scores: selection scores of T tokens, -inf where routing masked an expert; a masked score
        counts as the smallest finite one of its token and layer. Columns that a layer lacks are not
        read.

    Raises:
      ValueError: the shape is not the model's, a score is NaN or +inf, or a token has no finite
        score.
    """
    scores = np.asarray(scores)
    if scores.ndim != 3 or scores.shape[1:] != self._total.shape:
      layers, experts = self._total.shape
      raise ValueError(
        f"scores is {list(scores.shape)}, expected [tokens, {layers} MoE layers, {experts} experts]"
      )
    is_score = np.isfinite(scores) & self._is_expert
    if np.any(~is_score & self._is_expert & ~np.isneginf(scores)):
      raise ValueError("scores has NaN or +inf, expected finite numbers, or -inf where masked")
    lowest = np.where(is_score, scores, np.inf).min(axis=2, keepdims=True)
    if np.isposinf(lowest).any():
      raise ValueError("scores has a token without a finite score; leave padding out")
    self._total += np.where(is_score, scores, lowest).sum(axis=0, dtype=np.float64)
    self.num_tokens += scores.shape[0]

  def profile(self) -> Profile:
    """Returns the profile of the tokens so far.

    Raises:
      ValueError: there are none.
    """
    if not self.num_tokens:
      raise ValueError("a profile needs at least one token; the workload gave none")
    mean = np.where(self._is_expert, self._total / self.num_tokens, -np.inf)
    return Profile(mean.astype(np.float32), self.num_tokens)


def merge(profiles: Iterable[Profile]) -> Profile:
  """Returns the profile of all tokens of several profiles of one model.

  Raises:
    ValueError: there is no profile.
  """
  profiles = tuple(profiles)
  if not profiles:
    raise ValueError("merging needs at least one profile")
  num_tokens = sum(p.num_tokens for p in profiles)
  total = np.zeros(profiles[0].mean_scores.shape, np.float64)
  for p in profiles:
    total += p.mean_scores.astype(np.float64) * p.num_tokens
  return Profile((total / num_tokens).astype(np.float32), num_tokens)


def warm_rank(mean_scores: Float32[np.ndarray, "L N"]) -> Int32[np.ndarray, "L N"]:
  """Returns each expert's place in the warm-start order of its layer.

  0 is the hottest; ties go to the lower index; columns that a layer lacks come last.
  """
  order = np.argsort(-mean_scores, axis=1, kind="stable")
  return np.argsort(order, axis=1, kind="stable").astype(np.int32)


class ProfileSet:
  """The profiles of a model's domains.

  Args:
    profiles: by domain, at least one, all of one shape.
    fingerprint: names the weights that they were recorded with.

  Raises:
    ValueError: there is no profile, or shapes differ.
  """

  def __init__(self, profiles: Mapping[str, Profile], fingerprint: str):
    shapes = {p.mean_scores.shape for p in profiles.values()}
    if len(shapes) != 1:
      raise ValueError(f"profiles have shapes {sorted(shapes)}, expected one shape [L, N]")
    self._profiles = dict(profiles)
    self.fingerprint = fingerprint
    self.merged = merge(self._profiles.values())

  @property
  def domains(self) -> tuple[str, ...]:
    return tuple(self._profiles)

  def lookup(self, domain: str | None) -> Profile:
    """Returns a domain's profile; for an absent or unknown one the merged profile."""
    return self._profiles.get(domain, self.merged) if domain is not None else self.merged

  def save(self, path: str | Path) -> None:
    """Writes the file; readers see the old or the new one whole."""
    path = Path(path)
    header = {
      "version": VERSION,
      "fingerprint": self.fingerprint,
      "domains": list(self._profiles),
      "num_tokens": [p.num_tokens for p in self._profiles.values()],
    }
    scores = np.stack([p.mean_scores for p in self._profiles.values()])
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as f:
      np.savez(f, header=np.array(json.dumps(header)), mean_scores=scores)
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, path)


def load(
  path: str | Path, fingerprint: str | None = None, num_experts: Sequence[int] | None = None
) -> ProfileSet:
  """Reads the file of a ProfileSet.

  Args:
    path: the file.
    fingerprint: of the model that will use it; None: any.
    num_experts: experts of each of its MoE layers; None: any.

  Raises:
    ValueError: the file is missing, damaged, of another version, or of another model.
  """
  header, scores = _read(Path(path))
  names = ("version", "fingerprint", "domains", "num_tokens")
  fields: list[Any] = [header.get(name) for name in names]
  version, recorded, domains, counts = fields
  if version != VERSION:
    raise ValueError(f"{path}: version is {version!r}, expected {VERSION}; profile again")
  is_whole = (
    isinstance(recorded, str)
    and _is_list(domains, str)
    and _is_list(counts, int)
    and len(set(domains)) == len(domains) == len(counts) == len(scores) > 0
    and min(counts) > 0
  )
  if not is_whole or np.isnan(scores).any() or np.isposinf(scores).any():
    raise ValueError(f"{path}: header and scores do not agree; profile again")
  if fingerprint is not None and fingerprint != recorded:
    raise ValueError(
      f"{path}: was recorded with other weights (fingerprint {recorded[:12]}, the model has "
      f"{fingerprint[:12]}); profile again"
    )
  if num_experts is not None:
    is_expert = np.arange(scores.shape[2]) < np.asarray(num_experts)[:, None]
    if is_expert.shape != scores.shape[1:] or (np.isfinite(scores) != is_expert).any():
      raise ValueError(
        f"{path}: has {list(scores.shape[1:])} layers and experts, the model has "
        f"{[len(num_experts), max(num_experts)]}; profile again"
      )
  profiles = map(Profile, scores, counts)
  return ProfileSet(dict(zip(domains, profiles, strict=True)), recorded)


def _read(path: Path) -> tuple[Mapping[str, Any], np.ndarray]:
  """Returns the header and float32 [domains, L, N]."""
  if not path.is_file():
    raise ValueError(f"{path}: there is no such profile file")
  try:
    with np.load(path, allow_pickle=False) as arrays:
      header, scores = json.loads(str(arrays["header"])), arrays["mean_scores"]
  except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
    raise ValueError(f"{path}: is no profile file or is damaged ({error}); profile again") from None
  if not isinstance(header, dict) or scores.dtype != np.float32 or scores.ndim != 3:
    raise ValueError(f"{path}: is no profile file or is damaged; profile again")
  return header, scores


def _is_list(value: Any, kind: type) -> bool:
  return isinstance(value, list) and all(type(item) is kind for item in value)
