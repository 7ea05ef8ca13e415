"""Compares our forward pass with an oracle file of reference activations.

    python -m checkpoints_convert.verify --checkpoint=DIR --oracle=FILE [--slots=K] [--atol=1e-4]

Runs the engine itself: the prompts by selective prefill, then decode steps, with K expert slots a
layer. Compares the logits of every position, the experts chosen by every token, the greedy tokens,
and, of a pass over the whole prompts, the keys that indexers chose for every token, and the MTP
layers' hidden states, logits and tokens where the file has them. Prints a table of the largest
differences. Exit codes: 0 all within the tolerance, 1 a mismatch, 2 wrong input.

An oracle is a npz file: `input_ids` int [B, T]; `logits` [B, T, V]; `greedy_tokens` int [B, G];
`decode_logits` [B, G, V], which these tokens are the argmax of; for MoE layer l `layer{l}_topk_idx`
[B, T, A] and, of the steps that are fed the greedy tokens, `dec_layer{l}_topk_idx` [B, G, A]; for
layer l with an indexer `layer{l}_index_topk` int [B, T, K], the positions of the keys, or with
compression the numbers of the entries, that a token attends to, of which -1 and numbers beyond the
token's own position do not count; optionally `full_logits` [B, T + G, V] of prompt and greedy
tokens; optionally of the first prompt `mtp_hidden_in` [1, T, D], `mtp_hidden_d{k}`, `mtp_logits`
[1, M, V], `mtp_tokens` [1, M]. Of models with hyper-connections the last are `mtp_streams_in`
[1, T, n, D], `mtp_streams_d{k}`, `mtp_rec_logits` and `mtp_rec_tokens`, of the first MTP layer
applied again and again.
"""

import argparse
import dataclasses
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moecore_jax import checkpoint
from moecore_jax.checkpoint import Loaded
from moecore_jax.config import RunConfig
from moecore_jax.models.experts import HostExpert
from moecore_jax.models.transformer import Transformer
from moecore_jax.runtime.engine import Engine
from moecore_jax.specs import AttentionSpec, CompressedSpec, CompressionSpec, ModelSpec

Oracle = Mapping[str, np.ndarray]
_REQUIRED = ("input_ids", "logits", "greedy_tokens", "decode_logits")
_KV_BLOCK_TOKENS = 16


class Row(NamedTuple):
  """One comparison.

  Attributes:
    name: what is compared.
    worst: largest absolute difference, or the number of tokens that differ.
    limit: largest value that passes.
    where: index of the worst entry, or of the first that differs; () where none does.
  """

  name: str
  worst: float
  limit: float
  where: tuple[int, ...]

  @property
  def ok(self) -> bool:
    return self.worst <= self.limit  # false for NaN


def read_oracle(path: str) -> Oracle:
  """Reads an oracle file.

  Raises:
    ValueError: the file is missing, is no npz file, or lacks an array.
  """
  try:
    with np.load(path, allow_pickle=False) as arrays:
      oracle = {name: arrays[name] for name in arrays}
  except FileNotFoundError:
    raise ValueError(f"{path}: the oracle file does not exist") from None
  except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
    raise ValueError(f"{path}: is not a npz file: {error}") from None
  missing = [name for name in _REQUIRED if name not in oracle]
  if missing:
    raise ValueError(f"{path}: lacks {', '.join(missing)}")
  return oracle


def check_oracle(spec: ModelSpec, oracle: Oracle) -> None:
  """Checks that an oracle can be of this model.

  Raises:
    ValueError: arrays are missing or do not fit the model.
  """
  names = [f"{prefix}layer{i}_topk_idx" for i in spec.moe_layers for prefix in ("", "dec_")]
  names += [f"layer{i}_index_topk" for i in indexed_layers(spec)]
  if has_mtp(spec, oracle):
    chain = mtp_chain(spec, oracle)
    depths = [f"{chain.hidden}_d{d + 1}" for d in range(len(chain.layers))]
    names += [f"{chain.hidden}_in", *depths, chain.logits, chain.tokens]
  missing = [name for name in names if name not in oracle]
  if missing:
    raise ValueError(f"the oracle lacks {', '.join(missing[:3])}")
  if oracle["logits"].shape[-1] != spec.vocab_size:
    got = oracle["logits"].shape[-1]
    raise ValueError(f"the oracle has {got} logits a token, the model {spec.vocab_size}")
  for name in ("input_ids", "greedy_tokens"):
    ids = oracle[name]
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
      raise ValueError(f"{name} is {ids.dtype}{list(ids.shape)}, expected int [batch, length]")
    if ids.min() < 0 or ids.max() >= spec.vocab_size:
      raise ValueError(f"{name} has ids outside 0..{spec.vocab_size - 1}")
  batch, length = oracle["input_ids"].shape
  for layer in indexed_layers(spec):
    ids = oracle[name := f"layer{layer}_index_topk"]
    if ids.ndim != 3 or ids.shape[:2] != (batch, length):
      raise ValueError(f"{name} has the shape {ids.shape}, expected [{batch}, {length}, K]")


def make_engine(
  loaded: Loaded, oracle: Oracle, slots: int | tuple[int, ...], chunk_tokens: int | None = None
) -> Engine:
  """Builds a float32 engine that fits the oracle.

  Args:
    loaded: the checkpoint, float32.
    oracle: gives batch and lengths.
    slots: expert slots of every MoE layer, or of each; 0: all experts.
    chunk_tokens: of a prompt that are prefilled at a time; None: all.

  Raises:
    ValueError: the slots, the tokens or the context do not fit the model.
  """
  check_oracle(loaded.spec, oracle)
  prompts, steps = oracle["input_ids"], oracle["greedy_tokens"].shape[1]
  config = RunConfig()
  config.residency.all_resident = not slots
  if isinstance(slots, tuple):
    config.residency.slots = slots
  elif slots:
    config.residency.slots_per_layer = slots
  config.engine.batch_size = prompts.shape[0]
  config.engine.kv_block_tokens = _KV_BLOCK_TOKENS
  blocks = -(-(prompts.shape[1] + steps) // _KV_BLOCK_TOKENS)
  config.engine.context_tokens = blocks * _KV_BLOCK_TOKENS
  config.engine.prefill_buckets = (chunk_tokens or prompts.shape[1],)
  residency, spec, _ = config.freeze(loaded.spec)
  model = dataclasses.replace(loaded.spec, eos_token_ids=())  # the oracle decodes past an end
  return Engine(model, residency, spec, loaded.params, loaded.banks)


def compare_engine(engine: Engine, oracle: Oracle, atol: float) -> Iterator[Row]:
  """Runs prefill and decode steps and compares logits, chosen experts and greedy tokens."""
  prompts, greedy = oracle["input_ids"], oracle["greedy_tokens"]
  steps = greedy.shape[1]
  prefilled = [
    engine.prefill(row, tokens, steps + 1, all_logits=True) for row, tokens in enumerate(prompts)
  ]
  tokens = [np.array([p.token for p in prefilled])]
  logits, chosen = [np.stack([p.logits[-1] for p in prefilled])], []
  for _ in range(steps):
    out = jax.device_get(engine.decode_step())
    tokens.append(out.token)
    logits.append(out.logits)
    chosen.append(out.topk_ids)
  yield close("logits", np.stack([p.logits for p in prefilled]), oracle["logits"], atol)
  prefill_ids = np.stack([p.topk_ids for p in prefilled], axis=1)  # [L, B, T, A]
  decode_ids = np.stack(chosen, axis=2)  # [L, B, G, A]
  for prefix, ids in (("", prefill_ids), ("dec_", decode_ids)):
    for position, layer in enumerate(engine.model_spec.moe_layers):
      name = f"{prefix}layer{layer}_topk_idx"
      yield same(name, np.sort(ids[position], axis=-1), np.sort(oracle[name], axis=-1))
  yield same("greedy_tokens", np.stack(tokens[:-1], axis=1), greedy)
  yield close("decode_logits", np.stack(logits[:-1], axis=1), oracle["decode_logits"], atol)
  if "full_logits" in oracle:  # the last step's too, against a pass without a cache
    uncached = oracle["full_logits"][:, prompts.shape[1] - 1 :]
    yield close("full_logits", np.stack(logits, axis=1), uncached, atol)


class MtpChain(NamedTuple):
  """The drafts that an oracle holds: MTP layers applied in turn, and names of its arrays."""

  layers: tuple[int, ...]
  hidden: str
  logits: str
  tokens: str


def has_mtp(spec: ModelSpec, oracle: Oracle) -> bool:
  """Tells whether an oracle holds drafts of a model that has MTP layers."""
  is_held = any(name.startswith(("mtp_hidden", "mtp_streams")) for name in oracle)
  return is_held and bool(spec.mtp_layers)


def mtp_chain(spec: ModelSpec, oracle: Oracle) -> MtpChain:
  """Returns what an oracle with drafts holds of them."""
  if spec.hyper is None:
    return MtpChain(tuple(range(len(spec.mtp_layers))), "mtp_hidden", "mtp_logits", "mtp_tokens")
  depth = sum(name.startswith("mtp_streams_d") for name in oracle)
  return MtpChain((0,) * depth, "mtp_streams", "mtp_rec_logits", "mtp_rec_tokens")


def indexed_layers(spec: ModelSpec) -> tuple[int, ...]:
  """Returns the layers that choose what they attend to by an indexer of their own."""

  def has_indexer(attention: AttentionSpec | CompressionSpec | None) -> bool:
    if isinstance(attention, CompressedSpec):
      attention = attention.compression
    indexer = getattr(attention, "indexer", None)
    return indexer is not None and not indexer.is_shared

  return tuple(i for i, layer in enumerate(spec.layers) if has_indexer(layer.attention))


def compare_whole(loaded: Loaded, oracle: Oracle, atol: float) -> Iterator[Row]:
  """Runs whole prompts without a cache, and compares what the engine's programs keep to themselves.

  Those are the keys that indexers chose; and, where the oracle has them, the drafts of one token at
  each depth after the first prompt.
  """
  indexed, drafts = indexed_layers(loaded.spec), has_mtp(loaded.spec, oracle)
  if not indexed and not drafts:
    return
  model = nnx.eval_shape(lambda: Transformer(loaded.spec, rngs=nnx.Rngs(0)))
  graphdef, experts, dense = nnx.split(model, HostExpert, ...)
  banks = {"experts": loaded.banks, "mtp_experts": loaded.mtp_banks}
  nnx.replace_by_pure_dict(experts, {k: dict(enumerate(v)) for k, v in banks.items() if v})
  nnx.replace_by_pure_dict(dense, loaded.params)

  @jax.jit
  def forward(experts, dense, tokens):
    return nnx.merge(graphdef, experts, dense)(tokens)

  @jax.jit(static_argnums=2)
  def draft(experts, dense, depth, *args):
    return nnx.merge(graphdef, experts, dense).draft(depth, *args)

  prompts = oracle["input_ids"].astype(np.int32)
  length = prompts.shape[1]
  out = forward(experts, dense, prompts)
  for layer in indexed:
    name = f"layer{layer}_index_topk"
    got, want = (as_sets(ids, length) for ids in (out.picks[layer], oracle[name]))
    yield same(name, got, want & np.tri(length, dtype=bool))
  if not drafts:
    return
  chain, hidden = mtp_chain(loaded.spec, oracle), out.hidden[:1]
  name = f"{chain.hidden}_in"
  yield close(name, np.asarray(hidden), oracle[name], atol)
  tokens = np.concatenate([prompts, np.argmax(out.logits[:, -1:], -1)], axis=1)[:1].astype(np.int32)
  logits = []
  for depth, layer in enumerate(chain.layers):
    positions = jnp.arange(length, dtype=jnp.int32)[None] + depth
    following = tokens[:, depth + 1 : depth + 1 + length]
    out = draft(experts, dense, layer, hidden, following, positions)
    hidden, name = out.hidden, f"{chain.hidden}_d{depth + 1}"
    yield close(name, np.asarray(hidden), oracle[name], atol)
    logits.append(np.asarray(out.logits[:, -1]))
    drafted = np.argmax(logits[-1], axis=-1)[:, None].astype(np.int32)
    tokens = np.concatenate([tokens, drafted], axis=1)
  yield close(chain.logits, np.stack(logits, axis=1), oracle[chain.logits], atol)
  yield same(chain.tokens, tokens[:, length + 1 :], oracle[chain.tokens])


def as_sets(ids: np.ndarray | jax.Array, size: int) -> np.ndarray:
  """Returns which of the numbers 0 .. size - 1 occur in each row: bool [..., size] for [..., K]."""
  return np.any(np.asarray(ids)[..., None] == np.arange(size), axis=-2)


def close(name: str, got: np.ndarray, want: np.ndarray, atol: float) -> Row:
  """Compares numbers by their largest absolute difference; a NaN counts as infinitely far."""
  if got.shape != want.shape:
    return Row(f"{name}: shape {got.shape} against {want.shape}", float("inf"), atol, ())
  difference = np.nan_to_num(np.abs(got - want), nan=np.inf)
  where = np.unravel_index(np.argmax(difference), difference.shape)
  return Row(name, float(difference[where]), atol, tuple(map(int, where)))


def same(name: str, got: np.ndarray, want: np.ndarray) -> Row:
  """Counts the tokens whose ids differ: entries, or where there are several a token, rows."""
  if got.shape != want.shape:
    return Row(f"{name}: shape {got.shape} against {want.shape}", float("inf"), 0, ())
  differs = got != want
  if differs.ndim > 2:
    differs = differs.any(axis=-1)
  where = np.argwhere(differs)
  return Row(name, len(where), 0, tuple(map(int, where[0])) if len(where) else ())


def table(rows: Sequence[Row]) -> str:
  """Returns the comparisons as text, failed ones first, each kind by its largest difference."""
  ordered = sorted(rows, key=lambda r: (r.ok, -r.worst))
  width = max(len(row.name) for row in rows)
  lines = [f"{'compared':{width}}  {'worst':>10}  {'allowed':>10}  {'at':>12}"]
  for row in ordered:
    where = ",".join(map(str, row.where))
    mark = "" if row.ok else "  MISMATCH"
    lines.append(f"{row.name:{width}}  {row.worst:>10.3g}  {row.limit:>10.3g}  {where:>12}{mark}")
  return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
  """Runs the comparison.

  Args:
    argv: the arguments.

  Returns:
    The exit code.
  """
  try:
    args = _parse(argv)
    oracle = read_oracle(args.oracle)
    with jax.default_matmul_precision("highest"):
      loaded = checkpoint.load(args.checkpoint, dtype=jnp.float32, expert_format="float32")
      engine = make_engine(loaded, oracle, args.slots)
  except ValueError as error:
    print(f"verify: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  with jax.default_matmul_precision("highest"):
    rows = [*compare_engine(engine, oracle, args.atol), *compare_whole(loaded, oracle, args.atol)]
  print(table(rows))
  failed = sum(not row.ok for row in rows)
  slots = f"{args.slots} slots a layer" if args.slots else "all experts resident"
  print(f"{len(rows) - failed} of {len(rows)} comparisons hold, {slots}, atol {args.atol:g}")
  return 1 if failed else 0


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise ValueError(f"{message}; see --help")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  about, _, details = __doc__.partition("\n")
  parser = _Parser(
    prog="python -m checkpoints_convert.verify",
    description=about,
    epilog=details,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--checkpoint", required=True, help="published or converted folder")
  parser.add_argument("--oracle", required=True, help="npz file of reference activations")
  parser.add_argument("--slots", type=int, default=0, help="expert slots a layer; default: all")
  parser.add_argument("--atol", type=float, default=1e-4, help="largest absolute difference")
  args = parser.parse_args(argv)
  if args.slots < 0 or (args.slots == 0 and any(a.startswith("--slots") for a in argv)):
    raise ValueError(f"--slots={args.slots}: expected 1 or more; leave it out for all experts")
  if not args.atol >= 0:
    raise ValueError(f"--atol={args.atol}: expected 0 or more")
  return args


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
