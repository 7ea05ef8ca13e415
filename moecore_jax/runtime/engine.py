"""The engine: the host shell around the compiled programs, with continuous batching, clocks and
counters.

Requests wait in order; whenever a row of the batch is free, the next one is prefilled into it and
joins the decode step. Nothing of a step passes through Python but the tokens drawn.
"""

import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from absl import logging

from moecore_jax import checkpoint
from moecore_jax.config import RunConfig
from moecore_jax.memory import default_device
from moecore_jax.models.experts import ExpertArrays, expert_bytes
from moecore_jax.models.quantized import quantize_layers
from moecore_jax.residency.profiles import ProfileSet
from moecore_jax.runtime import compilation, plan
from moecore_jax.runtime import program as program_lib
from moecore_jax.runtime import state as state_lib
from moecore_jax.runtime.decode import jit_decode_step
from moecore_jax.runtime.prefill import Chunk, PrefillOut, jit_prefill_chunk
from moecore_jax.runtime.program import Params
from moecore_jax.runtime.recording import Recorder
from moecore_jax.runtime.requests import (
  Completion,
  Request,
  RequestMetrics,
  TextStream,
  prompt_tokens,
)
from moecore_jax.runtime.state import DecodeState, StepOut
from moecore_jax.runtime.warm_start import WarmStart, read_profiles
from moecore_jax.specs import EngineSpec, ExpertFormat, ModelSpec, MoESpec, ResidencySpec

DEMO = pathlib.Path(__file__).parents[1] / "assets" / "demo"

OnToken = Callable[[str, str], None]
"""Called with a request's id and a piece of its text."""


class Prefilled(NamedTuple):
  """A prompt in a row's cache.

  Attributes:
    token: the first generated token.
    is_active: whether the row goes on decoding.
    logits: float32 [V] after the last token, or [T, V] of all tokens.
    topk_ids: uint16 [MoE layers, T, A], chosen experts of each token.
  """

  token: int
  is_active: bool
  logits: np.ndarray
  topk_ids: np.ndarray


class _Running:
  """A request that occupies a row."""

  def __init__(self, request: Request, num_prompt_tokens: int, stream: TextStream, start: float):
    self.request, self.num_prompt_tokens, self.stream, self.start = (
      request,
      num_prompt_tokens,
      stream,
      start,
    )
    self.tokens: list[int] = []
    self.first_token_time = self.last_token_time = start
    self.hits = 0


class Engine:
  """A model, its expert bank in host memory, its slot pool on the device, and the programs that run
  it.

  Args:
    model_spec: the model.
    residency: which experts stay on the device.
    spec: shapes and formats of the programs.
    params: dense parameters in device memory, `layers` keyed by layer, as `checkpoint.load` gives
      them, or, in the dense format w8a8, `models.quantized.quantize_layers` of these.
    banks: stored experts of each expert group, pinned host memory.
    tokenizer: None: prompts are token ids.
    domains: domains that a request may name; None: any.
    profiles: rank the experts at each admission by the request's domain; an unknown or absent
      domain takes the merged profile.
    recorder: gets what every call chose; with one, programs give selection scores and predictions,
      too.
    fingerprint: names the weights; "": unknown.
  """

  def __init__(
    self,
    model_spec: ModelSpec,
    residency: ResidencySpec,
    spec: EngineSpec,
    params: Params,
    banks: tuple[ExpertArrays, ...],
    tokenizer: tokenizers.Tokenizer | None = None,
    domains: Sequence[str] | None = None,
    profiles: ProfileSet | None = None,
    recorder: Recorder | None = None,
    fingerprint: str = "",
  ):
    _warn_of_few_slots(model_spec, residency)
    self.model_spec, self.residency, self.spec = model_spec, residency, spec
    self.tokenizer, self.domains, self.fingerprint = tokenizer, domains, fingerprint
    self._recorder, self._num_calls = recorder, 0
    self.program = program_lib.make_program(
      model_spec, residency, spec, recorder is not None, profiles is not None
    )
    self._warm_start = None if profiles is None else WarmStart(model_spec, profiles)
    layers = program_lib.by_segment(self.program, params["layers"], _stack)
    self.params = {k: v for k, v in params.items() if k != "mtp"} | {"layers": layers}
    self.banks = banks
    options = compilation.accepted_options(default_device().platform)
    self._decode_step = jit_decode_step(options)
    self._thresholds = program_lib.staging_thresholds(self.program, residency)
    self.state: DecodeState = _committed(
      jax.jit(state_lib.init_state, static_argnums=(0, 1))(self.program, residency)
    )
    self._totals = np.zeros(self.state.counters.shape, np.int64)
    self._running: dict[int, _Running] = {}

  @classmethod
  def from_checkpoint(
    cls, path: str | None, config: RunConfig, recorder: Recorder | None = None
  ) -> "Engine":
    """Loads a checkpoint and builds its engine.

    Args:
      path: folder of a converted (Orbax) or published (safetensors) checkpoint; None: the demo
        model.
      config: residency, engine, sampling and device settings.
      recorder: as of the class.

    Raises:
      ValueError: the config does not fit the model or the device's memory, or the checkpoint is
        missing, corrupt or of another shape. A config is refused before weights are read.
    """
    folder = str(path or DEMO)
    model, known = checkpoint.read_spec(folder), checkpoint.known_fingerprint(folder)
    plan.freeze(config, model, known)
    read_profiles(config, model, known)
    loaded = checkpoint.load(
      folder,
      dtype=jnp.dtype(config.engine.dtype),
      expert_format=cast(ExpertFormat, config.engine.expert_format),
    )
    residency, spec, _ = config.freeze(loaded.spec, loaded.fingerprint)
    tokenizer = _read_tokenizer(loaded.tokenizer_path) if loaded.tokenizer_path else None
    params = loaded.params
    return cls(
      loaded.spec,
      residency,
      spec,
      params if spec.dense_format == "float" else quantize_layers(params),
      loaded.banks,
      tokenizer,
      profiles=read_profiles(config, loaded.spec, loaded.fingerprint),
      recorder=recorder,
      fingerprint=loaded.fingerprint,
    )

  def warm_up(self) -> None:
    """Compiles all programs that `generate` runs, by running them without a token."""
    nothing, floor = np.zeros(0, np.int32), 0
    largest = self.spec.prefill_buckets[-1]
    for bucket in self.spec.prefill_buckets:
      edges = {n for n in self._thresholds.values() if floor < n <= bucket}
      lengths = {floor + 1, *edges, *(n for n in self._thresholds.values() if n > largest)}
      longest = self.spec.context_tokens if self.spec.context_tokens > largest else floor + 1
      for staged in {self._staged(n) for n in (*lengths, longest)}:
        self._run_chunk(nothing, bucket, 0, 0, 0, False, staged)
      floor = bucket
    if self._warm_start is not None:
      self.state = self._warm_start(self.state, None)
    self.decode_step()
    self.release(0)
    bool(self.state.active[0])
    self.counters()

  # Rows, one at a time.

  def prefill(
    self,
    row: int,
    token_ids: Sequence[int],
    max_new_tokens: int,
    all_logits: bool = False,
    domain: str | None = None,
  ) -> Prefilled:
    """Puts a prompt in a row, in place of whatever the row held, and draws the first token.

    Args:
      row: 0..batch_size-1.
      token_ids: the prompt, at least one token.
      max_new_tokens: tokens to generate, the first included; 0 leaves the row inactive.
      all_logits: give the logits of every prompt token.
      domain: of the prompt, None where unknown.
    """
    if self._warm_start is not None:
      self.state = self._warm_start(self.state, domain)
    tokens = np.asarray(token_ids, np.int32)
    largest, outs, staged = self.spec.prefill_buckets[-1], [], self._staged(len(tokens))
    if self._recorder is not None:
      is_alone = ~jnp.any(self.state.active.at[row].set(False))
      warm_started = is_alone if self._fills_slots(staged) else None
      self._recorder.on_admission(self._num_calls, row, domain, warm_started)
    for offset in range(0, len(tokens), largest):
      piece = tokens[offset : offset + largest]
      bucket = next(b for b in self.spec.prefill_buckets if b >= len(piece))
      is_last = offset + largest >= len(tokens)
      out = self._run_chunk(
        piece, bucket, row, offset, max_new_tokens if is_last else 0, all_logits, staged
      )
      outs.append((out, len(piece)))
    last = outs[-1][0]
    logits = (
      np.concatenate([np.asarray(o.logits)[:n] for o, n in outs])
      if all_logits
      else np.asarray(last.logits)
    )
    topk_ids = np.concatenate([np.asarray(o.topk_ids)[:, :n] for o, n in outs], axis=1)
    return Prefilled(int(last.token), bool(self.state.active[row]), logits, topk_ids)

  def decode_step(self) -> StepOut:
    """Decodes one token in every active row; the outputs stay on the device until read."""
    self.state, out = self._decode_step(self.program, self.params, self.banks, self.state)
    if self._recorder is not None:
      self._recorder.on_decode(self._num_calls, out)
    self._num_calls += 1
    return out

  def release(self, row: int) -> None:
    """Stops a row from decoding."""
    self.state = dataclasses.replace(self.state, active=self.state.active.at[row].set(False))

  def reset_residency(self) -> None:
    """Empties the slots: tables and signals start anew, all together; nothing refers to what lies
    in the pool, which stays where it is."""
    empty = _committed(_empty_groups(self.program, self.residency))
    pools = [group.pool for group in self.state.groups]
    groups = tuple(
      state_lib.GroupState(pool, *fields) for pool, fields in zip(pools, empty, strict=True)
    )
    self.state = dataclasses.replace(self.state, groups=groups)
    if self._recorder is not None:
      self._recorder.on_reset(self._num_calls)

  def _staged(self, prompt_tokens: int) -> tuple[int, ...]:
    """Returns the segments that a prompt of this length stages."""
    return tuple(s for s, tokens in self._thresholds.items() if prompt_tokens >= tokens)

  def _fills_slots(self, staged: Sequence[int]) -> bool:
    """Tells whether slots are filled while these segments are staged."""
    fill = self.residency.staging.fill
    has_order = fill != "none" and (fill != "profile" or self._warm_start is not None)
    return has_order and any(not self.program.segments[s].is_streamed for s in staged)

  def _run_chunk(
    self, piece, bucket, row, offset, max_new_tokens, all_logits, staged
  ) -> PrefillOut:
    scalars: Any = map(np.int32, (len(piece), row, offset, max_new_tokens))
    padded: Any = np.pad(piece, (0, bucket - len(piece)))
    chunk = Chunk(padded, *scalars)
    self.state, out = jit_prefill_chunk(
      self.program, self.params, self.banks, self.state, chunk, all_logits, staged
    )
    if self._recorder is not None:
      segments = [self.program.segments[s] for s in staged]
      layers = sorted(i for s in segments for i in s.moe_indices)
      self._recorder.on_prefill(self._num_calls, row, len(piece), layers, out)
    self._num_calls += 1
    return out

  # Whole requests.

  def score(self, token_ids: np.ndarray) -> np.ndarray:
    """Returns the logits after every token, by prefill through the slot pool.

    Args:
      token_ids: int [batch, length].

    Returns:
      float32 [batch, length, V].

    Raises:
      ValueError: the tokens are not a matrix of ids of the vocabulary, or do not fit the context.
    """
    token_ids = np.asarray(token_ids)
    vocab, context = self.model_spec.vocab_size, self.spec.context_tokens
    if token_ids.ndim != 2 or not np.issubdtype(token_ids.dtype, np.integer) or not token_ids.size:
      raise ValueError(
        f"token_ids is {token_ids.dtype}{list(token_ids.shape)}, expected int [batch, length]"
      )
    if token_ids.min() < 0 or token_ids.max() >= vocab:
      raise ValueError(f"token_ids has ids outside 0..{vocab - 1}")
    if token_ids.shape[1] > context:
      raise ValueError(
        f"token_ids has {token_ids.shape[1]} columns, the context is {context} tokens"
      )
    return np.stack([self.prefill(0, row, 0, all_logits=True).logits for row in token_ids])

  def generate(
    self,
    requests: Iterable[str | Sequence[int] | Request],
    max_new_tokens: int = 64,
    domain: str | None = None,
    on_token: OnToken | None = None,
  ) -> Iterator[Completion]:
    """Completes requests, several at a time, and yields each when it is done.

    Args:
      requests: prompts, as text or token ids, or requests; read as rows become free.
      max_new_tokens: of bare prompts.
      domain: of bare prompts.
      on_token: gets each piece of text as it is generated.

    Yields:
      One Completion a request; one whose request is at fault has an error, and the others go on.
    """
    waiting = (
      r if isinstance(r, Request) else Request(str(i), r, max_new_tokens, domain)
      for i, r in enumerate(requests)
    )
    ids: set[str] = set()
    on_token = on_token or (lambda *_: None)
    while True:
      for row in range(self.spec.batch_size):
        while row not in self._running and (request := next(waiting, None)) is not None:
          yield from self._unclocked(self._admit(row, request, ids, on_token))
      if not self._running:
        return
      yield from self._unclocked(self._advance(on_token))

  def _unclocked(self, completions: Iterator[Completion]) -> Iterator[Completion]:
    """Hands on completions; what the caller does with one is not time of the others."""
    for completion in completions:
      held = time.perf_counter()
      yield completion
      held = time.perf_counter() - held
      for running in self._running.values():
        running.start += held
        running.first_token_time += held
        running.last_token_time += held

  def _admit(
    self, row: int, request: Request, ids: set[str], on_token: OnToken
  ) -> Iterator[Completion]:
    try:
      if request.id in ids:
        raise ValueError(f"id is {request.id!r}, which an earlier request has")
      ids.add(request.id)
      tokens = prompt_tokens(
        request, self.tokenizer, self.model_spec.vocab_size, self.spec.context_tokens, self.domains
      )
    except ValueError as error:
      yield Completion(request.id, "", (), "error", str(error), None)
      return
    if self.residency.reset_between_requests and not self._running:
      self.reset_residency()
    running = _Running(
      request, len(tokens), TextStream(self.tokenizer, request.stop), time.perf_counter()
    )
    self._running[row] = running
    prefilled = self.prefill(row, tokens, request.max_new_tokens, domain=request.domain)
    running.first_token_time = time.perf_counter()
    yield from self._take(row, prefilled.token, prefilled.is_active, on_token)

  def _advance(self, on_token: OnToken) -> Iterator[Completion]:
    out = self.decode_step()
    token, is_active, hits = jax.device_get((out.token, out.is_active, out.hits))
    for row, running in list(self._running.items()):
      running.hits += int(hits[row])
      yield from self._take(row, int(token[row]), bool(is_active[row]), on_token)

  def _take(self, row: int, token: int, is_active: bool, on_token: OnToken) -> Iterator[Completion]:
    """Books a generated token, and completes the request if it was the last."""
    running = self._running[row]
    running.tokens.append(token)
    running.last_token_time = time.perf_counter()
    is_end = token in self.model_spec.eos_token_ids
    piece = "" if is_end else running.stream.add(token)
    stopped = running.stream.stopped
    if not is_active or stopped:
      piece += running.stream.rest()
    if piece:
      on_token(running.request.id, piece)
    if is_active and not stopped:
      return
    if is_active:
      self.release(row)
    del self._running[row]
    reason = "stop" if is_end or stopped else "length"
    yield Completion(
      running.request.id,
      running.stream.text,
      tuple(running.tokens),
      reason,
      None,
      self._metrics(running),
    )

  def _metrics(self, running: _Running) -> RequestMetrics:
    steps = len(running.tokens) - 1
    invocations = steps * sum(
      len(g.layers) * g.num_experts_per_tok for g in self.model_spec.expert_groups
    )
    decode_ms = (running.last_token_time - running.first_token_time) * 1e3
    return RequestMetrics(
      prompt_tokens=running.num_prompt_tokens,
      output_tokens=len(running.tokens),
      ttft_ms=(running.first_token_time - running.start) * 1e3,
      tpot_ms=decode_ms / steps if steps else None,
      e2el_ms=(running.last_token_time - running.start) * 1e3,
      hit_rate=running.hits / invocations if invocations else None,
    )

  # Figures.

  def counters(self) -> dict[str, np.ndarray]:
    """Returns what has been counted since the engine was built, int64 [MoE layers] each.

    Keys: {"decode", "prefill"}_{NAME}, NAME one of `state.COUNTERS` or "moved_bytes": the bytes
    that crossed from the bank to the device, of misses, prefetches and staged layers.
    """
    self._totals += np.asarray(self.state.counters)
    zeros = jnp.zeros_like(self.state.counters)  # int32 on the device must not run over
    self.state = dataclasses.replace(self.state, counters=zeros)
    figures = {
      f"{phase}_{name}": self._totals[p, :, c].copy()
      for (p, phase), (c, name) in itertools.product(
        enumerate(("decode", "prefill")), enumerate(state_lib.COUNTERS)
      )
    }
    sizes = self.expert_bytes()
    for phase in ("decode", "prefill"):
      loads = sum(figures[f"{phase}_{name}"] for name in ("misses", "prefetches", "staged"))
      figures[f"{phase}_moved_bytes"] = loads * sizes
    return figures

  def expert_bytes(self) -> np.ndarray:
    """Returns the stored bytes of one expert of each MoE layer, int64 [MoE layers]."""
    groups = [
      self.model_spec.expert_groups[self.model_spec.group_of(i)[0]]
      for i in self.model_spec.moe_layers
    ]
    fmt = self.spec.expert_format
    return np.array([expert_bytes(group, fmt) for group in groups], np.int64)

  def memory_report(self) -> dict[str, dict[str, int]]:
    """Returns bytes by memory and region: of the arrays that exist, and of the buffers for whole
    layers that programs hold while they run.
    """
    pools = [group.pool for group in self.state.groups]
    device = {
      "dense_weights": _bytes(self.params),
      "expert_slots": _bytes(pools),
      "kv_cache": _bytes(self.state.kv),
    }
    device["tables"] = _bytes(self.state) - device["expert_slots"] - device["kv_cache"]
    device["layer_buffers"] = self._layer_buffer_bytes()
    if self._warm_start is not None:
      device["profiles"] = _bytes(self._warm_start.ranks)  # kilobytes: no plan counts them
    return {"device": device, "host": {"expert_bank": _bytes(self.banks)}}

  def _layer_buffer_bytes(self) -> int:
    """Returns the bytes of the buffers for whole layers, 0 where none is staged."""
    segments = [self.program.segments[s] for s in self._thresholds]
    num_layers = sum(segment.length for segment in segments)
    experts = [self.model_spec.expert_groups[segment.group].num_experts for segment in segments]
    sizes = [self.expert_bytes()[s.moe_start] * n for s, n in zip(segments, experts, strict=True)]
    return min(num_layers, self.program.layer_prefetch.prefetch_step) * int(max(sizes, default=0))


def _read_tokenizer(path: str) -> tokenizers.Tokenizer:
  try:
    return tokenizers.Tokenizer.from_file(path)
  except Exception as error:  # the library raises nothing more special
    raise ValueError(f"{path}: is no tokenizer: {error}; copy the model's again") from error


def _bytes(tree) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _warn_of_few_slots(model_spec: ModelSpec, residency: ResidencySpec) -> None:
  """Warns of layers that cannot hold the experts of one token (SPEC section 5: K_l < k_l)."""
  few = [
    f"layer {layer}: {slots} of {k}"
    for i, (layer, slots) in enumerate(zip(model_spec.moe_layers, residency.slots, strict=True))
    if not residency.layer_prefetch.streams(i)
    and slots < (k := cast(MoESpec, model_spec.layers[layer].mlp).router.num_experts_per_tok)
  ]
  if few:
    logging.warning(
      "%d of %d MoE layers have fewer slots than experts per token (%s%s): results stay exact, but "
      "every token fetches experts again; raise residency.slots_per_layer or residency.slots",
      len(few),
      len(residency.slots),
      "; ".join(few[:3]),
      "; .." if len(few) > 3 else "",
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _empty_groups(program: program_lib.Program, residency: ResidencySpec) -> list[tuple]:
  """Returns tables, signals and useful rate of each group's empty residency."""
  groups = state_lib.init_state(program, residency).groups
  return [(group.tables, group.policy, group.useful_rate) for group in groups]


def _committed(tree):
  """Ties arrays to their device, as a step's results are, so that no program is compiled twice."""
  return jax.device_put(tree, default_device())


def _stack(trees: list[Params]) -> Params:
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
