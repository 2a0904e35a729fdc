"""`.source`: the calls inside a module's forward as locations.

The forward is rewritten once per module, when a block first asks: each call `f(x)` becomes `CALL("name", f, x)`, which
runs `f` and lets blocks read and write its arguments and its value. A call is named after what is called, dots and
all as underscores, and counted: `self.qkv_proj(x)` is `self_qkv_proj_0`, the second `x.view(...)` is `x_view_1`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from actors.worker.blocks.errors import LocationError
from actors.worker.blocks.refs import OperationRef
from actors.worker.blocks.sites import ModuleSites, Site

if TYPE_CHECKING:
    from actors.worker.blocks.runtime import BlockRuntime

_CALL = "__harvest_call__"


class _Rewritten:
    """A forward's text with the names of its calls."""

    def __init__(self, function: types.FunctionType) -> None:
        try:
            text = inspect.getsource(function)
        except (OSError, TypeError) as error:
            raise LocationError(f"the source of {function.__qualname__} is not to be had: {error}") from error
        self.text = textwrap.dedent(text)
        tree = ast.parse(self.text)
        definition = tree.body[0]
        if not isinstance(definition, ast.FunctionDef):
            raise LocationError(f"{function.__qualname__} is not a plain function")
        definition.decorator_list = []
        rewriter = _CallNamer()
        definition.body = [rewriter.visit(statement) for statement in definition.body]
        self.names: dict[str, int] = rewriter.lines
        free = function.__code__.co_freevars
        filename = f"<harvest source of {function.__module__}.{function.__qualname__}>"
        self._cells = free
        if free:
            # A function that makes the forward, so that its free names are free again.
            maker = ast.parse(f"def __make__({', '.join(free)}):\n    pass").body[0]
            assert isinstance(maker, ast.FunctionDef)
            maker.body = [definition, ast.Return(value=ast.Name(id=definition.name, ctx=ast.Load()))]
            tree.body = [maker]
        ast.fix_missing_locations(tree)
        self._code = compile(tree, filename, "exec", dont_inherit=True)
        self._name = definition.name
        linecache.cache[filename] = (len(self.text), None, self.text.splitlines(keepends=True), filename)

    def function(self, original: types.FunctionType, call: Callable[..., Any]) -> types.FunctionType:
        """The rewritten function with the original's globals and cells, and `call` at each call."""
        scope = _Scope(original.__globals__, call)
        made: dict[str, Any] = {}
        exec(self._code, scope, made)
        code: types.CodeType
        if self._cells:
            maker = made["__make__"]
            code = next(
                item
                for item in maker.__code__.co_consts
                if isinstance(item, types.CodeType) and item.co_name == self._name
            )
            by_name = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
            closure = tuple(by_name[name] for name in code.co_freevars)
        else:
            code, closure = made[self._name].__code__, ()
        function = types.FunctionType(code, scope, original.__name__, original.__defaults__, closure or None)
        function.__kwdefaults__ = original.__kwdefaults__
        return function


class _Scope(dict[str, Any]):
    """The original function's globals as they are at the time of the call, and the hook beside them."""

    def __init__(self, original: dict[str, Any], call: Callable[..., Any]) -> None:
        super().__init__(original)
        self[_CALL] = call


class _CallNamer(ast.NodeTransformer):
    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self._counts: dict[str, int] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # Inner calls run first, so they are counted first.
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("super", _CALL):
            return node
        base = _name_of(node.func)
        count = self._counts.get(base, 0)
        self._counts[base] = count + 1
        name = f"{base}_{count}"
        self.lines[name] = node.lineno
        hook = ast.Name(id=_CALL, ctx=ast.Load())
        return ast.copy_location(
            ast.Call(func=hook, args=[ast.Constant(value=name), node.func, *node.args], keywords=node.keywords), node
        )

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return f"{_name_of(function.value)}_{function.attr}"
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Call):
        # The hook that was put around an inner call: its first argument is that call's name.
        first = function.args[0]
        return str(first.value) if isinstance(first, ast.Constant) else "call"
    if isinstance(function, ast.Subscript):
        return f"{_name_of(function.value)}_item"
    return "call"


@functools.cache
def _rewrite(function: types.FunctionType) -> _Rewritten:
    return _Rewritten(function)


def _forward_function(module: nn.Module) -> types.FunctionType:
    """The Python function that runs when `module` is called."""
    forward: Any = type(module).forward
    # vLLM's CustomOp forwards to the method for its platform.
    if hasattr(module, "_forward_method"):
        forward = module._forward_method
    forward = inspect.unwrap(getattr(forward, "__func__", forward))
    if not isinstance(forward, types.FunctionType):
        raise LocationError(f"the forward of {type(module).__name__} is one fused kernel and has no operations inside")
    return forward


class SourceText:
    """A module's forward, printable with the names of its operations."""

    def __init__(self, module: nn.Module) -> None:
        self._rewritten = _rewrite(_forward_function(module))

    @property
    def names(self) -> tuple[str, ...]:
        """The operations, in the order in which they run in straight-line code."""
        return tuple(self._rewritten.names)

    def __str__(self) -> str:
        by_line: dict[int, list[str]] = {}
        for name, line in self._rewritten.names.items():
            by_line.setdefault(line, []).append(name)
        lines = self._rewritten.text.splitlines()
        width = max(len(", ".join(names)) for names in by_line.values()) if by_line else 0
        return "\n".join(
            f"{', '.join(by_line.get(number, [])):>{width}} | {line}" for number, line in enumerate(lines, start=1)
        )

    __repr__ = __str__


class ModuleSource:
    """`module.source` inside a block: its operations by name."""

    def __init__(self, runtime: BlockRuntime, sites: ModuleSites) -> None:
        self._runtime = runtime
        self._path = sites.path
        function = _forward_function(sites.module)
        self._rewritten = _rewrite(function)
        self._operations: dict[str, OperationRef] = {}
        self._sites: dict[str, tuple[Site, Site]] = {}
        for name in self._rewritten.names:
            place = f"{sites.path}.source.{name}"
            pair = self._sites[name] = (Site(f"{place}.input"), Site(f"{place}.output"))
            self._operations[name] = OperationRef(runtime, *pair)
        rewritten = self._rewritten.function(function, self._call)
        sites.forward = types.MethodType(rewritten, sites.module)

    @property
    def sites(self) -> list[Site]:
        """All sites of its operations."""
        return [site for pair in self._sites.values() for site in pair]

    def __getattr__(self, name: str) -> OperationRef:
        operation = self.__dict__.get("_operations", {}).get(name)
        if operation is None:
            if name.startswith("__"):
                raise AttributeError(name)
            raise LocationError(
                f"{self._path}.source has no operation {name!r}; it has {', '.join(self._rewritten.names)}"
            )
        return operation

    def __dir__(self) -> list[str]:
        return list(self._operations)

    def _call(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        runtime = self._runtime
        if not runtime.active:
            return function(*args, **kwargs)
        site_in, site_out = self._sites[name]
        site_in.seen_step = runtime.step_number
        if site_in.waiting:
            args, kwargs = runtime.serve(site_in, (args, kwargs))
        value = function(*args, **kwargs)
        site_out.seen_step = runtime.step_number
        if site_out.waiting:
            value = runtime.serve(site_out, value)
        return value


def source_of(runtime: BlockRuntime, sites: ModuleSites, *, tp_size: int) -> ModuleSource:
    """The operations of a module's forward, made addressable at the first call.

    Raises:
        LocationError: the forward has no source, is a fused kernel, or the engine is tensor-parallel.
    """
    if tp_size > 1:
        raise LocationError(
            f"{sites.path}.source: under tensor parallelism the values inside a forward are one rank's part; read the "
            "module's own inputs and outputs, which are whole"
        )
    if sites.source is None:
        sites.source = ModuleSource(runtime, sites)
    found: ModuleSource = sites.source
    return found
