"""What storing experts in fewer bits does to the demo model: perplexity of held-out text by format.

    python -m bench.perplexity --json=/tmp/perplexity.json

Over all bundled items of a task, fed prompt and reference answer: e to the mean negative
log-probability of a token, of the answers' tokens and of all. Numbers are float32 but for the
experts, and for the dense maps in the last row.
"""

import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tokenizers
from absl import flags

from bench import command
from moecore_jax.config_loading import load_config
from moecore_jax.reporting.table import render
from moecore_jax.runtime.engine import DEMO, Engine
from moecore_jax.training import heldout, workloads
from moecore_jax.training.tokenizer import PAD_ID

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "demo.py"
FORMATS = (
  ("float32", "float"),
  ("bfloat16", "float"),
  ("w8a8", "float"),
  ("w4a8", "float"),
  ("w4a8", "w8a8"),
)
"""Formats of the experts and of the dense maps."""


def perplexities(engine: Engine, domain: heldout.Domain) -> tuple[float, float]:
  """Returns the perplexity of a domain's answers, and that of all its text."""
  tokens, following = domain.tokens, domain.tokens[:, 1:]
  logits = engine.score(tokens)[:, :-1]
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  losses = -np.take_along_axis(log_probs, following[..., None], axis=-1)[..., 0]
  parts = (domain.is_target[:, 1:], following != PAD_ID)
  answers, everything = (float(np.exp(losses[part].mean())) for part in parts)
  return answers, everything


def measure(_: flags.FlagValues) -> Iterator[dict[str, Any]]:
  """Yields {"experts", "dense", "answers": {task: perplexity}, "all": {task: perplexity}}."""
  words = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
  domains = heldout.load(words, workloads.NUM_ITEMS, "test")
  table = []
  for experts, dense in FORMATS:
    chosen = [f"engine.expert_format={experts}", f"engine.dense_format={dense}"]
    engine = Engine.from_checkpoint(None, load_config(f"{CONFIG}:all_resident", chosen))
    found = {name: perplexities(engine, domain) for name, domain in domains.items()}
    answers, everything = ({name: x[i] for name, x in found.items()} for i in range(2))
    table.append([f"{experts}, dense {dense}", *(f"{a:.5f}, {b:.3f}" for a, b in found.values())])
    yield {"experts": experts, "dense": dense, "answers": answers, "all": everything}
  print(render(["experts", *domains], table))


def main(argv: Sequence[str]) -> int:
  """Runs the command line; returns the exit code."""
  return command.run("bench.perplexity", __doc__, argv, measure)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
