"""Tasks: the bundled items, and what counts as a right answer.

math   the number after the last `####`                             (the GSM8K form)
qa     the letter after the last `Answer:`                          (the MMLU form)
code   prompt and completion together pass the item's assertions    (the HumanEval form)
agent  the first line holds the expected tool call, as parsed JSON
"""

import dataclasses
import importlib.resources
import json
import re

from moecore_jax.evaluation import sandbox

_WORKLOADS = importlib.resources.files("moecore_jax") / "assets" / "demo" / "workloads"
_NUMBER = re.compile(r"####\s*\$?(-?[\d,]+(?:\.\d+)?)")
_LETTER = re.compile(r"Answer:\s*\(?([A-Z])\b")


@dataclasses.dataclass(frozen=True)
class Item:
  """One request of a task.

  Attributes:
    id: distinct within the task.
    task: name of the task; it decides how answers are scored.
    domain: domain of the request.
    prompt: what the model reads.
    answer: the reference completion, worked steps included; for code, a right body.
    max_new_tokens: cap on the completion.
    stop: texts that end it.
    tests: for code, assertions that follow the completed function; else empty.
  """

  id: str
  task: str
  domain: str
  prompt: str
  answer: str
  max_new_tokens: int
  stop: tuple[str, ...] = ()
  tests: str = ""


def task_names() -> tuple[str, ...]:
  """Returns the names of the bundled tasks."""
  return tuple(_SCORERS)


def load_items(task: str, limit: int = 0) -> list[Item]:
  """Returns a task's bundled items.

  Args:
    task: its name.
    limit: the first so many; 0: all.

  Raises:
    ValueError: there is no such task.
  """
  if task not in _SCORERS:
    raise ValueError(f"task {task!r} is unknown; choose from {', '.join(_SCORERS)}")
  lines = (_WORKLOADS / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
  rows = [json.loads(line) for line in lines[: limit or None]]
  return [Item(**(row | {"stop": tuple(row["stop"])})) for row in rows]


def score(item: Item, text: str) -> bool:
  """Tells whether a completion is right.

  Args:
    item: what was asked.
    text: the completion, without the prompt.
  """
  return _SCORERS[item.task](item, text)


def _score_math(item: Item, text: str) -> bool:
  got, wanted = _last_number(text), _last_number(item.answer)
  return got is not None and got == wanted


def _last_number(text: str) -> float | None:
  found = _NUMBER.findall(text)
  return float(found[-1].replace(",", "")) if found else None


def _score_qa(item: Item, text: str) -> bool:
  got, wanted = _LETTER.findall(text), _LETTER.findall(item.answer)
  return bool(got) and got[-1] == wanted[-1]


def _score_code(item: Item, text: str) -> bool:
  return sandbox.passes(f"{item.prompt}{text}\n\n{item.tests}")


def _score_agent(item: Item, text: str) -> bool:
  first_line = text.strip().partition("\n")[0]
  try:
    return json.loads(first_line) == json.loads(item.answer)
  except ValueError:
    return False


_SCORERS = {"math": _score_math, "qa": _score_qa, "code": _score_code, "agent": _score_agent}
