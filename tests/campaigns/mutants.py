"""Mutation testing: small faults are put into the library one at a time, and the tests that pass there must fail.

Every mutant is one change inside one function of the pure-Python parts of equilibrium/, convex/ and robust/:
another comparison, operator, constant or branch, or a statement left out. The code of the function is replaced in
a forked process, so that all who have imported it see the fault; the tests that execute its line then run,
shortest first. A mutant is killed if one of them fails or if they take ten times as long as without it.

Run: python tests/campaigns/mutants.py map    runs the tests once and notes who executes which line
     python tests/campaigns/mutants.py run --count 500 --seed 0
                                              prints survivors, writes results/campaigns/mutants.json
"""

import argparse
import ast
import copy
import gc
import importlib
import json
import os
import random
import signal
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "wellposed"
PARTS = ("equilibrium", "convex", "robust")
RESULT = ROOT / "results" / "campaigns" / "mutants.json"
COMPILED = ("numba", "triton")
LONGEST = 40.0  # seconds of tests for a mutant, measured without it
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Add,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change: where, and what it turns into what."""

    file: str
    function: str
    line: int
    before: str
    after: str
    tree: ast.Module
    node: ast.AST
    new: ast.AST

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


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function whose change is one of behaviour: no annotations, no texts of errors."""
    skipped = (ast.arguments, ast.Raise, ast.Assert, ast.JoinedStr)
    todo: list[ast.AST] = [*getattr(function, "body", [])]
    while todo:
        node = todo.pop(0)
        if isinstance(node, skipped):
            continue
        yield node
        hidden = {"annotation", "returns", "decorator_list"}
        for name, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            todo += [child for child in children if isinstance(child, ast.AST) and name not in hidden]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields the outermost functions and the methods of a module with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def mutants_of(path: Path) -> list[Mutant]:
    """Returns all mutants of a file."""
    text = path.read_text()
    if any(word in text for word in COMPILED):
        return []
    found, tree = [], ast.parse(text)
    for name, function in functions(tree):
        for node in inside(function):
            for new in variants(node):
                short = [ast.unparse(part).split("\n")[0][:90] for part in (node, new)]
                line = getattr(node, "lineno", 0)
                found.append(Mutant(str(path.relative_to(ROOT)), name, line, *short, tree, node, new))
    return found


def code_in(code: types.CodeType, name: str, line: int) -> types.CodeType | None:
    """Finds the code of a function by its qualified name and first line."""
    if code.co_qualname == name and code.co_firstlineno == line:
        return code
    inner = (code_in(part, name, line) for part in code.co_consts if isinstance(part, types.CodeType))
    return next((found for found in inner if found is not None), None)


def put_in(mutant: Mutant) -> bool:
    """Replaces the code of a function wherever it is known; tells whether that was possible."""
    path = str(ROOT / mutant.file)
    module = mutant.file.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    importlib.import_module(module)
    old = [
        thing
        for thing in gc.get_objects()
        if type(thing) is types.FunctionType
        and thing.__code__.co_filename == path
        and thing.__code__.co_qualname == mutant.function
    ]
    compiled, done = mutant.compiled(), False
    for function in old:
        new = code_in(compiled, mutant.function, function.__code__.co_firstlineno)
        if new is not None and new.co_freevars == function.__code__.co_freevars:
            function.__code__ = new
            done = True
    return done


class Notes:
    """A plugin that tells coverage which test runs, and keeps durations and failures."""

    def __init__(self, coverage: Any) -> None:
        self.coverage, self.seconds, self.failed = coverage, {}, set()  # type: ignore[var-annotated]

    def pytest_runtest_setup(self, item: Any) -> None:
        self.coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)


def draw_map(path: Path) -> None:
    """Runs the tests of all parts once; writes who executes which line."""
    import coverage

    watch = coverage.Coverage(source=[str(SOURCE / part) for part in PARTS], data_file=None)
    watch.start()
    notes = Notes(watch)
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *(f"tests/{part}" for part in PARTS)], [notes])
    watch.stop()
    data, lines = watch.get_data(), {}
    for file in sorted(data.measured_files()):
        found = {
            line: [test for test in tests if test and test not in notes.failed]
            for line, tests in data.contexts_by_lineno(file).items()
        }
        lines[str(Path(file).relative_to(ROOT))] = {line: tests for line, tests in found.items() if tests}
    path.write_text(json.dumps({"seconds": notes.seconds, "lines": lines}))
    print(f"{len(notes.seconds)} tests, {len(notes.failed)} failed, {len(lines)} files: {path}")


def chosen_tests(tests: list[str], seconds: dict[str, float]) -> tuple[list[str], float]:
    """Returns the shortest tests, as far as they fit."""
    kept, total = [], 0.0
    for test in sorted(tests, key=lambda test: seconds.get(test, 9.0)):
        total += seconds.get(test, 9.0)
        if kept and total > LONGEST:
            break
        kept.append(test)
    return kept, min(total, LONGEST)


def judge(mutant: Mutant, tests: list[str], expected: float) -> str:
    """Runs tests against a mutant in a process of its own."""
    child = os.fork()
    if child == 0:
        silence, code = os.open(os.devnull, os.O_WRONLY), 99
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        try:
            if put_in(mutant):
                code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20 + 10 * expected
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return {0: "survived", 99: "not possible"}.get(code, "killed")
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "killed"


def run(options: argparse.Namespace) -> None:
    """Draws mutants, judges them and writes the result after every one."""
    known = json.loads(options.map.read_text())
    for name in ("torch", "numpy", "scipy", "sklearn", "wellposed", *(f"wellposed.{part}" for part in PARTS)):
        importlib.import_module(name)
    paths = [path for part in PARTS for path in sorted((SOURCE / part).rglob("*.py"))]
    everything = [mutant for path in paths for mutant in mutants_of(path)]
    random.Random(options.seed).shuffle(everything)
    counts, survivors, start = {"killed": 0, "survived": 0, "not executed by a test": 0}, [], time.time()
    for mutant in everything:
        if sum(counts.values()) >= options.count or time.time() - start > options.minutes * 60:
            break
        tests = known["lines"].get(mutant.file, {}).get(str(mutant.line), [])
        verdict = "not executed by a test"
        if tests:
            verdict = judge(mutant, *chosen_tests(tests, known["seconds"]))
        if verdict == "not possible":
            continue
        counts[verdict] += 1
        if verdict != "killed":
            about = {name: getattr(mutant, name) for name in ("file", "function", "line", "before", "after")}
            survivors.append(about | {"verdict": verdict})
            print(f"{mutant.file}:{mutant.line} {mutant.before} -> {mutant.after}: {verdict}", flush=True)
        total = sum(counts.values())
        command = f"python tests/campaigns/mutants.py run --count {options.count} --seed {options.seed}"
        found = {"command": command, "of": len(everything), "tried": total, "score": counts["killed"] / total}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found | counts | {"survivors": survivors}, indent=1) + "\n")
    print(found | counts)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["map", "run"])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after")
    parser.add_argument("--map", type=Path, default=ROOT / ".mutants.json")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "tests")]
    if options.what == "map":
        draw_map(options.map)
    else:
        run(options)


if __name__ == "__main__":
    main()
