"""Imports go down only: the order of the tiers, read from the sources without running them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import moecore_jax

ROOT = Path(moecore_jax.__file__).parent

# Lowest first. A part imports lower tiers, and its own tier where no cycle arises.
TIERS = (
  ("specs", "allocation"),
  ("config", "config_loading", "memory", "planner"),
  ("quantization",),
  ("models", "families", "residency"),
  ("runtime", "checkpoint"),
  ("traces", "simulator"),
  ("evaluation", "reporting", "training"),
  ("cli",),
)
RANK = {name: rank for rank, names in enumerate(TIERS) for name in names}
# `testing` serves the tests and may import anything; nothing but itself imports it.
FREE = {"testing", "__init__"}
APART = {("residency", "models"), ("residency", "families"), ("models", "residency")}


def _imports(path: Path) -> Iterator[str]:
  """Yields the dotted names of a module's imports, `TYPE_CHECKING` and function bodies included."""
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import; write the full name"
      yield node.module or ""
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(root: Path) -> set[tuple[str, str]]:
  """Returns (importing, imported) pairs of the parts directly below a package's folder."""
  parts = {p.stem for p in root.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
  found = set()
  for path in root.rglob("*.py"):
    source = path.relative_to(root).parts[0].removesuffix(".py")
    for name in _imports(path):
      words = name.split(".")
      if words[0] == root.name and len(words) > 1 and words[1] in parts:
        found.add((source, words[1]))
  return {(source, target) for source, target in found if source != target}


def faults(pairs: set[tuple[str, str]]) -> list[str]:
  """Returns a sentence for each import that breaks the order."""
  found = []
  for source, target in sorted(pairs):
    if source in FREE:
      continue
    if target in FREE:
      found.append(f"{source} imports {target}")
    elif source not in RANK or target not in RANK:
      found.append(f"{source} or {target} is in no tier")
    elif RANK[target] > RANK[source]:
      found.append(f"{source} imports {target}, which is above it")
    elif RANK[target] == RANK[source] and (target, source) in pairs:
      found.append(f"{source} and {target} import each other")
    elif (source, target) in APART:
      found.append(f"{source} imports {target}; the two are to stay apart")
  return found


def test_imports_go_down_only():
  assert faults(edges(ROOT)) == []


def test_the_package_is_seen():
  """The reader finds imports that are known to exist, in both spellings."""
  found = edges(ROOT)
  assert {("config", "specs"), ("models", "specs"), ("cli", "config_loading")} <= found


def test_only_the_command_line_imports_the_converter():
  users = {
    path.relative_to(ROOT).parts[0]
    for path in ROOT.rglob("*.py")
    for name in _imports(path)
    if name.split(".")[0] == "checkpoints_convert"
  }
  assert users <= {"cli"}


@pytest.mark.parametrize(
  ("pair", "word"),
  [
    (("specs", "config"), "above"),
    (("residency", "runtime"), "above"),
    (("residency", "models"), "apart"),
    (("runtime", "traces"), "above"),
    (("runtime", "testing"), "testing"),
    (("newcomer", "specs"), "no tier"),
  ],
)
def test_upward_imports_are_found(pair, word):
  (fault,) = faults({pair})
  assert word in fault


def test_cycles_within_a_tier_are_found():
  assert len(faults({("runtime", "checkpoint"), ("checkpoint", "runtime")})) == 2
  assert faults({("runtime", "checkpoint")}) == []


def test_sources_are_read(tmp_path):
  package = tmp_path / "toy"
  (package / "a").mkdir(parents=True)
  (package / "__init__.py").write_text("")
  (package / "a" / "__init__.py").write_text("from toy import b\n")
  (package / "b.py").write_text("def f():\n  import toy.c.d\n")
  (package / "c.py").write_text("import numpy\n")
  assert edges(package) == {("a", "b"), ("b", "c")}
