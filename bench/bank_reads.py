"""What a compiled program does with host memory: bank reads, host computations, prefetch overlap.

The bank is recognised by its memory space in the layout of the entry computation and followed into
loops, fusions, calls and branches. What merely hands it on (tuples, bitcasts, loops) is no read;
whatever else touches it is one, and must be a slice of one row inside a loop whose number of turns
is computed by the program, or else bytes move that no miss asked for.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator

from bench import hlo

_HANDS_ON = (
  "parameter",
  "get-tuple-element",
  "tuple",
  "bitcast",
  "opt-barrier",
  "while",
  "conditional",
)
_PRODUCTS = ("dot", "convolution", "dot_general", "conv_general_dilated")

HIDDEN = "attention and experts"
"""What is computed while a copy is on the way that is hidden as it should be."""

# Where a value holds the bank: path within the value's tuple -> name of the entry parameter.
_Held = dict[tuple[int, ...], str]


@dataclasses.dataclass(frozen=True)
class BankRead:
  """One instruction that reads the bank.

  Attributes:
    bank: the entry parameter, by its traced name where XLA kept it.
    opcode: the reading instruction; "dynamic-slice" is what is wanted.
    shape: what is read, without layout.
    rows: rows taken in the first dimension; 0 if it is not a slice of whole rows.
    loops: turns of the loops around it, outermost first: a number, "counted" or "open"
      (`hlo.loop_trips`).
    is_async: whether the copy is started and awaited by two instructions.
    scope: the traced operation with its named scopes.
  """

  bank: str
  opcode: str
  shape: str
  rows: int
  loops: tuple[int | str, ...]
  is_async: bool
  scope: str
  frame: hlo.Frame = dataclasses.field(repr=False, compare=False)
  start: hlo.Instruction = dataclasses.field(repr=False, compare=False)

  @property
  def is_several_rows(self) -> bool:
    """Whether it copies several rows at once, as staging copies the experts of a layer."""
    return self.opcode in ("dynamic-slice", "slice") and self.rows > 1

  @property
  def is_one_row_in_counted_loop(self) -> bool:
    """Whether it reads one row a turn of a loop that turns as often as the program computes.

    A read that XLA moved out of a loop it was traced in is not: it happens whether or not the loop
    turns.
    """
    is_where_traced = len(self.loops) >= self.scope.count("while/body")
    is_counted = bool(self.loops) and self.loops[-1] == "counted"
    return self.opcode == "dynamic-slice" and self.rows == 1 and is_counted and is_where_traced


def _array(shape: str) -> tuple[int, ...]:
  """Dimensions of an array shape such as "u32[4,256]{1,0:S(5)}"."""
  dims = re.match(r"\w+\[([\d,]*)\]", shape).group(1)
  return tuple(int(d) for d in dims.split(",") if d)


def _bank_parameters(module: hlo.Module) -> dict[str, _Held]:
  entry = module.computations[module.entry]
  held = {}
  for number, name in entry.parameters.items():
    if hlo.HOST_MEMORY in module.entry_shapes[number]:
      held[name] = {(): entry.instructions[name].op_name or name}
  return held


class _Walk:
  """Follows the bank through a module and collects its reads."""

  def __init__(self, module: hlo.Module):
    self.module = module
    self.reads: list[BankRead] = []
    self._trips: dict[tuple[hlo.Frame | None, str], int | str] = {}

  def visit(
    self, frame: hlo.Frame, held: dict[str, _Held], start: tuple[hlo.Frame, hlo.Instruction] | None
  ) -> _Held:
    """Follows the bank through one computation; returns where its result holds it.

    Args:
      frame: the computation.
      held: where its parameters hold the bank.
      start: the asynchronous instruction that runs it, with its frame, None if it runs in step with
        its caller.
    """
    held = dict(held)
    for instruction in frame.computation.instructions.values():
      inputs = [held.get(name, {}) for name in instruction.operands]
      if any(inputs):
        held[instruction.name] = self._use(frame, instruction, inputs, start)
    return held.get(frame.computation.root, {})

  def _use(self, frame, instruction, inputs, start) -> _Held:
    opcode = instruction.opcode
    if opcode == "get-tuple-element":
      index = int(instruction.attribute("index"))
      return {path[1:]: bank for path, bank in inputs[0].items() if path[0] == index}
    if opcode == "tuple":
      return {(i, *path): bank for i, value in enumerate(inputs) for path, bank in value.items()}
    if opcode in ("bitcast", "opt-barrier"):
      return inputs[0]
    if opcode == "while":
      condition, body = (
        self._run(frame, instruction, instruction.computation(r), inputs, start)
        for r in ("condition", "body")
      )
      return body | condition
    if opcode == "conditional":
      branches = instruction.called
      results = [
        self._run(frame, instruction, b, [i], start)
        for b, i in zip(branches, inputs[1:], strict=True)
      ]
      return {path: bank for result in results for path, bank in result.items()}
    if instruction.called and not self.module.computations[instruction.called[0]].is_host:
      if opcode.endswith("-start"):
        self._run(frame, instruction, instruction.called[0], inputs, (frame, instruction))
        return {}
      return self._run(frame, instruction, instruction.called[0], inputs, start)
    self._read(frame, instruction, inputs, start)
    return {}

  def _run(self, frame, instruction, called: str, inputs: list[_Held], start) -> _Held:
    inner = hlo.enter(self.module, frame, instruction, called)
    names = inner.computation.parameters
    return self.visit(inner, {names[i]: value for i, value in enumerate(inputs) if value}, start)

  def _read(self, frame, instruction, inputs, start) -> None:
    bank = next(name for value in inputs for name in value.values())
    opcode = instruction.opcode.removesuffix("-start")
    whole = next(
      frame[name].shape for name, value in zip(instruction.operands, inputs, strict=True) if value
    )
    shape, rows = whole, 0
    if opcode == "dynamic-slice":
      sizes = re.search(r"dynamic_slice_sizes=\{([\d,]*)\}", instruction.attributes).group(1)
      shape = f"{whole[: whole.index('[')]}[{sizes}]"
      rows = _array(shape)[0] if _array(shape)[1:] == _array(whole)[1:] else 0
    at, began = start or (frame, instruction)
    self.reads.append(
      BankRead(
        bank=bank,
        opcode=opcode,
        shape=shape.split("{")[0],
        rows=rows,
        loops=tuple(self._turns(loop) for loop in frame.loops),
        is_async=began.opcode.endswith("-start"),
        scope=instruction.op_name or began.op_name,
        frame=at,
        start=began,
      )
    )

  def _turns(self, body: hlo.Frame) -> int | str:
    key = (body.outer, body.caller.name)
    if key not in self._trips:
      self._trips[key] = hlo.loop_trips(self.module, body.outer, body.caller)
    return self._trips[key]


def bank_reads(module: hlo.Module) -> list[BankRead]:
  """Returns every read of a host-memory parameter, in the order of the program."""
  walk = _Walk(module)
  walk.visit(hlo.Frame(module.computations[module.entry]), _bank_parameters(module), None)
  return walk.reads


def host_compute_ops(module: hlo.Module) -> int:
  """Counts instructions that run on the host, or compute into host memory.

  A fusion counts once. What hands host memory on (parameters, tuples, bitcasts, loops) is no
  computation.
  """
  return sum(
    _is_host_compute(instruction)
    for computation in module.scheduled
    for instruction in computation.instructions.values()
  )


def _is_host_compute(instruction: hlo.Instruction) -> bool:
  if instruction.opcode in _HANDS_ON or instruction.opcode.endswith("-done"):
    return False
  if (
    "HostExecute" in instruction.attributes or '_xla_compute_type="host"' in instruction.attributes
  ):
    return True
  return not instruction.shape.startswith("(") and hlo.HOST_MEMORY in instruction.shape


def instructions_in_flight(read: BankRead) -> list[hlo.Instruction]:
  """Returns what is scheduled between the start and the end of an asynchronous read."""
  between, is_started = [], False
  for instruction in read.frame.computation.instructions.values():
    if instruction.opcode.endswith("-done") and read.start.name in instruction.operands:
      return between
    if is_started:
      between.append(instruction)
    is_started = is_started or instruction is read.start
  return []


def _inner(module: hlo.Module, instruction: hlo.Instruction) -> Iterator[hlo.Instruction]:
  """The instruction and everything it runs."""
  yield instruction
  for name in instruction.called:
    for inside in module.computations[name].instructions.values():
      yield from _inner(module, inside)


def prefetch_hidden_by(module: hlo.Module, reads: list[BankRead]) -> dict[str, int]:
  """Tells what is computed while prefetches are on the way.

  Phases are recognised by the named scopes `prefetch`, `experts` and `attention` that the step
  opens around them.

  Returns:
    {phases: number of copies}, phases being HIDDEN, one of both, or "nothing".
  """
  return _hidden_by(module, [read for read in reads if "/prefetch/" in read.scope])


def prefetch_overlap(module: hlo.Module, reads: list[BankRead]) -> bool | None:
  """Whether the expert loop and the attention products lie between start and done of every
  prefetch; None if the program has none.
  """
  hidden_by = prefetch_hidden_by(module, reads)
  return set(hidden_by) == {HIDDEN} if hidden_by else None


def staging_overlap(module: hlo.Module, reads: list[BankRead]) -> bool | None:
  """Whether the products of experts and attention lie between start and done of every copy of a
  whole layer; before the first of them there are no experts, just attention. None if the program
  stages no layer.
  """
  copies = [read for read in reads if read.is_several_rows]
  hidden_by = _hidden_by(module, copies)
  first = len({read.bank for read in copies})  # one copy an array
  with_attention = hidden_by.get("attention", 0)
  all_hidden = hidden_by.get(HIDDEN, 0) + with_attention == len(copies)
  return (all_hidden and with_attention <= first) if copies else None


def _hidden_by(module: hlo.Module, copies: list[BankRead]) -> dict[str, int]:
  scopes = [_product_scopes(module, instructions_in_flight(read)) for read in copies]
  phases = [" and ".join(sorted(found & {"experts", "attention"})) for found in scopes]
  return dict(collections.Counter(name or "nothing" for name in phases))


def _product_scopes(module: hlo.Module, instructions: list[hlo.Instruction]) -> set[str]:
  scopes: set[str] = set()
  for outer in instructions:
    for instruction in _inner(module, outer):
      *path, operation = instruction.op_name.split("/")
      if operation in _PRODUCTS or instruction.opcode in _PRODUCTS:
        scopes.update(path)
  return scopes
