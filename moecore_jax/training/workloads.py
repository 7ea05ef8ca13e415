"""Turns held-out documents into workloads: those of the test split are bundled with the demo model,
assets/demo/workloads/*.jsonl.

    python -m moecore_jax.training.workloads --output=/tmp/validation.jsonl

writes items of all domains from the validation split, which a profile may be recorded on.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from moecore_jax.evaluation.tasks import Item
from moecore_jax.training import corpus

NUM_ITEMS = 64
NUM_VALIDATION_ITEMS = 32  # of each domain; the validation split has 39 questions
MAX_NEW_TOKENS = {"math": 48, "code": 80, "qa": 32, "agent": 64}


def items(domain: str, num_items: int = NUM_ITEMS, part: corpus.Split = "test") -> list[Item]:
  """Returns the workload of a domain, from a held-out part of the split.

  An item ends where its document ends, but for `agent`: there, items ask in turn for the tool call
  and for the reply after the tool's result, and end with the line.
  """
  result = []
  for i, document in enumerate(corpus.held_out(domain, num_items, part)):
    last = 2 * (i % 2) + 1 if domain == "agent" else len(document.parts) - 1
    result.append(
      Item(
        id=f"{domain}-{i:03d}",
        task=domain,
        domain=domain,
        prompt="".join(part.text for part in document.parts[:last]),
        answer=document.parts[last].text,
        max_new_tokens=MAX_NEW_TOKENS[domain],
        stop=("\n",) if domain == "agent" else (),
        tests=document.tests,
      )
    )
  return result


def write(folder: Path) -> None:
  """Writes {domain}.jsonl for every domain."""
  folder.mkdir(parents=True, exist_ok=True)
  for domain in corpus.DOMAINS:
    (folder / f"{domain}.jsonl").write_text(_lines(items(domain)), encoding="utf-8")


def _lines(workload: Sequence[Item]) -> str:
  return "".join(json.dumps(dataclasses.asdict(item)) + "\n" for item in workload)


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  values = flags.FlagValues()
  flags.DEFINE_string("output", None, "the file to write", flag_values=values)
  flags.DEFINE_integer(
    "items",
    NUM_VALIDATION_ITEMS,
    "items of each domain",
    lower_bound=1,
    upper_bound=NUM_VALIDATION_ITEMS,
    flag_values=values,
  )
  try:
    values(["workloads", *argv])
    if not values.output:
      raise flags.Error("--output=FILE is missing")
  except flags.Error as error:
    print(f"workloads: {error}", file=sys.stderr)
    return 2
  held_out = [
    item for domain in corpus.DOMAINS for item in items(domain, values.items, "validation")
  ]
  Path(values.output).write_text(_lines(held_out), encoding="utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
