"""Reads the text of a compiled XLA program: instructions in schedule order, loops, trip counts.

`parse` turns the text that an executable prints (CPU, CUDA and TPU alike) into a `Module`.
`resolve` follows a value back through tuples, fusions, calls and loops to the instruction that
makes it; `loop_trips` uses it to tell how often a loop turns. What the program does with host
memory is answered one level up, in `bench.bank_reads`.

Vocabulary: a *frame* is a computation together with how it was reached, so that its parameters can
be followed outwards.
"""

import dataclasses
import functools
import re

HOST_MEMORY = "S(5)"
"""How XLA prints the host memory space in a layout."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_ASSIGNMENT = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = ")
_CALLED = re.compile(
  r"(?:calls|to_apply|called_computations|body|condition)=\{?(%[^,\s}]+(?:, ?%[^,\s}]+)*)"
)
_BRANCHES = re.compile(
  r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[^,\s}]+))"
)
_PASSED_ON = ("copy", "bitcast", "opt-barrier")


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: unique within the module, without the leading %.
    shape: as printed, with layout; a tuple keeps its parentheses.
    opcode: for example "fusion"; an asynchronous one ends in "-start" or "-done".
    operands: names of instructions of the same computation; for "parameter" and "constant" what
      stands in the parentheses.
    attributes: the rest of the line.
  """

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  attributes: str

  @property
  def op_name(self) -> str:
    """The traced operation with its named scopes, "" where XLA made the instruction itself."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found.group(1).replace("\\'", "'") if found else ""

  @functools.cached_property
  def called(self) -> tuple[str, ...]:
    """Computations that this instruction runs; of a while loop the condition and the body, in
    printed order."""
    names = [name for group in _CALLED.findall(self.attributes) for name in group.split(",")]
    names += [
      name
      for pair in _BRANCHES.findall(self.attributes)
      for part in pair
      for name in part.split(",")
    ]
    return tuple(name.strip().lstrip("%") for name in names if name.strip())

  def computation(self, role: str) -> str:
    """Returns the computation in the role "body" or "condition" of a while loop."""
    return re.search(rf"{role}=%?([^,\s]+)", self.attributes).group(1)

  def attribute(self, name: str) -> str:
    """Returns the value of a plain attribute such as "direction" or "index", "" if absent."""
    found = re.search(rf"(?:^|[\s,]){name}=([^,\s]+)", self.attributes)
    return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
  """Instructions by name, in schedule order; parameters by their number."""

  name: str
  instructions: dict[str, Instruction]
  root: str
  is_host: bool = False

  @functools.cached_property
  def parameters(self) -> dict[int, str]:
    return {
      int(i.operands[0]): i.name for i in self.instructions.values() if i.opcode == "parameter"
    }


@dataclasses.dataclass(frozen=True)
class Module:
  """A compiled program: `header` is the first line with aliasing and the layout of the entry
  computation."""

  header: str
  computations: dict[str, Computation]
  entry: str

  @functools.cached_property
  def entry_shapes(self) -> tuple[str, ...]:
    """Shapes of the entry parameters with layouts, in parameter order."""
    start = self.header.index("entry_computation_layout={(") + len("entry_computation_layout={")
    return tuple(_split(self.header[start + 1 : _closing(self.header, start)]))

  @functools.cached_property
  def scheduled(self) -> tuple[Computation, ...]:
    """Computations whose instructions run one by one on the device: no fusion, not on the host."""
    fused = {
      name
      for computation in self.computations.values()
      for instruction in computation.instructions.values()
      if instruction.opcode.startswith("fusion")
      for name in instruction.called
    }
    return tuple(c for c in self.computations.values() if c.name not in fused and not c.is_host)


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
  """A computation in the place where it runs.

  Attributes:
    computation: what runs.
    outer: the frame it was reached from, None for the entry computation.
    caller: the instruction of `outer` that runs it.
    arguments: for a fusion or call the operands of `caller`, by parameter number; None for a loop.
  """

  computation: Computation
  outer: "Frame | None" = None
  caller: Instruction | None = None
  arguments: tuple[str, ...] | None = None

  def __getitem__(self, name: str) -> Instruction:
    return self.computation.instructions[name]

  @property
  def loops(self) -> "tuple[Frame, ...]":
    """The loop bodies around this frame, outermost first, itself included."""
    outer = self.outer.loops if self.outer else ()
    return outer + ((self,) if self.caller is not None and self.arguments is None else ())


def _closing(text: str, start: int) -> int:
  """Index of the parenthesis that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    if text[i] == "(":
      depth += 1
    elif text[i] == ")":
      depth -= 1
      if depth == 0:
        return i
  raise ValueError(f"unbalanced parentheses in HLO text: {text[start : start + 80]!r}")


def _split(text: str) -> list[str]:
  """Splits at commas outside brackets and drops the /*index=N*/ remarks."""
  parts, depth, start = [], 0, 0
  text = re.sub(r"/\*.*?\*/", "", text)
  for i, char in enumerate(text):
    depth += (char in "([{") - (char in ")]}")
    if char == "," and depth == 0:
      parts.append(text[start:i].strip())
      start = i + 1
  last = text[start:].strip()
  return [*parts, last] if last else parts


def _instruction(line: str, start: int, name: str) -> Instruction:
  end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
  shape, rest = line[start:end], line[end:].lstrip()
  opening = rest.index("(")
  closing = _closing(rest, opening)
  opcode, inside = rest[:opening], rest[opening + 1 : closing]
  if opcode in ("constant", "parameter"):
    operands = (inside.strip(),)
  else:
    operands = tuple(part.split()[-1].lstrip("%") for part in _split(inside))
  return Instruction(name, shape, opcode, operands, rest[closing + 1 :].lstrip(", "))


def parse(text: str) -> Module:
  """Parses the text of one scheduled module.

  Args:
    text: what `as_text()` of a compiled program or `to_string()` of an HloModule gives.

  Raises:
    ValueError: if the text is not a scheduled module.
  """
  header = text[: text.index("\n")]
  if not header.startswith("HloModule") or "is_scheduled=true" not in header:
    raise ValueError(f"HLO text: got {header[:60]!r}, expected a compiled, scheduled module")
  computations, entry = {}, ""
  name, instructions, root = "", {}, ""
  for line in text.splitlines():
    if not name:
      if opening := _COMPUTATION.match(line):
        name, instructions, root = opening.group(2), {}, ""
        entry = name if opening.group(1) else entry
    elif line.startswith("}"):
      computations[name] = Computation(name, instructions, root, 'execution_thread="host"' in line)
      name = ""
    elif assignment := _ASSIGNMENT.match(line):
      instruction = _instruction(line, assignment.end(), assignment.group(2))
      instructions[instruction.name] = instruction
      root = instruction.name if assignment.group(1) else root
  return Module(header, computations, entry)


def enter(module: Module, frame: Frame, instruction: Instruction, called: str) -> Frame:
  """Returns the frame of `called` as run by `instruction`; the operands of a loop stay one
  tuple."""
  arguments = None if instruction.opcode == "while" else instruction.operands
  if instruction.opcode == "conditional":
    arguments = (instruction.operands[1 + instruction.called.index(called)],)
  return Frame(module.computations[called], frame, instruction, arguments)


def resolve(module: Module, frame: Frame, name: str, path: tuple[int, ...] = ()):
  """Follows element `path` of the value `name` back to where it is made.

  Passes through tuples, copies, bitcasts, fusions, calls, loops that hand the element on unchanged,
  and out of loop bodies whose element never changes.

  Returns:
    (frame, instruction, path): a parameter means an entry parameter or a loop variable that
    changes.
  """
  while True:
    instruction = frame[name]
    opcode = instruction.opcode
    if opcode == "get-tuple-element":
      name, path = instruction.operands[0], (int(instruction.attribute("index")), *path)
    elif opcode == "tuple" and path:
      name, path = instruction.operands[path[0]], path[1:]
    elif opcode in _PASSED_ON:
      name = instruction.operands[0]
    elif opcode in ("fusion", "call"):
      frame = enter(module, frame, instruction, instruction.called[0])
      name = frame.computation.root
    elif (
      opcode == "while" and path and _is_invariant(module, instruction.computation("body"), path[0])
    ):
      name = instruction.operands[0]
    elif opcode == "parameter" and frame.arguments is not None:
      frame, name = frame.outer, frame.arguments[int(instruction.operands[0])]
    elif (
      opcode == "parameter"
      and frame.outer is not None
      and path
      and _is_invariant(module, frame.caller.computation("body"), path[0])
    ):
      frame, name = frame.outer, frame.caller.operands[0]
    else:
      return frame, instruction, path


def _is_invariant(module: Module, body: str, index: int) -> bool:
  """Whether a loop body returns element `index` of its tuple as it got it."""
  computation = module.computations[body]
  frame = Frame(computation)
  _, instruction, path = resolve(module, frame, computation.root, (index,))
  return instruction.opcode == "parameter" and path == (index,)


def loop_trips(module: Module, frame: Frame, loop: Instruction) -> int | str:
  """Tells how often the while loop `loop` of `frame` turns.

  Returns:
    A number if it is known when compiling; "counted" if a counter runs in steps of one up to a
    bound that is fixed before the loop starts; "open" otherwise.
  """
  condition = Frame(module.computations[loop.computation("condition")], frame, loop)
  where, compare, _ = resolve(module, condition, condition.computation.root)
  if compare.opcode != "compare" or compare.attribute("direction") not in ("LT", "GT"):
    return "open"
  low, high = compare.operands if compare.attribute("direction") == "LT" else compare.operands[::-1]
  inside, counter, path = resolve(module, where, low)
  if (
    inside.caller is not loop
    or counter.opcode != "parameter"
    or not _counts_by_one(module, frame, loop, path)
  ):
    return "open"
  inside, bound, _ = resolve(module, where, high)
  if inside.caller is loop and bound.opcode == "parameter":
    return "open"  # the bound changes while the loop runs
  _, first, _ = resolve(module, frame, loop.operands[0], path)
  if bound.opcode == "constant" and first.opcode == "constant":
    return max(0, int(bound.operands[0]) - int(first.operands[0]))
  return "counted"


def _counts_by_one(module: Module, frame: Frame, loop: Instruction, path: tuple[int, ...]) -> bool:
  body = Frame(module.computations[loop.computation("body")], frame, loop)
  where, add, _ = resolve(module, body, body.computation.root, path)
  if add.opcode != "add":
    return False
  terms = [resolve(module, where, operand) for operand in add.operands]
  is_counter = [
    term.opcode == "parameter" and inside.caller is loop and at == path
    for inside, term, at in terms
  ]
  is_one = [term.opcode == "constant" and term.operands[0] == "1" for _, term, _ in terms]
  return any(is_counter) and any(is_one)
