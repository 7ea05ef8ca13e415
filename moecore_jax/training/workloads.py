"""Turns held-out documents into the bundled workloads, assets/demo/workloads/*.jsonl."""

import dataclasses
import json
from pathlib import Path

from moecore_jax.evaluation.tasks import Item
from moecore_jax.training import corpus

NUM_ITEMS = 64
MAX_NEW_TOKENS = {"math": 48, "code": 80, "qa": 32, "agent": 64}


def items(domain: str, num_items: int = NUM_ITEMS) -> list[Item]:
  """Returns the workload of a domain.

  An item ends where its document ends, but for `agent`: there, items ask in turn for the tool call
  and for the reply after the tool's result, and end with the line.
  """
  result = []
  for i, document in enumerate(corpus.held_out(domain, num_items)):
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
    lines = [json.dumps(dataclasses.asdict(item)) + "\n" for item in items(domain)]
    (folder / f"{domain}.jsonl").write_text("".join(lines), encoding="utf-8")
