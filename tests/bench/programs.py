"""Small programs that read a bank in host memory rightly or wrongly, compiled for one target.

    python -m tests.bench.programs TARGET OUTPUT_DIR

in a process of its own, writes NAME.hlo and NAME.json (the sizes) for each program.
"""

import dataclasses
import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench import described

LAYERS, EXPERTS, SLOTS, PER_TOKEN, WIDTH = 3, 16, 4, 3, 4096


def on_device(array):
  return jax.device_put(array, jax.memory.Space.Device)


def row_of(bank, row):
  return on_device(lax.dynamic_index_in_dim(bank, row, 0, keepdims=False))


def put(pool, matrix, slot):
  return lax.dynamic_update_index_in_dim(pool, matrix, slot, 0)


def as_weights(words):
  return lax.bitcast_convert_type(words, jnp.bfloat16).reshape(WIDTH, WIDTH)


def load_missing(bank, pool, slot_of, layer, chosen):
  """Loads the chosen experts that are absent, one turn of the loop for each."""
  absent = slot_of[layer, chosen] < 0
  order = jnp.argsort(~absent)

  def load(i, carry):
    pool, slot_of = carry
    expert, slot = chosen[order[i]], layer * SLOTS + i
    slot_of = jnp.where(slot_of == slot, -1, slot_of).at[layer, expert].set(slot)
    return put(pool, row_of(bank, layer * EXPERTS + expert), slot), slot_of

  return lax.fori_loop(0, jnp.sum(absent, dtype=jnp.int32), load, (pool, slot_of))


@jax.named_scope("experts")
def run_experts(pool, slot_of, layer, chosen, x):
  def run(i, y):
    return y + x[None] @ as_weights(pool[slot_of[layer, chosen[i]]])

  return x + lax.fori_loop(0, PER_TOKEN, run, jnp.zeros_like(x)[None])[0]


@jax.named_scope("attention")
def attend(dense, layer, x):
  return x + jnp.tanh(x[None] @ dense[layer])[0]


def choose(router, layer, x):
  return lax.top_k((x @ router[layer]).astype(jnp.float32), PER_TOKEN)[1]


def layer_by_layer(bank, router, dense, pool, slot_of, x):
  for layer in range(LAYERS):
    chosen = choose(router, layer, x)
    pool, slot_of = load_missing(bank, pool, slot_of, layer, chosen)
    x = attend(dense, layer, run_experts(pool, slot_of, layer, chosen, x))
  return pool, slot_of, x


def scanned(bank, router, dense, pool, slot_of, x):
  def body(carry, layer):
    pool, slot_of, x = carry
    chosen = choose(router, layer, x)
    pool, slot_of = load_missing(bank, pool, slot_of, layer, chosen)
    return (pool, slot_of, attend(dense, layer, run_experts(pool, slot_of, layer, chosen, x))), None

  return lax.scan(body, (pool, slot_of, x), jnp.arange(LAYERS))[0]


def with_prefetch(bank, router, dense, pool, slot_of, x, *, is_late):
  """Fetches an expert of the next layer while this one computes, or, `is_late`, before."""
  chosen, nxt = choose(router, 0, x), choose(router, 1, x)[0]
  wanted = (slot_of[1, nxt] < 0).astype(jnp.int32)

  def fetch_and_run(_, carry):
    pool, x = carry
    with jax.named_scope("prefetch"):
      arriving = row_of(bank, EXPERTS + nxt)
    if is_late:  # the experts below read the pool, so they wait for the copy
      pool = put(pool, arriving, SLOTS)
    x = attend(dense, 1, run_experts(pool, slot_of, 0, chosen, x))
    if not is_late:  # which slot it goes to is known when the next layer has routed
      pool = put(pool, arriving, SLOTS + choose(router, 1, x)[0] % SLOTS)
    return pool, x

  def run_only(_, carry):
    pool, x = carry
    return pool, attend(dense, 1, run_experts(pool, slot_of, 0, chosen, x))

  pool, x = lax.fori_loop(0, wanted, fetch_and_run, (pool, x))
  pool, x = lax.fori_loop(0, 1 - wanted, run_only, (pool, x))
  return pool, slot_of, x


def reads_every_turn(bank, router, dense, pool, slot_of, x):
  """Reads a row for each chosen expert, whether it is there or not."""
  chosen = choose(router, 0, x)

  def load(i, pool):
    return put(pool, row_of(bank, chosen[i]), i)

  return lax.fori_loop(0, PER_TOKEN, load, pool), slot_of, x


def copies_the_bank(bank, router, dense, pool, slot_of, x):
  return put(pool, jnp.sum(on_device(bank), 0, dtype=jnp.uint32), 0), slot_of, x


def reads_two_rows(bank, router, dense, pool, slot_of, x):
  count = slot_of[0, 0]

  def take(i, pool):
    return lax.dynamic_update_slice(
      pool, on_device(lax.dynamic_slice(bank, (i + count, 0, 0), (2, *bank.shape[1:]))), (i, 0, 0)
    )

  return lax.fori_loop(0, count, take, pool), slot_of, x


def computes_on_the_host(bank, router, dense, pool, slot_of, x):
  return put(pool, row_of(bank * 3, slot_of[0, 0]), 0), slot_of, x


def loads_until(bank, router, dense, pool, slot_of, x):
  """A loop that ends when a value says so: its turns cannot be told from a counter."""

  def load(carry):
    pool, row = carry
    matrix = row_of(bank, row)
    return put(pool, matrix, 0), row + 1 + matrix[0, 0].astype(jnp.int32) % 7

  return (
    lax.while_loop(lambda carry: carry[1] < EXPERTS, load, (pool, slot_of[0, 0]))[0],
    slot_of,
    x,
  )


PROGRAMS = {
  "layer_by_layer": layer_by_layer,
  "scanned": scanned,
  "prefetch": functools.partial(with_prefetch, is_late=False),
  "late_prefetch": functools.partial(with_prefetch, is_late=True),
  "reads_every_turn": reads_every_turn,
  "copies_the_bank": copies_the_bank,
  "reads_two_rows": reads_two_rows,
  "computes_on_the_host": computes_on_the_host,
  "loads_until": loads_until,
}


def main(target: str, directory: str) -> None:
  mesh = Mesh(np.array([described.tracing_device(target)]), ("device",))

  def abstract(shape, dtype, memory_kind="device"):
    sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  args = (
    abstract((LAYERS * EXPERTS, WIDTH, WIDTH // 2), jnp.uint32, "pinned_host"),
    abstract((LAYERS, WIDTH, EXPERTS), jnp.bfloat16),
    abstract((LAYERS, WIDTH, WIDTH), jnp.bfloat16),
    abstract((LAYERS * SLOTS, WIDTH, WIDTH // 2), jnp.uint32),
    abstract((LAYERS, EXPERTS), jnp.int32),
    abstract((WIDTH,), jnp.bfloat16),
  )
  for name, function in PROGRAMS.items():

    def step(*args, function=function):
      return function(*args)

    program = described.compile_for(target, jax.jit(step, donate_argnums=(3, 4)), args)
    path = pathlib.Path(directory) / name
    path.with_suffix(".hlo").write_text(program.hlo)
    sizes = dataclasses.asdict(program) | {"hlo": ""}
    path.with_suffix(".json").write_text(json.dumps(sizes))


if __name__ == "__main__":
  main(*sys.argv[1:])
