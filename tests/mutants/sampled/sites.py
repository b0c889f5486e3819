"""Where a source file can be broken, and how: every mutation is one replacement of text, so that its diff is what changed.

Left alone is what changes no behaviour: annotations, docstrings, `__all__`, overloads, `if TYPE_CHECKING`, `__repr__`, declarations
of types, what a decorator is given, and messages (what `raise` and `warn` are called with, and formatted strings).
"""

# ruff: noqa: N802  # Methods are named after the nodes that they are for.

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import NamedTuple, final

__all__ = ["Mutation", "mutations"]

COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "//",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Div: "/",
    ast.Mod: "%",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
}
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
OTHER_METHODS = {
    "popleft": "pop",
    "appendleft": "append",
    "add": "discard",
    "discard": "add",
    "lstrip": "rstrip",
    "removesuffix": "removeprefix",
}
ALIKE_ONLY_BY_NAME = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "map", "filter", "partial", "finalize", "zip"}
"""Whose arguments are of kinds so different that nothing is learned when the first line that runs falls over them."""
SYMMETRIC = {"assert_same", "same"}
"""Whose arguments only change places in a message."""
DECLARES = {"TypeVar", "ParamSpec", "NewType", "getLogger"}
WARNS = {"warn", "warn_explicit", "add_note", "note_place", "debug", "info", "warning"}
UNWRAPPED = {"sorted", "set", "tuple", "list", "dict", "iter", "reversed", "abs", "bool"}


@final
class Mutation(NamedTuple):
    """`start` and `end` are offsets in bytes; `place` is the node that it was made for, shared by all its mutations."""

    kind: str
    place: tuple[int, int, str]
    line: int
    start: int
    end: int
    new: str


def mutations(source: str) -> list[Mutation]:
    """Return all mutations of a source, by place; none leaves a file that Python cannot compile."""
    found = sorted({m for m in _Finder(source).found if m.new.encode() != source.encode()[m.start : m.end]})
    return sorted((m for m in found if _compiles(source, m)), key=lambda m: (m.place, m.kind, m.new))


def _compiles(source: str, mutation: Mutation) -> bool:
    raw = source.encode()
    try:
        compile(raw[: mutation.start] + mutation.new.encode() + raw[mutation.end :], "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _called(node: ast.AST) -> str:
    """Return the last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


class _Finder:
    def __init__(self, source: str) -> None:
        self.raw = source.encode()
        self.found: list[Mutation] = []
        self._lines = [0]
        for line in self.raw.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._in_init = False
        self._visit(ast.parse(source))

    # Places.

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt, ast.excepthandler, ast.keyword, ast.arg))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.raw[start:end].decode()

    def _add(self, kind: str, node: ast.AST, new: str, span: tuple[int, int] | None = None) -> None:
        start, end = self._span(node)
        line = self.raw[: (span or (start, end))[0]].count(b"\n") + 1
        self.found.append(Mutation(kind, (start, end, type(node).__name__), line, *(span or (start, end)), new))

    def _between(self, left: ast.AST, right: ast.AST, sign: str) -> tuple[int, int] | None:
        """Return where the sign stands between two operands; None where brackets or comments hide it."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self.raw[start:end].decode()
        at = gap.find(sign)
        return None if at < 0 or gap.count(sign) > 1 else (start + at, start + at + len(sign))

    # The walk.

    def _visit(self, node: ast.AST) -> None:
        if self._is_left_alone(node):
            return
        make = getattr(self, f"_of_{type(node).__name__}", None)
        if make is not None:
            make(node)
        outside, self._in_init = self._in_init, self._in_init or (isinstance(node, ast.FunctionDef) and node.name == "__init__")
        for child in self._children(node):
            self._visit(child)
        self._in_init = outside

    @staticmethod
    def _is_left_alone(node: ast.AST) -> bool:
        match node:
            case ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return True
            case ast.Expr(value=ast.Constant()):
                return True
            case ast.FunctionDef(name=name, decorator_list=decorators):
                return name in ("__repr__", "__str__") or any("overload" in ast.unparse(each) for each in decorators)
            case ast.ClassDef(bases=bases):
                return any("Protocol" in ast.unparse(base) or ast.unparse(base) == "TypedDict" for base in bases)
            case ast.If(test=test):
                return _is_type_checking(test)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                return name == "__all__" or _called(value) in DECLARES
            case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
                return True
        return False

    @staticmethod
    def _children(node: ast.AST) -> Iterator[ast.AST]:
        skipped = {"annotation", "returns", "decorator_list", "bases", "type_params", "keywords"}
        if isinstance(node, ast.Raise):
            return
        if _called(node) in WARNS | {"cast"}:
            return
        for name, value in ast.iter_fields(node):
            if name in skipped and not (name == "keywords" and isinstance(node, ast.Call)):
                continue
            values = value if isinstance(value, list) else [value]
            yield from (each for each in values if isinstance(each, ast.AST))

    # Expressions.

    def _of_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            sign = {
                ast.Lt: "<",
                ast.LtE: "<=",
                ast.Gt: ">",
                ast.GtE: ">=",
                ast.Eq: "==",
                ast.NotEq: "!=",
                ast.Is: "is",
                ast.IsNot: "is not",
                ast.In: "in",
                ast.NotIn: "not in",
            }[type(operator)]
            where = self._between(left, right, sign)
            if where is not None:
                for new in COMPARISONS[type(operator)]:
                    self._add("comparison", node, new, where)

    def _of_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            where = self._between(left, right, old)
            if where is not None and len(node.values) == 2:
                self._add("boolean operator", node, new, where)
        for value in node.values:
            rest = [self._text(each) for each in node.values if each is not value]
            self._add("dropped operand", node, "(" + f" {old} ".join(f"({each})" for each in rest) + ")")

    def _of_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC:
            where = self._between(node.left, node.right, SIGNS[type(node.op)])
            if where is not None:
                self._add("arithmetic", node, ARITHMETIC[type(node.op)], where)

    def _of_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            kind = "dropped not" if isinstance(node.op, ast.Not) else "dropped minus"
            self._add(kind, node, f"({self._text(node.operand)})")

    def _of_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self._add("constant", node, str(node.value + 1))
            self._add("constant", node, f"({node.value - 1})" if node.value < 1 else str(node.value - 1))

    def _of_IfExp(self, node: ast.IfExp) -> None:
        body, test, other = self._text(node.body), self._text(node.test), self._text(node.orelse)
        self._add("negated condition", node, f"({body}) if not ({test}) else ({other})")

    def _of_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._add("negated condition", test, f"not ({self._text(test)})")
        self._bound(node.iter)

    def _bound(self, iterable: ast.expr) -> None:
        text = self._text(iterable)
        self._add("loop bound", iterable, f"list({text})[1:]")
        self._add("loop bound", iterable, f"list({text})[:-1]")

    def _of_Call(self, node: ast.Call) -> None:
        name = _called(node)
        if name in WARNS | {"cast", "TypeVar"}:
            return
        if isinstance(node.func, ast.Name) and name in OTHER_NAMES:
            self._add("other function", node, OTHER_NAMES[name], self._span(node.func))
        if isinstance(node.func, ast.Attribute) and name in OTHER_METHODS:
            end = self._span(node.func)[1]
            self._add("other method", node, OTHER_METHODS[name], (end - len(name), end))
        if name == "append" and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
            end = self._span(node.func)[1]
            self._add("other method", node, "insert(0, ", (end - len(name), self._span(node.args[0])[0]))
        plain = [each for each in node.args if not isinstance(each, ast.Starred)]
        if len(plain) == len(node.args) and name not in ALIKE_ONLY_BY_NAME | SYMMETRIC:
            for left, right in itertools.pairwise(plain):
                between = self.raw[self._span(left)[1] : self._span(right)[0]].decode()
                swapped = self._text(right) + between + self._text(left)
                if self._text(left) != self._text(right):
                    self._add("swapped arguments", node, swapped, (self._span(left)[0], self._span(right)[1]))
        if len(node.args) == 1 and plain and not node.keywords and name in UNWRAPPED:
            self._add("removed call", node, f"({self._text(plain[0])})")
        for keyword in node.keywords:
            if keyword.arg is not None and not (name == "zip" and keyword.arg == "strict"):
                start, end = self._span(keyword)
                comma = self.raw[end : end + 1] == b","
                self._add("dropped argument", keyword, "", (start, end + comma))

    # Statements.

    def _of_Expr(self, node: ast.Expr) -> None:
        if _called(node.value) not in WARNS and not isinstance(node.value, (ast.Yield, ast.YieldFrom)):
            self._add("removed statement", node, "pass")

    def _of_Assign(self, node: ast.Assign) -> None:
        # Without an attribute that every object has, all falls over at once.
        if not self._in_init and any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self._add("removed statement", node, "pass")

    def _of_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("removed statement", node, "pass")
        if type(node.op) in ARITHMETIC:
            where = self._between(node.target, node.value, SIGNS[type(node.op)] + "=")
            if where is not None:
                self._add("arithmetic", node, ARITHMETIC[type(node.op)] + "=", where)

    def _of_Delete(self, node: ast.Delete) -> None:
        self._add("removed statement", node, "pass")

    def _of_Raise(self, node: ast.Raise) -> None:
        self._add("removed statement", node, "pass")

    def _of_Continue(self, node: ast.Continue) -> None:
        self._add("removed statement", node, "pass")
        self._add("removed statement", node, "break")

    def _of_Break(self, node: ast.Break) -> None:
        self._add("removed statement", node, "continue")

    def _of_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._add("return value", node, "pass")
        elif not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add("return value", node, "return None")

    def _of_If(self, node: ast.If) -> None:
        self._add("negated condition", node, f"not ({self._text(node.test)})", self._span(node.test))
        self._add("decided condition", node, "False", self._span(node.test))
        self._add("decided condition", node, "True", self._span(node.test))

    def _of_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._add("negated condition", node, f"not ({self._text(node.test)})", self._span(node.test))
            self._add("loop bound", node, "if", (self._span(node)[0], self._span(node)[0] + len("while")))

    def _of_For(self, node: ast.For) -> None:
        self._bound(node.iter)

    def _of_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        first, last = node.body[0], node.body[-1]
        if not isinstance(first, ast.Raise):
            self._add("except removed", node, "raise", (self._span(first)[0], self._span(last)[1]))

    def _of_Try(self, node: ast.Try) -> None:
        if node.finalbody:
            span = self._span(node.finalbody[0])[0], self._span(node.finalbody[-1])[1]
            self._add("finally removed", node, "pass", span)

    def _of_With(self, node: ast.With) -> None:
        for item in node.items:
            if _called(item.context_expr) == "suppress":
                self._add("suppress removed", item.context_expr, "suppress()")
