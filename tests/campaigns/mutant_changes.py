"""The mutants: what is changed, in which order mutants are drawn, and how one is put into a running process."""

import ast
import builtins
import copy
import gc
import hashlib
import importlib
import types
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "wellposed"
PARTS = ("equilibrium", "conditions", "convex", "robust")
COMPILED = ("njit", "@compiled", "triton")  # words of files whose functions do not run as Python
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Add,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any"}
Functions = dict[tuple[str, str], list[types.FunctionType]]


@dataclass(frozen=True)
class Mutant:
    """One change: where, and what it turns into what; ``number`` tells equal changes of a function apart."""

    file: str
    function: str
    line: int
    around: range
    before: str
    after: str
    number: int
    digest: str
    tree: ast.Module
    node: ast.AST
    new: ast.AST

    @cached_property
    def key(self) -> str:
        """Returns a name that stays the same when lines move."""
        return f"{self.file} {self.function} #{self.number}: {self.before} -> {self.after}"

    def compiled(self) -> types.CodeType:
        """Compiles the module with the change."""
        around = copy.deepcopy(self.tree, {id(self.node): self.node})
        return compile(Replace(self.node, self.new).visit(around), str(ROOT / self.file), "exec")


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what a node may be replaced by."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        changed = copy.copy(node)
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        yield changed
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Name(NAMES[node.id], ast.Load())
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield ast.Attribute(node.value, NAMES[node.attr], node.ctx)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


class Replace(ast.NodeTransformer):
    """Replaces one node."""

    def __init__(self, target: ast.AST, new: ast.AST) -> None:
        self.target, self.new = target, new

    def visit(self, node: ast.AST) -> Any:
        if node is self.target:
            return ast.fix_missing_locations(ast.copy_location(self.new, node))
        return self.generic_visit(node)


class Watch(ast.NodeTransformer):
    """Turns nodes into ``_reached(key) or node``; of a statement, what it tests or computes."""

    def __init__(self, keys: dict[int, str]) -> None:
        self.keys = keys

    def visit(self, node: ast.AST) -> Any:
        key, node = self.keys.get(id(node)), self.generic_visit(node)
        if key is None:
            return node
        name = next((name for name in ("test", "value") if hasattr(node, name)), "")
        whole = isinstance(node, ast.expr)
        call = ast.Call(ast.Name("_reached", ast.Load()), [ast.Constant(key)], [])
        watched = ast.BoolOp(ast.Or(), [call, node if whole else getattr(node, name)])
        ast.fix_missing_locations(ast.copy_location(watched, node))
        if whole:
            return watched
        setattr(node, name, watched)
        return node


def inside(function: ast.AST) -> Iterator[tuple[ast.AST, range]]:
    """Yields nodes of a function whose change is one of behaviour, with the lines of their statement.

    Annotations and the texts of errors are left out.
    """
    skipped = (ast.arguments, ast.Raise, ast.Assert, ast.JoinedStr)
    todo: list[tuple[ast.AST, range]] = [(node, range(0)) for node in getattr(function, "body", [])]
    while todo:
        node, around = todo.pop(0)
        if isinstance(node, skipped):
            continue
        if isinstance(node, ast.stmt):
            last = node.lineno if hasattr(node, "body") else node.end_lineno or node.lineno
            around = range(node.lineno, last + 1)
        yield node, around
        hidden = {"annotation", "returns", "decorator_list"}
        for name, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            todo += [(child, around) for child in children if isinstance(child, ast.AST) and name not in hidden]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the outermost functions and the methods of a module with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def mutants_of(path: Path) -> list[Mutant]:
    """Returns all mutants of a file."""
    text, file = path.read_text(), str(path.relative_to(ROOT))
    mutants, tree = [], ast.parse(text)
    for name, function in functions(tree):
        lines = "\n".join(text.splitlines()[function.lineno - 1 : function.end_lineno])
        digest, seen = hashlib.sha256(lines.encode()).hexdigest()[:12], Counter[tuple[str, ...]]()
        for node, around in inside(function):
            for new in variants(node):
                before, after = (ast.unparse(part).split("\n")[0][:90] for part in (node, new))
                seen[before, after] += 1
                number, line = seen[before, after], getattr(node, "lineno", 0)
                mutants.append(Mutant(file, name, line, around, before, after, number, digest, tree, node, new))
    return mutants


def module_of(file: str) -> str:
    """Returns the name of the module that a file of src holds."""
    return file.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def drawn(seed: int, jit: bool) -> list[Mutant]:
    """Returns all mutants in the order in which they are drawn.

    The order is one of hashes of names: a change of a file moves the mutants of the function alone.

    Args:
        seed: enters the hashes.
        jit: whether to take the files that are compiled (with their compiler off) instead of all others.
    """
    paths = [path for part in PARTS for path in sorted((SOURCE / part).rglob("*.py"))]
    taken = [path for path in paths if any(word in path.read_text() for word in COMPILED) == jit]
    everything = [mutant for path in taken for mutant in mutants_of(path)]
    return sorted(everything, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())


def living(mutants: list[Mutant]) -> Functions:
    """Imports the modules of mutants; returns their functions by file and qualified name."""
    files = {str(ROOT / mutant.file): mutant.file for mutant in mutants}
    for file in sorted(files.values()):
        importlib.import_module(module_of(file))
    functions: Functions = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType and thing.__code__.co_filename in files:
            functions[thing.__code__.co_filename, thing.__code__.co_qualname].append(thing)
    return functions


def code_in(code: types.CodeType, name: str, line: int) -> types.CodeType | None:
    """Finds the code of a function by its qualified name and first line."""
    if code.co_qualname == name and code.co_firstlineno == line:
        return code
    inner = (code_in(part, name, line) for part in code.co_consts if isinstance(part, types.CodeType))
    return next((nested for nested in inner if nested is not None), None)


def replacements(
    code: types.CodeType, file: str, name: str, known: Functions
) -> list[tuple[types.FunctionType, types.CodeType]]:
    """Returns which functions of this process would get which code of a changed module."""
    pairs = []
    for function in known.get((str(ROOT / file), name), []):
        new = code_in(code, name, function.__code__.co_firstlineno)
        if new is not None and new.co_freevars == function.__code__.co_freevars:
            pairs.append((function, new))
    return pairs


def changes(mutant: Mutant, known: Functions) -> list[tuple[types.FunctionType, types.CodeType]]:
    """Returns which functions of this process a mutant gives which code."""
    return replacements(mutant.compiled(), mutant.file, mutant.function, known)


def watch(mutants: list[Mutant], known: Functions) -> set[str]:
    """Has this process note which mutants' places it executes; returns the set that their keys come into."""
    reached: set[str] = set()
    builtins._reached = reached.add  # type: ignore[attr-defined]
    for file, group in groupby(sorted(mutants, key=lambda mutant: mutant.file), key=lambda mutant: mutant.file):
        some, copies = list(group), dict[int, Any]()
        tree = copy.deepcopy(some[0].tree, copies)
        keys = {id(copies[id(mutant.node)]): mutant.key for mutant in some}
        code = compile(Watch(keys).visit(tree), str(ROOT / file), "exec")
        for name in {mutant.function for mutant in some}:
            for function, new in replacements(code, file, name, known):
                function.__code__ = new
    return reached
