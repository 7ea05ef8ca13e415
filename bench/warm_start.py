"""What a warm start is worth: hit rates of the first generated tokens, on the demo model.

    python -m bench.warm_start --json=/tmp/warm_start.json

Each bundled item is answered alone, from an empty cache, under the demo config (12 of 32 experts a
layer, staged prefill) without copies ahead. What differs is what fills the slots while the layers
are staged: nothing; the profile of the item's own domain, of each other domain, or of all merged;
the prompt's own scores; or its places and the profile's summed. `on demand` is a prefill without
staging: the slots hold what the prompt used last and, with a profile, what came in the gaps. That
takes copies ahead, which count as hits in decode, too: the two starts with one copy ahead compare
with one another alone.

Prompts are those of the items, or long: other items of the domain come before, up to 160 tokens.
The profiles were recorded on other text. Answers end where they end: the first 64 tokens of a
shorter one are all that it has.
"""

import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from bench import command
from bench.aot_row import machine, versions
from moecore_jax.config_loading import load_config
from moecore_jax.evaluation import tasks
from moecore_jax.reporting import table
from moecore_jax.runtime.engine import Engine

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "demo.py"
DOMAINS = ("math", "qa", "code", "agent")
FIRST_TOKENS = (4, 16, 64)
LONG_PROMPT_TOKENS = 160


class Start(NamedTuple):
  """How a request finds the cache.

  Attributes:
    name: for people.
    profile: whose ranks it takes: "own", "other" (of each in turn), "merged" or "none".
    overrides: of the config.
  """

  name: str
  profile: str
  overrides: tuple[str, ...]


_NO_COPIES, _ON_DEMAND = "residency.prefetch.max_experts=0", "residency.staging.enabled=False"


def _staged(name: str, profile: str, fill: str) -> Start:
  return Start(name, profile, (_NO_COPIES, f"residency.staging.fill={fill}"))


STARTS = (
  _staged("empty", "none", "none"),
  _staged("own profile", "own", "profile"),
  _staged("another domain's", "other", "profile"),
  _staged("merged profile", "merged", "profile"),
  _staged("prompt's scores", "none", "prompt"),
  _staged("own profile + prompt", "own", "both"),
  Start("on demand", "none", (_NO_COPIES, _ON_DEMAND)),
  Start("on demand, one copy", "none", (_ON_DEMAND,)),
  Start("on demand, one copy, own", "own", (_ON_DEMAND,)),
)


class Item(NamedTuple):
  """A prompt of a domain."""

  domain: str
  token_ids: list[int]


def make_items(engine: Engine, count: int, is_long: bool) -> list[Item]:
  """Returns the first `count` bundled items of each domain, or the same behind others of it."""
  assert engine.tokenizer is not None
  made = []
  for domain in DOMAINS:
    items = tasks.load_items(domain)
    for i in range(count):
      text = items[i].prompt
      ids = engine.tokenizer.encode(text).ids
      for other in (items[(i + k) % len(items)] for k in range(1, len(items))):
        text = f"{other.prompt}{other.answer}\n{text}"
        longer = engine.tokenizer.encode(text).ids
        if not is_long or len(longer) > LONG_PROMPT_TOKENS:
          break
        ids = longer
      made.append(Item(domain, ids))
  return made


def first_hits(engine: Engine, item: Item, domain: str | None) -> np.ndarray:
  """Answers an item from an empty cache; returns the hits of each token fed, int [tokens]."""
  engine.reset_residency()
  room = engine.spec.context_tokens - len(item.token_ids)
  budget = min(max(FIRST_TOKENS) + 1, room)
  is_active = engine.prefill(0, item.token_ids, budget, domain=domain).is_active
  hits = []
  while is_active:
    out = engine.decode_step()
    row_hits, row_is_active = jax.device_get((out.hits, out.is_active))
    hits.append(int(row_hits[0]))
    is_active = bool(row_is_active[0])
  return np.array(hits)


def measure(start: Start, is_long: bool, count: int) -> dict[str, Any]:
  """Measures one start; returns its row."""
  none = ("residency.profiles=",) if start.profile == "none" else ()
  config = load_config(str(CONFIG), ("engine.batch_size=1", *start.overrides, *none))
  engine = Engine.from_checkpoint(None, config)
  by_domain: dict[str, list[np.ndarray]] = {domain: [] for domain in DOMAINS}
  items = make_items(engine, count, is_long)
  for item in items:
    for domain in _profiles(start, item.domain):
      by_domain[item.domain].append(first_hits(engine, item, domain))
  invocations = sum(len(g.layers) * g.num_experts_per_tok for g in engine.model_spec.expert_groups)
  counters = engine.counters()

  def rate(runs: Sequence[np.ndarray], first: int) -> float:
    heads = np.concatenate([run[:first] for run in runs])
    return round(float(heads.mean()) / invocations, 4)

  every = [run for runs in by_domain.values() for run in runs]
  return {
    "start": start.name,
    "prompts": "long" if is_long else "items",
    "mean_prompt_tokens": round(float(np.mean([len(item.token_ids) for item in items])), 1),
    "mean_output_tokens": round(float(np.mean([len(run) for run in every])), 1),
    "items": len(items),
    "slots": config.residency.slots_per_layer,
    **{f"hit_rate_{first}": rate(every, first) for first in FIRST_TOKENS},
    **{
      f"hit_rate_{first}_{domain}": rate(runs, first)
      for first in FIRST_TOKENS
      for domain, runs in by_domain.items()
    },
    "prefill_copies_ahead": int(counters["prefill_prefetches"].sum()),
    "versions": versions(),
    "machine": machine(),
  }


def _profiles(start: Start, own: str) -> Iterator[str | None]:
  if start.profile == "other":
    yield from (domain for domain in DOMAINS if domain != own)
  else:
    yield own if start.profile == "own" else None


def measure_all(values: flags.FlagValues) -> Iterator[dict[str, Any]]:
  """Measures every start with both kinds of prompts; yields the rows."""
  rates = [f"hit_rate_{first}" for first in FIRST_TOKENS]
  columns = ("start", "prompts", "mean_prompt_tokens", *rates)
  rows = []
  for is_long in (False, True):
    for start in STARTS:
      rows.append(measure(start, is_long, values["items"].value))
      yield rows[-1]
  print(table.render(columns, [[row[name] for name in columns] for row in rows]))


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_integer(
    "items", 64, "items of each domain", lower_bound=1, upper_bound=64, flag_values=values
  )


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  return command.run("bench.warm_start", __doc__, argv, measure_all, _define)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
