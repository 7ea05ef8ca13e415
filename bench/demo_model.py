"""What the demo model has learnt: accuracy on every held-out item, and how its experts specialise.

    python -m bench.demo_model --json=/tmp/demo_model.json

Accuracy is that of greedy decoding with every expert on the device, scored as `moecore eval` does.
Overlap is the share of experts that two domains have in common among the most used quarter of each,
over the tokens of the held-out items, averaged over the MoE layers; 0.25 is chance. The items of a
domain are cut in two random halves and compared as well: what the measure gives for one domain.
"""

import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
from absl import flags
from flax import nnx

from bench import command
from moecore_jax.config_loading import load_config
from moecore_jax.evaluation import tasks
from moecore_jax.models.router import SelectionBias
from moecore_jax.reporting.table import render
from moecore_jax.runtime.engine import DEMO, Engine, Request
from moecore_jax.testing.published import load_module
from moecore_jax.training import corpus, heldout, workloads

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "demo.py"


def accuracies() -> dict[str, float]:
  """Returns the share of right answers by task, over all bundled items."""
  config = load_config(f"{CONFIG}:all_resident", ["engine.batch_size=8"])
  engine = Engine.from_checkpoint(None, config)
  result = {}
  for task in tasks.task_names():
    items = {item.id: item for item in tasks.load_items(task)}
    requests = [
      Request(i.id, i.prompt, i.max_new_tokens, domain=i.domain, stop=i.stop)
      for i in items.values()
    ]
    scores = [tasks.score(items[c.id], c.text) for c in engine.generate(requests)]
    result[task] = float(np.mean(scores))
  return result


def overlaps() -> tuple[dict[str, float], dict[str, float]]:
  """Returns the overlap of each pair of domains, and of each domain's two halves."""
  words = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
  graphdef, params, biases = nnx.split(load_module(DEMO), nnx.Param, SelectionBias)
  domains = heldout.load(words, workloads.NUM_ITEMS, "test")
  order = np.random.default_rng(0).permutation(workloads.NUM_ITEMS)
  halves = {
    f"{name}{half}": heldout.Domain(domain.tokens[part], domain.is_target[part])
    for name, domain in domains.items()
    for half, part in enumerate(np.split(order, 2))
  }
  _, counts = heldout.make_evaluate(graphdef, halves)(params, biases)
  whole = {name: counts[f"{name}0"] + counts[f"{name}1"] for name in corpus.DOMAINS}
  within = heldout.top_quarter_overlap(counts)
  return (
    heldout.top_quarter_overlap(whole),
    {name: within[f"{name}0-{name}1"] for name in corpus.DOMAINS},
  )


def measure(_: flags.FlagValues) -> Iterator[dict[str, Any]]:
  """Yields {"accuracy", "top_quarter_overlap", "overlap_of_halves"}."""
  pairs, halves = overlaps()
  result = {
    "accuracy": accuracies(),
    "top_quarter_overlap": pairs,
    "overlap_of_halves": halves,
  }
  print(render(["task", "accuracy"], list(result["accuracy"].items())), end="\n\n")
  by_halves = [(f"{name}, two halves", x) for name, x in halves.items()]
  print(render(["domains", "overlap of top quarters"], [*pairs.items(), *by_halves]))
  yield result


def main(argv: Sequence[str]) -> int:
  """Runs the command line; returns the exit code."""
  return command.run("bench.demo_model", __doc__, argv, measure)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
