"""Replay: a trace through slots under a policy, without a model, all layers and several numbers of
slots at once.

Tokens run one after the other, in stored order, each as a decode step of its own, whatever step the
engine ran it in; `engine_replay` follows the engine's steps instead. Two rules count:

* protected: the experts of the present token are not evicted, as in the engine;
* sequential: choices are served one by one, in stored order, and nothing is protected, as other
  tools count.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moecore_jax.residency import policy as policies
from moecore_jax.specs import PolicyName, RhacSpec
from moecore_jax.traces import token_step
from moecore_jax.traces.belady import belady, next_uses
from moecore_jax.traces.token_step import Cache, Served
from moecore_jax.traces.trace import Trace, layer_groups

Counting = Literal["protected", "sequential"]
ReplayPolicy = PolicyName | Literal["belady"]

_CHUNK_TOKENS = 1024  # of one call: one compilation serves every length


@dataclasses.dataclass(frozen=True)
class Replay:
  """What a replay counted, host arrays.

  Attributes:
    requests: int64 [L], experts that tokens chose.
    hits: int64 [L], those that were resident.
    misses: int64 [L], those that were not.
    evictions: int64 [L], experts that left for another.
    token_hits: uint16 [T, L], hits of each token, if asked for.
  """

  requests: np.ndarray
  hits: np.ndarray
  misses: np.ndarray
  evictions: np.ndarray
  token_hits: np.ndarray | None = None

  @property
  def hit_rate(self) -> np.ndarray:
    """float64 [L], 0 where nothing was asked for."""
    return self.hits / np.maximum(self.requests, 1)

  @property
  def mean_hit_rate(self) -> float:
    """Over all requests of all layers."""
    return float(self.hits.sum() / max(self.requests.sum(), 1))


def replay(
  trace: Trace,
  policy: ReplayPolicy,
  slots: int | Sequence[int],
  *,
  counting: Counting = "protected",
  rhac: RhacSpec | None = None,
  warm_rank: np.ndarray | None = None,
  reset_between_sequences: bool = False,
  seed: int = 0,
  per_token: bool = False,
) -> Replay:
  """Replays a trace.

  Args:
    trace: the trace.
    policy: a replacement policy, or "belady", the offline bound.
    slots: K_l of each layer, or of all.
    counting: "protected" or "sequential".
    rhac: settings of the policy "rhac".
    warm_rank: int [L, N], place of each expert in its layer's warm-start order: the K_l hottest are
      resident at the start, the hottest in slot 0. None: a cold start.
    reset_between_sequences: start every sequence as the first.
    seed: of the policy "random".
    per_token: also give the hits of each token.

  Raises:
    ValueError: a number of slots is outside 1..N, or smaller than the fan-out where tokens are
      protected; or the policy needs scores that the trace lacks.
  """
  by_layer = [slots] * trace.num_layers if isinstance(slots, int) else slots
  return _replays(
    trace,
    np.asarray(by_layer, np.int32)[None],
    policy,
    counting=counting,
    rhac=rhac,
    warm_rank=warm_rank,
    reset_between_sequences=reset_between_sequences,
    seed=seed,
    per_token=per_token,
  )[0]


def hit_rates(
  trace: Trace,
  candidates: Sequence[int] | np.ndarray,
  policy: ReplayPolicy,
  *,
  counting: Counting = "protected",
  rhac: RhacSpec | None = None,
  warm_rank: np.ndarray | None = None,
  reset_between_sequences: bool = False,
  seed: int = 0,
) -> np.ndarray:
  """Returns the hit rate of each layer at each number of slots, float64 [L, S].

  Args:
    trace: the trace.
    candidates: S numbers of slots for every layer, or int [S, L].
    policy, counting, rhac, warm_rank, reset_between_sequences, seed: as in `replay`.

  Raises:
    ValueError: as in `replay`.

  Source: SPEC section 3, H_l(k).
  """
  by_layer = np.asarray(candidates, np.int32)
  if by_layer.ndim == 1:
    by_layer = np.broadcast_to(by_layer[:, None], (len(by_layer), trace.num_layers))
  results = _replays(
    trace,
    by_layer,
    policy,
    counting=counting,
    rhac=rhac,
    warm_rank=warm_rank,
    reset_between_sequences=reset_between_sequences,
    seed=seed,
    per_token=False,
  )
  return np.stack([result.hit_rate for result in results], axis=1)


class _Setting(NamedTuple):
  """Static part of the replay program."""

  policy: ReplayPolicy
  rhac: RhacSpec
  counting: Counting
  has_resets: bool

  def make_policy(self) -> policies.Policy:
    return belady() if self.policy == "belady" else policies.make_policy(self.policy, self.rhac)


class _Tokens(NamedTuple):
  """A piece of a trace; leading axis: tokens.

  Attributes:
    index: int32 [t], token within the trace.
    experts: uint16 [t, L, A].
    observed: float32 [t, L, A or N], next uses or scores; None where the policy reads neither.
    valid: bool [t].
    resets: bool [t], the cache starts anew before the token.
  """

  index: np.ndarray
  experts: np.ndarray
  observed: np.ndarray | None
  valid: np.ndarray
  resets: np.ndarray


def _replays(
  trace: Trace,
  slots: np.ndarray,
  policy: ReplayPolicy,
  *,
  counting: Counting,
  rhac: RhacSpec | None,
  warm_rank: np.ndarray | None,
  reset_between_sequences: bool,
  seed: int,
  per_token: bool,
) -> list[Replay]:
  """Replays with S allocations at once: slots int32 [S, L]."""
  if counting not in ("protected", "sequential"):
    raise ValueError(f"counting is {counting!r}, expected protected or sequential")
  setting = _Setting(policy, rhac or RhacSpec(), counting, reset_between_sequences)
  setting.make_policy()  # refuses an unknown one
  _check_slots(trace, slots, counting)
  _check_warm_rank(trace, warm_rank)
  if policy == "rhac" and setting.rhac.score_weight and trace.scores is None:
    raise ValueError("the trace has no scores, which score_weight > 0 needs; record them, or set 0")
  shape = (len(slots), trace.num_layers)
  counts = np.zeros((len(Served._fields), *shape), np.int64)
  token_hits = np.zeros((trace.num_tokens, *shape), np.uint16) if per_token else None
  for layers in layer_groups(trace):
    for start, stop, served, hits in _run_group(
      setting, trace, layers, slots[:, layers], warm_rank, seed
    ):
      counts[:, :, layers] += np.stack(served)
      if token_hits is not None:
        token_hits[start:stop, :, layers] = hits[: stop - start]
  requests = np.sum(trace.experts < trace.num_experts[:, None], axis=(0, 2))
  return [
    Replay(
      requests,
      *counts[:, s],
      token_hits=None if token_hits is None else token_hits[:, s],
    )
    for s in range(len(slots))
  ]


def _run_group(
  setting: _Setting,
  trace: Trace,
  layers: np.ndarray,
  slots: np.ndarray,
  warm_rank: np.ndarray | None,
  seed: int,
) -> Iterator[tuple[int, int, Served, np.ndarray]]:
  """Yields (first token, end, counts int32 [S, L], hits uint16 [t, S, L]), piece by piece."""
  num_experts, top_k = int(trace.num_experts[layers[0]]), int(trace.top_k[layers[0]])
  experts = trace.experts[:, layers, :top_k]
  observed = first = None
  if setting.policy == "belady":
    observed, first = next_uses(experts, num_experts, setting.counting == "sequential")
  elif setting.policy == "rhac" and setting.rhac.score_weight and trace.scores is not None:
    observed = trace.scores[:, layers, :num_experts]
  ranks = None if warm_rank is None else warm_rank[layers, :num_experts]
  start_caches = _start(setting, num_experts, slots, ranks, first)
  ranks = np.zeros((len(layers), num_experts), np.int32) if ranks is None else ranks
  resets = np.isin(np.arange(trace.num_tokens), trace.sequence_offsets[1:])
  size = min(_CHUNK_TOKENS, max(64, 1 << (trace.num_tokens - 1).bit_length()))
  caches = start_caches
  for start in range(0, trace.num_tokens, size):
    stop = min(start + size, trace.num_tokens)
    piece = _Tokens(
      np.arange(start, start + size, dtype=np.int32),
      _padded(experts[start:stop], size),
      None if observed is None else _padded(observed[start:stop], size),
      np.arange(start, start + size) < trace.num_tokens,
      _padded(resets[start:stop], size),
    )
    caches, served, hits = _run_piece(
      setting, start_caches, caches, slots, np.int32(ranks), piece, np.int32(seed)
    )
    yield start, stop, jax.device_get(served), np.asarray(hits)


def _padded(values: np.ndarray, size: int) -> np.ndarray:
  return np.pad(values, [(0, size - len(values)), *[(0, 0)] * (values.ndim - 1)])


def _start(
  setting: _Setting,
  num_experts: int,
  slots: np.ndarray,
  warm_rank: np.ndarray | None,
  first_use: np.ndarray | None,
) -> Cache:
  """Returns the caches that a replay begins with, leading axes [S, L]."""
  cold = token_step.cold_cache(setting.make_policy(), num_experts)
  caches = jax.tree.map(lambda x: jnp.broadcast_to(x, (*slots.shape, *x.shape)), cold)
  if warm_rank is not None:
    is_resident = warm_rank < slots[:, :, None]  # [S, L, N]
    slot_of = jnp.asarray(np.where(is_resident, warm_rank, -1), jnp.int32)
    caches = caches._replace(slot_of=slot_of, num_used=jnp.asarray(slots, jnp.int32))
  if first_use is not None:
    caches = caches._replace(signals=jnp.broadcast_to(-first_use, caches.slot_of.shape))
  return caches


@functools.partial(jax.jit, static_argnums=0)
def _run_piece(
  setting: _Setting,
  start: Cache,
  caches: Cache,
  slots: jax.Array,
  warm_rank: jax.Array,
  tokens: _Tokens,
  seed: jax.Array,
) -> tuple[Cache, Served, jax.Array]:
  """Runs a piece: caches [S, L], slots int32 [S, L], warm_rank int32 [L, N]."""
  policy = setting.make_policy()
  num_layers, num_experts = warm_rank.shape
  is_one_by_one = setting.counting == "sequential"
  step = token_step.serve_one_by_one if is_one_by_one else token_step.serve
  root = jax.random.PRNGKey(seed)

  def run_layer(layer, num_slots, rank, cache, topk_ids, observed, key, valid):
    if observed is None:
      observed = jnp.zeros(num_experts, jnp.float32)
    if is_one_by_one and setting.policy == "belady":
      observed = observed[:, None]
    elif is_one_by_one:
      observed = jnp.broadcast_to(observed, (*topk_ids.shape, num_experts))
    key = jax.random.fold_in(key, layer)
    is_random = setting.policy == "random"
    return step(policy, cache, num_slots, rank, topk_ids, observed, valid, key, is_random)

  over_layers = jax.vmap(run_layer, in_axes=(0, 0, 0, 0, 0, 0, None, None))
  over_slots = jax.vmap(over_layers, in_axes=(None, 0, None, 0, None, None, None, None))

  def run_token(carry, token):
    caches, total = carry
    if setting.has_resets:
      fresh = start._replace(signals=caches.signals) if setting.policy == "belady" else start
      caches = jax.tree.map(lambda a, b: jnp.where(token.resets, a, b), fresh, caches)
    caches, served = over_slots(
      jnp.arange(num_layers, dtype=jnp.int32),
      slots,
      warm_rank,
      caches,
      token.experts.astype(jnp.int32),
      token.observed,
      jax.random.fold_in(root, token.index),
      token.valid,
    )
    return (caches, jax.tree.map(lax.add, total, served)), served.hits.astype(jnp.uint16)

  zeros = Served(*[jnp.zeros(slots.shape, jnp.int32)] * len(Served._fields))
  (caches, total), hits = lax.scan(run_token, (caches, zeros), tokens)
  return caches, total, hits


def _check_slots(trace: Trace, slots: np.ndarray, counting: Counting) -> None:
  if slots.ndim != 2 or slots.shape[1] != trace.num_layers or not len(slots):
    raise ValueError(
      f"slots has shape {list(slots.shape)}, expected one number for each of {trace.num_layers} "
      "layers"
    )
  if (trace.num_experts > token_step.MAX_EXPERTS).any():
    raise ValueError(
      f"num_experts has {trace.num_experts.max()}, a replay takes up to {token_step.MAX_EXPERTS}"
    )
  lowest = trace.top_k if counting == "protected" else np.ones_like(trace.top_k)
  for layer, (low, high) in enumerate(zip(lowest, trace.num_experts, strict=True)):
    for count in slots[:, layer]:
      if not low <= count <= high:
        hint = "; with fewer, count sequentially" if 1 <= count < low else ""
        raise ValueError(f"slots of layer {layer} is {count}, expected {low}..{high}{hint}")


def _check_warm_rank(trace: Trace, warm_rank: np.ndarray | None) -> None:
  if warm_rank is None:
    return
  expected = (trace.num_layers, int(trace.num_experts.max()))
  if warm_rank.shape != expected:
    raise ValueError(f"warm_rank has shape {list(warm_rank.shape)}, expected {list(expected)}")
  for layer, count in enumerate(trace.num_experts):
    if not np.array_equal(np.sort(warm_rank[layer, :count]), np.arange(count)):
      raise ValueError(f"warm_rank of layer {layer} is no order of 0..{count - 1}")
