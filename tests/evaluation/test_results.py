"""The log of a batch evaluation: torn lines, kills, locks, workdirs of other runs."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore_jax.evaluation import results

ASKED = {"config": {"policy": "rhac", "slots": [8, 8]}, "items": {"math": "a1"}}


def test_rows_survive_reopening(tmp_path):
  rows = [{"id": "a", "text": "ein ümlaut\nand a line"}, {"id": "b", "x": [1, None, 0.5]}]
  with results.ResultLog(tmp_path / "new" / "dir", ASKED) as log:
    assert log.rows == []
    for row in rows:
      log.append(row)
    assert log.rows == rows
  with results.ResultLog(tmp_path / "new" / "dir", ASKED) as log:
    assert log.rows == rows


@settings(max_examples=30, deadline=None)
@given(
  cut=st.integers(1, 400),
  texts=st.lists(st.text(max_size=20), min_size=1, max_size=5),
  data=st.data(),
)
def test_a_line_torn_anywhere_is_dropped(tmp_path_factory, cut, texts, data):
  """Whatever prefix of the file reached the disk, exactly its whole lines count."""
  workdir = tmp_path_factory.mktemp("torn")
  with results.ResultLog(workdir, ASKED) as log:
    for i, text in enumerate(texts):
      log.append({"id": i, "text": text})
  path = workdir / "results.jsonl"
  content = path.read_bytes()
  kept = content[: max(0, len(content) - cut)]
  path.write_bytes(kept)
  whole = kept.count(b"\n")
  with results.ResultLog(workdir, ASKED) as log:
    assert [row["id"] for row in log.rows] == list(range(whole))
    for i in range(whole, len(texts)):
      log.append({"id": i, "text": texts[i]})
  assert path.read_bytes() == content


def test_a_damaged_line_is_named(tmp_path):
  with results.ResultLog(tmp_path, ASKED) as log:
    for i in range(3):
      log.append({"id": i})
  path = tmp_path / "results.jsonl"
  path.write_bytes(path.read_bytes().replace(b'{"id": 1}', b'{"id"; 1}'))
  with pytest.raises(ValueError, match=r"results\.jsonl line 2 is damaged"):
    results.ResultLog(tmp_path, ASKED)
  assert len(path.read_bytes().splitlines()) == 3


def test_another_run_is_refused(tmp_path):
  results.ResultLog(tmp_path, ASKED).__exit__(None, None, None)
  before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
  other = {"config": {"policy": "lru", "slots": [8, 8]}, "items": {"math": "a1"}}
  with pytest.raises(ValueError, match=r"config\.policy = 'rhac', this one has 'lru'"):
    results.ResultLog(tmp_path, other)
  with pytest.raises(ValueError, match=r"items\.qa = None, this one has 'b'"):
    results.ResultLog(tmp_path, {**ASKED, "items": {"math": "a1", "qa": "b"}})
  assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
  ("name", "content", "words"),
  [
    ("results.jsonl", "{}\n", "results.jsonl but no config.json"),
    ("config.json", "{", "is not JSON"),
  ],
)
def test_foreign_folders_are_refused(tmp_path, name, content, words):
  (tmp_path / name).write_text(content)
  with pytest.raises(ValueError, match=words):
    results.ResultLog(tmp_path, ASKED)
  assert (tmp_path / name).read_text() == content


def test_a_file_is_no_workdir(tmp_path):
  (tmp_path / "file").write_text("x")
  with pytest.raises(ValueError, match="is a file"):
    results.ResultLog(tmp_path / "file", ASKED)


def test_a_second_process_is_refused(tmp_path):
  code = (
    "import sys, pathlib\nfrom moecore_jax.evaluation import results\n"
    f"try: results.ResultLog(pathlib.Path({str(tmp_path)!r}), {ASKED!r})\n"
    "except ValueError as e: print(e)\n"
  )
  with results.ResultLog(tmp_path, ASKED) as log:
    log.append({"id": 0})
    second = subprocess.run(
      [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
  assert "in use by another process" in second.stdout
  third = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert third.stdout == ""


def test_killed_writers_lose_and_double_nothing(tmp_path):
  """A process that logs numbers in order is killed again and again at random instants."""
  code = (
    "import sys, pathlib\nfrom moecore_jax.evaluation import results\n"
    f"with results.ResultLog(pathlib.Path({str(tmp_path)!r}), {ASKED!r}) as log:\n"
    "  print('open', flush=True)\n"
    "  while True: log.append({'id': len(log.rows), 'text': 'x' * 5000})\n"
  )
  rng = random.Random(0)
  counts = []
  for _ in range(4):
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with writer:
      assert writer.stdout.readline() == b"open\n"
      time.sleep(rng.uniform(0.02, 0.2))
      os.kill(writer.pid, signal.SIGKILL)
    with results.ResultLog(tmp_path, ASKED) as log:
      assert [row["id"] for row in log.rows] == list(range(len(log.rows)))
      counts.append(len(log.rows))
  assert counts == sorted(counts)
  assert counts[-1] > counts[0] > 0


def test_atomic_writes_leave_no_litter(tmp_path):
  path = tmp_path / "metrics.json"
  for content in ("1", "22"):
    results.write_atomic(path, content)
    assert path.read_text() == content
  assert [p.name for p in tmp_path.iterdir()] == ["metrics.json"]


def test_figures_must_be_numbers(tmp_path):
  """NaN is no JSON; a figure that is not a number fails instead of spoiling the log."""
  with results.ResultLog(tmp_path, ASKED) as log:
    with pytest.raises(ValueError, match="not JSON compliant"):
      log.append({"x": float("nan")})
    log.append({"x": 1})
  assert [json.loads(x) for x in (tmp_path / "results.jsonl").read_text().splitlines()] == [
    {"x": 1}
  ]
