"""Reads the predictions and exercises of a lesson from its cells, without running them.

A question is often an f-string with values that only a run knows. Such a value is `UNKNOWN` in the question.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import widgets.lesson
from widgets.teach.exercises import Exercise

UNKNOWN = "…"  # a value that a run computes

OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Eq: operator.eq,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {"list": list, "len": len, "str": str, "dict": dict}
METHODS = ("values", "keys", "replace", "join")  # of lists, dicts and texts


class _UnknownValueError(Exception):
    """A cell computes the value."""


@dataclass(frozen=True)
class Question:
    """A prediction or an exercise of a lesson.

    cell:    the number of the cell that asks
    text:    the question, with `UNKNOWN` for values that only a run knows
    choices: a prediction's answers, else ()
    answer:  the right answer if the lesson's text fixes it, else None
    """

    cell: int
    kind: str
    text: str
    choices: tuple[str, ...] = ()
    answer: str | None = None

    def asks(self, kind: str, text: str) -> bool:
        """Whether a worksheet's question is this one."""
        return kind == self.kind and matches(self.text, text)


def matches(pattern: str, text: str) -> bool:
    """Whether `text` is `pattern` with a value for each `UNKNOWN`.

    >>> matches("… ranks: how long?", "4 ranks: how long?"), matches("… ranks", "4 rank")
    (True, False)
    """
    return re.fullmatch(".*".join(map(re.escape, pattern.split(UNKNOWN))), text, re.S) is not None


def read_questions(sources: Sequence[str | None]) -> list[Question]:
    """Returns the questions of a lesson in order. sources: the code of each cell; None for a cell of text

    >>> read_questions(['n = 4', 'guess = Prediction(f"{n} ranks, {run.steps} steps?", ["yes", "no"])'])
    [Question(cell=1, kind='prediction', text='4 ranks, … steps?', choices=('yes', 'no'), answer=None)]
    """
    found: list[tuple[str, Question]] = []
    answers: dict[str, str] = {}
    names: dict[str, Any] = {}
    for number, source in enumerate(sources):
        tree = ast.parse(source or "")
        _store_values(tree, names)
        for name, call in _list_calls(tree):
            if isinstance(call.func, ast.Name):
                if question := _read_question(number, call, names):
                    found.append((name, question))
            elif isinstance(call.func, ast.Attribute) and call.func.attr == "against" and call.args:
                answers[ast.unparse(call.func.value)] = _to_text(call.args[0], names)
    return [_add_answer(question, answers.get(name, "")) for name, question in found]


def _add_answer(question: Question, answer: str) -> Question:
    fixed = answer if answer in question.choices and UNKNOWN not in answer else None
    return Question(question.cell, question.kind, question.text, question.choices, fixed)


def _list_calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yields each call in order, with the name that its value gets, if any."""
    names = {id(node.value): node.targets[0].id for node in ast.walk(tree)
             if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}  # fmt: skip
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        yield names.get(id(call), ""), call


def _read_question(number: int, call: ast.Call, names: dict[str, Any]) -> Question | None:
    kind = getattr(widgets.lesson, ast.unparse(call.func), None)
    if not isinstance(kind, type):
        return None
    if kind is widgets.lesson.Prediction:
        found = _evaluate_or_none(call.args[1], names) if len(call.args) > 1 else None
        choices = found if isinstance(found, list | tuple) else [UNKNOWN]
        return Question(number, "prediction", _to_text(call.args[0], names), tuple(map(str, choices)))
    return Question(number, "exercise", _read_exercise(kind, call, names)) if issubclass(kind, Exercise) else None


def _read_exercise(kind: type[Exercise], call: ast.Call, names: dict[str, Any]) -> str:
    """Returns the question that a kind of exercise makes of the arguments of its call."""
    if kind is Exercise:
        return _to_text(call.args[0], names)
    told = inspect.signature(kind).bind(
        *[_evaluate_or_none(word, names) for word in call.args],
        **{word.arg: _evaluate_or_none(word.value, names) for word in call.keywords if word.arg},
    )
    told.apply_defaults()
    inner = {name: value for name, value in told.arguments.items() if value is not None}
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.FunctionDef))
    _store_values(ast.Module(body, []), inner)
    (asked,) = (node for node in ast.walk(tree)
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__")  # fmt: skip
    return _to_text(asked.args[0], inner)


def _store_values(tree: ast.Module, names: dict[str, Any]) -> None:
    """Stores the values of plain assignments. Forgets names that the cell sets otherwise."""
    for node in tree.body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names.pop(inner.id, None)
        if not isinstance(node, ast.Assign):
            continue
        value = _evaluate_or_none(node.value, names)
        for target in node.targets:
            if isinstance(target, ast.Name) and value is not None:
                names[target.id] = value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, its in zip(target.elts, node.value.elts, strict=False):
                    if isinstance(one, ast.Name) and (known := _evaluate_or_none(its, names)) is not None:
                        names[one.id] = known


def _to_text(node: ast.expr, names: dict[str, Any]) -> str:
    found = _evaluate_or_none(node, names)
    return re.sub(f"{UNKNOWN}[{UNKNOWN}]+", UNKNOWN, found if isinstance(found, str) else UNKNOWN)


def _evaluate_or_none(node: ast.expr, names: dict[str, Any]) -> Any:
    try:
        return _evaluate(node, names)
    except (_UnknownValueError, ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    """Returns the value of an expression of constants and known names. Raises _UnknownValueError."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.JoinedStr(values=parts):
            return "".join(_format_part(part, names) for part in parts)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [value for part in parts for value in _evaluate_item(part, names)]
        case ast.Dict(keys=keys, values=values):
            held = zip(keys, values, strict=True)
            return {_known(key, names, object()): _known(value, names, UNKNOWN) for key, value in held}
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _evaluate_or_none(left, names), _evaluate_or_none(right, names)
            if isinstance(one, str) or isinstance(other, str):
                return "".join(UNKNOWN if part is None else part for part in (one, other))
            return one + other
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            if type(op) in OPERATORS:
                return OPERATORS[type(op)](_evaluate(left, names), _evaluate(right, names))
        case ast.Subscript(value=value, slice=key):
            return _evaluate(value, names)[_evaluate(key, names)]
        case ast.Call(func=ast.Name(id=name), args=words, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*[_evaluate(word, names) for word in words])
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=words, keywords=[]) if name in METHODS:
            owner = _evaluate(value, names)
            if isinstance(owner, str | dict):
                found = getattr(owner, name)(*[_evaluate(word, names) for word in words])
                return found if isinstance(found, str) else list(found)
    raise _UnknownValueError(ast.unparse(node))


def _evaluate_item(node: ast.expr, names: dict[str, Any]) -> list[Any]:
    if isinstance(node, ast.Starred):
        return list(_evaluate(node.value, names))
    return [_known(node, names, UNKNOWN)]


def _known(node: ast.expr | None, names: dict[str, Any], otherwise: Any) -> Any:
    value = None if node is None else _evaluate_or_none(node, names)
    return otherwise if value is None else value


def _format_part(part: ast.expr, names: dict[str, Any]) -> str:
    if not isinstance(part, ast.FormattedValue):
        return str(_evaluate(part, names))
    value = _evaluate_or_none(part.value, names)
    if value is None:
        return UNKNOWN
    try:
        return format(value, _to_text(part.format_spec, names) if part.format_spec else "")
    except ValueError:
        return UNKNOWN
