"""Takes the body of a `with` statement from source and keeps it from running in place.

The statement is found from the frame: its exact place in the file comes from the position of the instruction that
entered the context. The body is kept from running by raising :class:`SkipBody` from a trace function at the body's
first instruction, which the context's own ``__exit__`` swallows. Whatever traced before (debugger, coverage) is put
back.
"""

from __future__ import annotations
import __future__

import ast
import functools
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from harvest.blocks.errors import SourceError

_FUNCTION_FORM = (
    "Write the block as a plain function instead, which needs no source: model.run(function, prompts, **sampling)"
)

_FUTURE_FLAGS = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)

Position = tuple[int, int]
"""(line from 1, column in UTF-8 bytes from 0)."""


class SkipBody(BaseException):
    """Ends a `with` body before its first statement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WithBody:
    """The body of one `with` statement."""

    filename: str
    body: tuple[ast.stmt, ...]
    """Its statements at their places in the file; do not change them."""
    first: Position | None
    """Where its first statement that does something begins; None without one."""
    text: str
    """The body as written."""
    class_name: str | None
    """The class around it, in which Python mangles private names."""
    future_flags: int
    """`from __future__` imports of its file, as flags for `compile`."""


def find_body(frame: FrameType) -> WithBody:
    """The body of the `with` statement that `frame` is entering.

    Raises:
        SourceError: the source is not to be had, is not what runs, or the context was entered without `with`.
    """
    return _find_body(frame.f_code, frame.f_lasti, frame.f_code.co_filename, _source_lines(frame))


@functools.lru_cache(maxsize=512)
def _find_body(code: CodeType, instruction: int, filename: str, lines: tuple[str, ...]) -> WithBody:
    positions = _positions(code)
    entering = positions[instruction // 2]
    # On 3.11 and 3.12 the entering instruction carries the whole statement's place, and the one before it that of
    # the context expression; from 3.13 on it carries that of the expression.
    candidates = [place for place in (entering, positions[max(instruction // 2 - 1, 0)]) if place is not None]
    tree = _parse(filename, lines)
    for place in reversed(candidates):
        for node in ast.walk(tree):
            if not isinstance(node, (ast.With, ast.AsyncWith)):
                continue
            for index, item in enumerate(node.items):
                expression = item.context_expr
                if (expression.lineno, expression.col_offset) == place:
                    return _body_of(code, node, index, filename, lines, _class_around(tree, node))
    line = code.co_firstlineno if entering is None else entering[0]
    raise SourceError(
        f"{filename}:{line}: there is no `with` statement here in the source; a block must be entered by a `with` "
        f"statement, and the file must be what is running. {_FUNCTION_FORM}"
    )


def _body_of(
    code: CodeType,
    node: ast.With | ast.AsyncWith,
    index: int,
    filename: str,
    lines: tuple[str, ...],
    class_name: str | None,
) -> WithBody:
    if isinstance(node, ast.AsyncWith):
        raise SourceError(f"{filename}:{node.lineno}: a block is entered by `with`, not by `async with`")
    later = node.items[index + 1 :]
    body: list[ast.stmt]
    if later:
        # `with a as x, b as y: ...` is `with a as x: with b as y: ...`.
        inner = ast.With(items=later, body=node.body, type_comment=None)
        ast.copy_location(inner, later[0].context_expr)
        inner.end_lineno, inner.end_col_offset = node.end_lineno, node.end_col_offset
        body = [inner]
    else:
        body = list(node.body)
    acting = [statement for statement in body if not is_idle(statement)]
    # A statement that does nothing has no instruction of its own to stop at; a body of such may as well run.
    first = min((_start_of(statement) for statement in acting), default=None)
    begin = min(_start_of(statement) for statement in body)
    last = node.body[-1]
    assert last.end_lineno is not None
    text = "".join(lines[begin[0] - 1 : last.end_lineno])
    _check_is_running(code, body, filename)
    return WithBody(
        filename=filename,
        body=tuple(body),
        first=first,
        text=text,
        class_name=class_name,
        future_flags=code.co_flags & _FUTURE_FLAGS,
    )


def _class_around(tree: ast.Module, target: ast.AST) -> str | None:
    """The innermost class that holds `target`."""

    def search(node: ast.AST, name: str | None) -> tuple[bool, str | None]:
        if node is target:
            return True, name
        inner = node.name if isinstance(node, ast.ClassDef) else name
        for child in ast.iter_child_nodes(node):
            found, around = search(child, inner)
            if found:
                return True, around
        return False, None

    return search(tree, None)[1]


def is_idle(statement: ast.stmt) -> bool:
    """`pass`, a string, an ellipsis."""
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _start_of(statement: ast.stmt) -> Position:
    starts = [(statement.lineno, statement.col_offset)]
    starts += [(item.lineno, item.col_offset) for item in getattr(statement, "decorator_list", ())]
    return min(starts)


def _check_is_running(code: CodeType, body: list[ast.stmt], filename: str) -> None:
    """A file changed since it was imported has another body than the one that would have run."""
    known = _names_in(code)
    for statement in body:
        # Only what no compiler drops: a name bound, or a function called, by a statement of its own.
        names: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            names = statement.targets
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            names = [statement.value.func]
        for name in names:
            if isinstance(name, ast.Name) and name.id not in known:
                raise SourceError(
                    f"{filename}:{name.lineno}: the source names {name.id!r} here, but the running code does not: the "
                    "file was changed after it was imported. Import it again"
                )


def _names_in(code: CodeType) -> set[str]:
    names = {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    # Private names are mangled in the code and not in the source.
    return names | {name[name.index("__") :] for name in names if name.startswith("_") and "__" in name[1:]}


@functools.lru_cache(maxsize=512)
def _positions(code: CodeType) -> tuple[Position | None, ...]:
    return tuple(
        (line, column) if line is not None and column is not None else None
        for line, _, column, _ in code.co_positions()
    )


@functools.lru_cache(maxsize=64)
def _parse(filename: str, lines: tuple[str, ...]) -> ast.Module:
    try:
        return ast.parse("".join(lines), filename=filename)
    except SyntaxError as error:
        raise SourceError(f"{filename}: the source cannot be parsed ({error}). {_FUNCTION_FORM}") from error


def _source_lines(frame: FrameType) -> tuple[str, ...]:
    filename = frame.f_code.co_filename
    cached = _LINES.get(filename)
    lines = linecache.getlines(filename, frame.f_globals)
    if not lines and filename == "<string>":
        lines = _command_line_source()
    if not lines:
        raise SourceError(
            f"the source of {filename!r} is not to be had (a plain REPL, exec or a frozen program). {_FUNCTION_FORM}"
        )
    # linecache hands out one list per file until it changes, so identity saves building the tuple again.
    if cached is None or cached[0] is not lines:
        if len(_LINES) > 256:
            _LINES.clear()
        cached = _LINES[filename] = (lines, tuple(lines))
    return cached[1]


_LINES: dict[str, tuple[list[str], tuple[str, ...]]] = {}


@functools.cache
def _command_line_source() -> list[str]:
    """The program of `python -c program`, which has no file."""
    arguments = iter(sys.orig_argv[1:])
    for argument in arguments:
        if argument.startswith("--") or not argument.startswith("-") or argument == "-":
            return []
        for index, flag in enumerate(argument[1:], start=1):
            if flag == "c":
                program = argument[index + 1 :] or next(arguments, "")
                return program.splitlines(keepends=True)
            if flag in "WX":
                if index == len(argument) - 1:
                    next(arguments, None)
                break
            if flag == "m":
                return []
    return []


class BodySkipper:
    """Keeps the body from running: `start` in ``__enter__``, `stop` in ``__exit__``."""

    def __init__(self, frame: FrameType, first: Position | None) -> None:
        self._frame = frame
        self._first = first
        self._before: tuple[Any, Any, bool] | None = None

    def start(self) -> None:
        frame, first = self._frame, self._first
        if first is None:
            return
        positions = _positions(frame.f_code)

        def at_event(traced: FrameType, event: str, _: Any) -> Callable[..., Any]:
            if event in ("line", "opcode"):
                place = positions[traced.f_lasti // 2]
                if place is not None and place >= first:
                    raise SkipBody
            return at_event

        self._before = (sys.gettrace(), frame.f_trace, frame.f_trace_opcodes)
        # Instructions are traced because a body on the line of its `with` begins without a line event.
        frame.f_trace = at_event
        frame.f_trace_opcodes = True
        sys.settrace(_trace_nothing)

    def stop(self) -> None:
        if self._before is None:
            return
        global_trace, local_trace, opcodes = self._before
        self._before = None
        sys.settrace(global_trace)
        self._frame.f_trace_opcodes = opcodes
        self._frame.f_trace = local_trace


def _trace_nothing(*_: Any) -> None:
    return None
