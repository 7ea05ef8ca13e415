"""The bundled items, what counts as a right answer, and the limits on generated programs."""

import dataclasses

import pytest

from moecore_jax.evaluation import sandbox, tasks

MATH = tasks.Item("m", "math", "math", "Problem: ...\n", "14+23=37\n#### 37\n", 48)
QA = tasks.Item("q", "qa", "qa", "Question: ...\n", "It is maize. Answer: B\n", 32)
AGENT = tasks.Item(
  "a", "agent", "agent", "user: ...\n", '{"tool":"light","args":{"level":40}}\n', 64, ("\n",)
)
CODE = tasks.Item(
  "c",
  "code",
  "code",
  'def double(x):\n    """Return x times 2."""\n',
  "    return x * 2\n",
  80,
  tests="assert double(3) == 6\nassert double(-1) == -2\n",
)


@pytest.mark.parametrize("task", ["math", "qa", "code", "agent"])
def test_bundled_items(task):
  items = tasks.load_items(task)
  assert len(items) >= 64
  assert len({item.id for item in items}) == len({item.prompt for item in items}) == len(items)
  for item in items:
    assert item.task == item.domain == task
    assert item.max_new_tokens > 0
    assert bool(item.tests) == (task == "code")
  for item in items if task != "code" else items[:3]:
    assert tasks.score(item, "") is False
    assert tasks.score(item, item.answer) is True
  assert tasks.load_items(task, 3) == items[:3]


@pytest.mark.slow
def test_reference_programs_pass():
  assert all(tasks.score(item, item.answer) for item in tasks.load_items("code"))


def test_task_names():
  assert tasks.task_names() == ("math", "qa", "code", "agent")
  with pytest.raises(ValueError, match="task 'maths' is unknown; choose from math"):
    tasks.load_items("maths")


@pytest.mark.parametrize(
  ("text", "right"),
  [
    ("#### 37", True),
    ("1+2=3\n#### 3\n#### 37\n", True),
    ("#### $37.0", True),
    ("#### 3\n#### 38", False),
    ("37", False),
    ("#### thirty", False),
    ("", False),
  ],
)
def test_math(text, right):
  assert tasks.score(MATH, text) is right


def test_math_thousands():
  item = dataclasses.replace(MATH, answer="#### 1200")
  assert tasks.score(item, "#### 1,200")
  assert not tasks.score(item, "#### 1")
  assert not tasks.score(dataclasses.replace(MATH, answer="#### -5"), "#### 5")


@pytest.mark.parametrize(
  ("text", "right"),
  [
    ("It is maize. Answer: B\n", True),
    ("Answer: (B)", True),
    ("Answer: A ... Answer: B", True),
    ("Answer: C", False),
    ("Answer: Both", False),
    ("B", False),
    ("", False),
  ],
)
def test_qa(text, right):
  assert tasks.score(QA, text) is right


@pytest.mark.parametrize(
  ("text", "right"),
  [
    ('{"tool":"light","args":{"level":40}}', True),
    (' { "args": {"level": 40}, "tool": "light" } \ntool: {}', True),
    ('{"tool":"light","args":{"level":41}}', False),
    ('{"tool":"light","args":{"level":"40"}}', False),
    ('{"tool":"light"', False),
    ("", False),
  ],
)
def test_agent(text, right):
  assert tasks.score(AGENT, text) is right


@pytest.mark.parametrize(
  ("text", "right"),
  [
    ("    return x * 2\n", True),
    ("    return x + x", True),
    ("    return x * 3\n", False),
    ("    return x *\n", False),
    ("    exit(0)\n", False),
    ("    import os; os._exit(0)\n", False),
    ("    raise SystemExit\n", False),
    ("", False),
  ],
)
def test_code(text, right):
  assert tasks.score(CODE, text) is right


@pytest.mark.parametrize(
  "program",
  [
    "while True: pass",
    "import time; time.sleep(60)",
    "x = bytearray(1 << 40)",
    "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "open('big', 'wb').write(bytes(1 << 24))",
    "files = [open('done', 'w') for _ in range(200)]",
    "import moecore_jax",
    "import os; assert os.environ['HOME']",
    "import os; assert os.listdir('.')",
    "input()",
    "import os; os.kill(os.getpid(), 9)",
  ],
)
def test_programs_are_confined(program):
  assert not sandbox.passes(program, timeout_s=4.0)


def test_output_does_not_matter_and_children_end():
  assert sandbox.passes("print('x' * 100000)")
  assert sandbox.passes("import subprocess; subprocess.Popen(['sleep', '600'])")


def test_nothing_stays_behind(tmp_path, monkeypatch):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  assert sandbox.passes("open('left', 'w').write('x')")
  assert not list(tmp_path.iterdir())
