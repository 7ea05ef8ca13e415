"""The generators, and the split between training text and held-out items."""

import functools
import itertools
import json
import pathlib
import random
import re
from typing import NamedTuple

import pytest

import moecore_jax
from moecore_jax.config_loading import load_config
from moecore_jax.evaluation import sandbox, tasks
from moecore_jax.training import corpus, tokenizer, workloads
from moecore_jax.training.batches import encode
from moecore_jax.training.corpus import arithmetic, facts, functions

ROOT = pathlib.Path(moecore_jax.__file__).parents[1]

DOCUMENTS_A_STEP = 70  # more than the demo's batches draw


class Training(NamedTuple):
  """What the whole training text of the demo model holds, read from the texts alone.

  Attributes:
    operands: the numbers of each math prompt.
    questions: (land, relation) of each qa prompt.
    statements: sentences of the qa statements.
    texts: whole texts of the other domains.
    keys: the generators' own keys.
  """

  operands: set[tuple[int, ...]]
  questions: set[tuple[str, str]]
  statements: set[str]
  texts: dict[str, set[str]]
  keys: set[tuple]


@pytest.fixture(scope="module")
def training():
  """Every step of the run that made the bundled weights."""
  seen = Training(set(), set(), set(), {"code": set(), "agent": set()}, set())
  train = load_config(str(ROOT / "configs" / "demo_train.py")).train
  for step in range(train.num_steps):
    mixture = corpus.mixture_at(step, train.restart_step)
    for document in itertools.islice(corpus.stream(train.seed, step, mixture), DOCUMENTS_A_STEP):
      seen.keys.add(document.key)
      prompt = document.parts[0].text
      if document.domain == "math":
        seen.operands.add(_numbers(prompt))
      elif document.domain != "qa":
        seen.texts[document.domain].add(document.text)
      elif prompt.startswith("Question: "):
        seen.questions.add(_asked(prompt))
      else:
        seen.statements.update(re.findall(r"[^.:]+\.", prompt.removeprefix("Atlas:")))
  return seen


@pytest.fixture(scope="module")
def bundled():
  return {domain: tasks.load_items(domain) for domain in corpus.DOMAINS}


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(map(int, re.findall(r"\d+", text)))


@functools.cache
def _questions() -> dict[str, tuple[str, str]]:
  """Every way of asking for every fact."""
  return {
    form.format(land=land): (land, relation)
    for relation, (_, forms) in facts.PHRASES.items()
    for form in forms
    for land in facts.LANDS
  }


def _asked(prompt: str) -> tuple[str, str]:
  return _questions()[prompt.partition("\n")[0].removeprefix("Question: ")]


def test_a_step_draws_fewer_documents():
  words = tokenizer.train(0)
  train = load_config(str(ROOT / "configs" / "demo_train.py")).train
  for step in [*range(20), *range(train.num_steps - 20, train.num_steps)]:
    mixture = corpus.mixture_at(step, train.restart_step)
    drawn = itertools.islice(corpus.stream(train.seed, step, mixture), DOCUMENTS_A_STEP)
    tokens = sum(len(encode(words, document)[0]) for document in drawn)
    assert tokens > 1.2 * train.batch_rows * train.row_tokens


def test_no_held_out_operands_occur_in_training(training, bundled):
  held_out = {_numbers(item.prompt) for item in bundled["math"]}
  assert len(held_out) == len(bundled["math"]) and all(len(n) == 3 for n in held_out)
  assert len(training.operands) > 10_000
  assert not held_out & training.operands


def test_no_held_out_question_occurs_in_training(training, bundled):
  """A held-out (land, relation) pair is never asked for, in any paraphrase, with any options."""
  held_out = {_asked(item.prompt) for item in bundled["qa"]}
  assert len(held_out) == len(bundled["qa"])
  assert len(training.questions) > 250
  assert not held_out & training.questions


def test_every_fact_is_stated_in_training(training, bundled):
  for (land, relation), value in facts.world().items():
    for form in facts.PHRASES[relation][0]:
      assert " " + form.format(land=land, value=value) in training.statements
  for item in bundled["qa"]:
    stated = item.answer.partition(" Answer:")[0]
    assert " " + re.sub(r" \([A-D]\)", "", stated) in training.statements


@pytest.mark.parametrize("domain", ["code", "agent"])
def test_no_held_out_prompt_occurs_in_training(training, bundled, domain):
  assert len(training.texts[domain]) > 1000
  for item in bundled[domain]:
    assert not any(text.startswith(item.prompt) for text in training.texts[domain])


def test_no_key_of_training_is_held_out(training):
  assert not any(map(corpus.is_held_out, training.keys))


@pytest.mark.parametrize("domain", corpus.DOMAINS)
def test_the_bundled_items_are_the_held_out_ones(bundled, domain):
  assert bundled[domain] == workloads.items(domain)
  assert all(corpus.is_held_out(document.key) for document in corpus.held_out(domain, 64))


def test_held_out_share():
  """The split is a fair one, and the same in every process."""
  keys = [(a, b, c) for a in range(20) for b in range(20) for c in range(20)]
  assert 0.17 < sum(map(corpus.is_held_out, keys)) / len(keys) < 0.23
  assert [k for k in keys[:12] if corpus.is_held_out(k)] == [(0, 0, 0), (0, 0, 8)]


def test_the_stream_is_a_function_of_seed_and_step():
  def first(seed, step):
    return list(itertools.islice(corpus.stream(seed, step), 50))

  assert first(0, 3) == first(0, 3)
  assert first(0, 3) != first(0, 4)
  assert first(0, 3) != first(1, 3)


@pytest.mark.parametrize("generator", [arithmetic.problem, arithmetic.drill])
def test_worked_steps_are_right(generator):
  rng = random.Random(1)
  for _ in range(2000):
    document = generator(rng)
    *steps, last = document.parts[1].text.splitlines()
    for step in steps:
      left, right = step.split("=")
      a, sign, b = re.fullmatch(r"(\d+)([-+*])(\d+)", left).groups()
      assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(right)
    assert last == f"#### {steps[-1].split('=')[1]}"
    assert all(0 <= n <= 99 for n in _numbers(document.text))


def test_the_right_option_is_the_fact():
  rng = random.Random(2)
  for _ in range(500):
    document = facts.question(rng)
    prompt, answer = (part.text for part in document.parts)
    options = {letter: value for value, letter in re.findall(r"(\w+) \(([A-D])\)", prompt)}
    assert "".join(options) == "ABCD" and len(set(options.values())) == 4
    letter = answer.strip()[-1]
    assert options[letter] == facts.world()[document.key]
    assert f" {options[letter]} ({letter})." in answer


@pytest.mark.parametrize("index", range(len(functions.FAMILIES)))
def test_bodies_pass_their_assertions(index):
  rng = random.Random(index)
  document = next(d for d in iter(lambda: functions.function(rng), None) if d.key[0] == index)
  assert sandbox.passes(document.text + document.tests)
  assert not sandbox.passes(document.parts[0].text + "    return None\n" + document.tests)


def test_transcripts_are_json_lines():
  rng = random.Random(3)
  for _ in range(300):
    document = corpus.sample(rng)
    if document.domain != "agent":
      continue
    for part in document.parts:
      if part.is_target:
        assert set(json.loads(part.text)) == {"tool", "args"}


def test_a_value_has_one_letter_in_all_questions_of_the_held_out_form():
  letters = {}
  for seed in range(400):
    prompt, answer = (part.text for part in facts.question(random.Random(seed)).parts)
    options = re.findall(r"(\w+) \(([A-D])\)", prompt)
    assert [letter for _, letter in options] == list("ABCD")
    assert re.search(r"(\w+) \(([A-D])\)", answer).groups() in options
    for value, letter in options:
      assert letters.setdefault(value, letter) == letter
  assert len(letters) == sum(map(len, facts.VALUES.values()))


def test_the_second_phase_begins_at_its_step():
  assert corpus.mixture_at(9, 10) is corpus.MIXTURE
  assert corpus.mixture_at(10, 10) is corpus.SECOND_MIXTURE
  assert corpus.mixture_at(10, 0) is corpus.MIXTURE
  for mixture in (corpus.MIXTURE, corpus.SECOND_MIXTURE):
    assert abs(sum(mixture.values()) - 1) < 1e-9
