"""Turns the body of a `with` statement into code that runs on its own.

The body becomes a module-level program: its names live in one dict, prefilled with the caller's values that it reads.
`value.save()` becomes a call that also works on lists, tuples and numbers, and an assignment of something saved is
noted with its name.
"""

from __future__ import annotations

import ast
import copy
import dis
import functools
import marshal
from types import CodeType, FrameType
from typing import Any

from actors.worker.blocks.names import NAMED_NAME, SAVE_NAME
from harvest.blocks.capture import WithBody
from harvest.blocks.errors import SourceError

_NAME_OPERATIONS = frozenset(
    {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF", "DELETE_NAME"}
)


class CompiledBody:
    """A body as code, with the names that it reads from outside."""

    def __init__(self, body: WithBody) -> None:
        _refuse_unsupported(body)
        rewriter = _Rewriter(body.class_name)
        module = ast.Module(body=[rewriter.visit(copy.deepcopy(item)) for item in body.body], type_ignores=[])
        # A `with` inside becomes two statements in places; flatten what the rewriter nested.
        module.body = _flatten(module.body)
        ast.fix_missing_locations(module)
        self.code: CodeType = compile(module, body.filename, "exec", flags=body.future_flags, dont_inherit=True)
        self.marshalled = marshal.dumps(self.code)
        self.reads = _names_read(self.code) - {SAVE_NAME, NAMED_NAME}
        self.filename = body.filename
        self.text = body.text


@functools.lru_cache(maxsize=512)
def compile_body(body: WithBody) -> CompiledBody:
    """The body's code; cached, so that an invoke in a loop is compiled once.

    Raises:
        SourceError: the body holds a statement that cannot leave its function (return, yield, await, nonlocal).
    """
    return CompiledBody(body)


def values_of(names: set[str], frame: FrameType) -> dict[str, Any]:
    """The values of `names` as `frame` sees them; builtins and unknown names are left out."""
    local = frame.f_locals
    found: dict[str, Any] = {}
    for name in names:
        if name in local:
            found[name] = local[name]
        elif name in frame.f_globals:
            found[name] = frame.f_globals[name]
    return found


def _names_read(code: CodeType) -> set[str]:
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _NAME_OPERATIONS}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_read(constant)
    return names


class _Rewriter(ast.NodeTransformer):
    """`x.save()` -> SAVE(x); an assignment whose value may be saved is followed by NAMED(name, value)."""

    def __init__(self, class_name: str | None) -> None:
        self._class_name = (class_name or "").lstrip("_")

    def _mangled(self, name: str) -> str:
        private = name.startswith("__") and not name.endswith("__") and "." not in name
        return f"_{self._class_name}{name}" if private and self._class_name else name

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = self._mangled(node.attr)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._mangled(node.id)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        # A class in the body mangles by itself.
        outer, self._class_name = self._class_name, ""
        self.generic_visit(node)
        self._class_name = outer
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "save" and not node.args and not node.keywords:
            return ast.copy_location(ast.Call(func=_name(SAVE_NAME, node), args=[function.value], keywords=[]), node)
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        may_save = _may_save(node.value)
        self.generic_visit(node)
        targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
        return _Several([node, *(_note(name, node) for name in targets)]) if may_save and targets else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        target, may_save = node.target, node.value is not None and _may_save(node.value)
        self.generic_visit(node)
        if may_save and isinstance(target, ast.Name):
            return _Several([node, _note(target.id, node)])
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        saved: str | None = None
        call = node.value
        if isinstance(call, ast.Call) and _may_save(call):
            function = call.func
            if isinstance(function, ast.Attribute) and not call.args and isinstance(function.value, ast.Name):
                saved = self._mangled(function.value.id)
            elif len(call.args) == 1 and isinstance(call.args[0], ast.Name):
                saved = self._mangled(call.args[0].id)
        self.generic_visit(node)
        return _Several([node, _note(saved, node)]) if saved is not None else node


class _Several(list[ast.stmt]):
    """Statements in the place of one."""


def _may_save(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return False
    function = value.func
    return (isinstance(function, ast.Attribute) and function.attr == "save" and len(value.args) <= 1) or (
        isinstance(function, ast.Name) and function.id == "save"
    )


def _note(name: str, at: ast.stmt) -> ast.stmt:
    call = ast.Call(func=_name(NAMED_NAME, at), args=[ast.Constant(value=name), _name(name, at)], keywords=[])
    return ast.copy_location(ast.Expr(value=ast.copy_location(call, at)), at)


def _name(name: str, at: ast.AST) -> ast.Name:
    node = ast.Name(id=name, ctx=ast.Load())
    return ast.copy_location(node, at)


def _flatten(statements: list[Any]) -> list[ast.stmt]:
    flat: list[ast.stmt] = []
    for statement in statements:
        flat += statement if isinstance(statement, _Several) else [statement]
    return flat


def _refuse_unsupported(body: WithBody) -> None:
    def walk(node: ast.AST, inside_function: bool, inside_loop: bool) -> None:
        problem = None
        if isinstance(node, ast.Nonlocal):
            problem = "nonlocal"
        elif not inside_function:
            if isinstance(node, ast.Return):
                problem = "return"
            elif isinstance(node, (ast.Yield, ast.YieldFrom)):
                problem = "yield"
            elif isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
                problem = "await"
            elif isinstance(node, (ast.Break, ast.Continue)) and not inside_loop:
                problem = "break or continue of a loop around the block"
        if problem is not None:
            raise SourceError(
                f"{body.filename}:{getattr(node, 'lineno', '?')}: a block runs inside the engine, so it cannot use "
                f"{problem}; move that out of the `with` body, or use the function form model.run(function, prompts)"
            )
        nested = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        loop = isinstance(node, (ast.For, ast.While))
        for child in ast.iter_child_nodes(node):
            walk(child, inside_function or nested, (inside_loop or loop) and not nested)

    for statement in body.body:
        walk(statement, False, False)
