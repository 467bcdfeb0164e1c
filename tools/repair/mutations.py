"""Bugs, made by systematic changes of the syntax tree. A bug is an edit of the text, so that the rest stays as it was.

Each operator looks at one node and yields the replacements of a part of it: another comparison, another constant.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement of `source[start:stop]` by a text."""

    operator: str
    start: int
    stop: int
    text: str

    def apply(self, source: str) -> str:
        """Return the source with the replacement."""
        return source[: self.start] + self.text + source[self.stop :]


class SourceText:
    """A source text, in which nodes of its syntax tree are located. It must be ASCII: columns are bytes."""

    def __init__(self, text: str) -> None:
        assert text.isascii()
        self.text, self.tree = text, ast.parse(text)
        lengths = [len(line) for line in text.splitlines(keepends=True)]
        self._line_starts = [sum(lengths[:index]) for index in range(len(lengths))]

    def get_span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets at which a node starts and stops."""
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._line_starts[node.lineno - 1] + node.col_offset
        return start, self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def get_text(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, stop = self.get_span(node)
        return self.text[start:stop]

    def replace(self, operator: str, node: ast.AST, text: str) -> Edit:
        """Return the edit that replaces a node."""
        return Edit(operator, *self.get_span(node), text)

    def replace_between(self, operator: str, left: ast.AST, right: ast.AST, old: str, new: str) -> Edit:
        """Return the edit that replaces a symbol between two nodes."""
        start = self.get_span(left)[1]
        match = re.search(re.escape(old), self.text[start : self.get_span(right)[0]])
        assert match is not None
        return Edit(operator, start + match.start(), start + match.end(), new)


COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+", "//")),
    ast.FloorDiv: ("//", ("%", "*")),
    ast.Mod: ("%", ("//",)),
    ast.Div: ("/", ("//",)),
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "list", "sorted": "list", "abs": "int"}


def change_comparison(source: SourceText, node: ast.AST) -> Iterator[Edit]:
    """Replace a comparison: `<` by `<=`, `in` by `not in`."""
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, right, comparison in zip(operands, operands[1:], node.ops):
            old, others = COMPARISONS[type(comparison)]
            for new in others:
                yield source.replace_between("comparison", left, right, old, new)


def change_arithmetic(source: SourceText, node: ast.AST) -> Iterator[Edit]:
    """Replace an arithmetic operator: `+` by `-`. Texts and lists are concatenated, so an edit may raise TypeError."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        old, others = ARITHMETIC[type(node.op)]
        left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
        for new in others:
            yield source.replace_between("arithmetic", left, right, old, new)
        if isinstance(node, ast.AugAssign):
            yield source.replace_between("arithmetic", left, right, f"{old}=", "=")


def change_constant(source: SourceText, node: ast.AST) -> Iterator[Edit]:
    """Replace a number by its neighbours, and True by False. `x + 1` becomes `x`, not `x + 0`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.replace("constant", node, str(not node.value))
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        is_term = source.text[: source.get_span(node)[0]].rstrip().endswith(("+", "-"))
        for value in (node.value + 1, node.value - 1):
            if value > 0 or (value == 0 and not is_term):
                yield source.replace("off_by_one", node, str(value))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and is_one(node.right):
        yield source.replace("off_by_one", node, source.get_text(node.left))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and is_one(node.operand):
        yield source.replace("off_by_one", node, "0")


def is_one(node: ast.AST) -> bool:
    """Return whether a node is the number 1."""
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value == 1


def shift_bound(source: SourceText, node: ast.AST) -> Iterator[Edit]:
    """Move the end of a range, and a length, by one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("range", "len"):
        bound = node if node.func.id == "len" else node.args[min(1, len(node.args) - 1)]
        for offset in () if isinstance(bound, ast.BinOp | ast.Constant) else ("+ 1", "- 1"):
            yield source.replace("off_by_one", bound, f"{source.get_text(bound)} {offset}")


def change_boolean(source: SourceText, node: ast.AST) -> Iterator[Edit]:
    """Swap `and` and `or`, leave out one operand or a `not`."""
    if isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:]):
            yield source.replace_between("boolean", left, right, old, new)
        for value in node.values:
            yield source.replace("boolean", node, source.get_text(value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.replace("boolean", node, source.get_text(node.operand))


def change_condition(source: SourceText, node: ast.AST) -> Iterator[Edit]:
    """Negate the condition of an `if` or a conditional expression."""
    if isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.BoolOp | ast.Name | ast.Call):
        yield source.replace("condition", node.test, f"not ({source.get_text(node.test)})")
    if isinstance(node, ast.IfExp):
        yield source.replace("condition", node, source.get_text(node.body))
        yield source.replace("condition", node, source.get_text(node.orelse))


def change_slice(source: SourceText, node: ast.AST) -> Iterator[Edit]:
    """Leave out a bound of a slice, or move it by one."""
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield source.replace("slice", bound, "")
                if not isinstance(bound, ast.BinOp | ast.UnaryOp | ast.Constant):
                    yield source.replace("slice", bound, f"{source.get_text(bound)} + 1")
                    yield source.replace("slice", bound, f"{source.get_text(bound)} - 1")


def change_call(source: SourceText, node: ast.AST) -> Iterator[Edit]:
    """Replace a function by its opposite, or by one that does nothing."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        has_keywords = bool(node.keywords) and FUNCTIONS[node.func.id] in ("list", "int")
        if not has_keywords:
            yield source.replace("call", node.func, FUNCTIONS[node.func.id])
    if isinstance(node, ast.Call) and len(node.args) == 2:
        first, second = (source.get_text(argument) for argument in node.args)
        start, stop = source.get_span(node.args[0])[0], source.get_span(node.args[1])[1]
        yield Edit("call", start, stop, f"{second}, {first}")


def change_return(source: SourceText, node: ast.AST) -> Iterator[Edit]:
    """Return the opposite of a truth value, or nothing where a list or a text is returned early."""
    if isinstance(node, ast.Return) and node.value is not None:
        if isinstance(node.value, ast.Compare | ast.BoolOp):
            yield source.replace("return", node.value, f"not ({source.get_text(node.value)})")
        elif isinstance(node.value, ast.UnaryOp) and isinstance(node.value.op, ast.USub):
            yield source.replace("return", node.value, source.get_text(node.value.operand))


def remove_statement(source: SourceText, node: ast.AST) -> Iterator[Edit]:
    """Replace a statement by `pass`, `continue` by `break`."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call or isinstance(node, ast.AugAssign):
        yield source.replace("statement", node, "pass")
    if isinstance(node, ast.Continue):
        yield source.replace("statement", node, "break")


OPERATORS: tuple[Callable[[SourceText, ast.AST], Iterator[Edit]], ...] = (
    change_comparison,
    change_arithmetic,
    change_constant,
    shift_bound,
    change_boolean,
    change_condition,
    change_slice,
    change_call,
    change_return,
    remove_statement,
)


def find_edits(text: str) -> list[Edit]:
    """Return every edit of a source, in the order of its text; each gives another program, which can be parsed."""
    source = SourceText(text)
    functions = [node for node in source.tree.body if isinstance(node, ast.FunctionDef)]
    edits = [
        edit
        for function in functions
        for statement in function.body
        for node in ast.walk(statement)
        for operator in OPERATORS
        for edit in operator(source, node)
    ]
    programs = {ast.unparse(source.tree)}
    distinct: list[Edit] = []
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.stop, edit.text)):
        try:
            program = ast.unparse(ast.parse(edit.apply(text)))
        except SyntaxError:
            continue
        if program not in programs:
            programs.add(program)
            distinct.append(edit)
    return distinct
