"""Arithmetic without `eval`: for the tool `calculator` and the `calculate_output` of a `multi` grader.

    numbers, names, ( ), + - * / // %, ^ or ** (power), min max abs floor ceil round exp log sqrt

Integers are exact. Everything is bounded: the length of the text, its nesting, and the size of each number.
"""

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.errors import InvalidInput

Number = int | float

MAX_CHARACTERS = 1000
MAX_DEPTH = 50
MAX_BITS = 4096
"""The most bits of a whole number."""


def evaluate(text: str, names: Mapping[str, Number] | None = None) -> Number:
    """The value of an expression: an int or a finite float.

    Raises InvalidInput, in a few words that may be shown to a model, for whatever cannot be evaluated.
    """
    return _value(_parse(text), names or {}, 0)


def names_of(text: str) -> set[str]:
    """The names in an expression, except functions. Raises InvalidInput if it is not well formed."""
    tree = _parse(text)
    _check_shape(tree, 0)
    functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions}


def show(value: Number) -> str:
    """A number as a person would write it: `29842`, `0.5`, `3` for 3.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _parse(text: str) -> ast.expr:
    if len(text) > MAX_CHARACTERS:
        raise InvalidInput(f"longer than {MAX_CHARACTERS} characters")
    try:
        return ast.parse(text.replace("^", "**").strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidInput("not an arithmetic expression") from error


def _check_shape(node: ast.expr, depth: int) -> None:
    """Raises InvalidInput for a node that can never have a value, whatever the names stand for."""
    for child in _operands(node, depth):
        _check_shape(child, depth + 1)


def _operands(node: ast.expr, depth: int) -> Sequence[ast.expr]:
    """The parts of a node that have a value themselves. Raises InvalidInput if it is no arithmetic."""
    if depth > MAX_DEPTH:
        raise InvalidInput("nested too deeply")
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return ()
        case ast.Name():
            return ()
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return (operand,)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            return (left, right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and args:
            return args
        case ast.Call(func=ast.Name(id=name)):
            raise InvalidInput(f"no function {name}; there are {', '.join(_FUNCTIONS)}")
        case _:
            raise InvalidInput("not an arithmetic expression")


def _value(node: ast.expr, names: Mapping[str, Number], depth: int) -> Number:
    values = [_value(child, names, depth + 1) for child in _operands(node, depth)]
    try:
        return _checked(_apply(node, values, names))
    except ZeroDivisionError as error:
        raise InvalidInput("division by zero") from error
    except OverflowError as error:
        raise InvalidInput("the number is too large") from error
    except (ValueError, TypeError) as error:
        raise InvalidInput("not defined for these numbers") from error


def _apply(node: ast.expr, values: list[Number], names: Mapping[str, Number]) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            if name not in names:
                raise InvalidInput(f"unknown name {name}")
            return names[name]
        case ast.UnaryOp(op=ast.USub()):
            return -values[0]
        case ast.UnaryOp():
            return values[0]
        case ast.BinOp(op=op):
            return _OPERATORS[type(op)](values[0], values[1])
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name](*values)
        case _:
            raise AssertionError("_operands has refused it")


def _checked(value: object) -> Number:
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise InvalidInput("not defined for these numbers" if isinstance(value, complex) else "the number is too large")


def _divide(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and b != 0 and a % b == 0:
        return a // b
    return a / b


def _power(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and a.bit_length() * abs(b) > 2 * MAX_BITS:
        raise InvalidInput("the number is too large")
    return a**b


def _round(a: Number, digits: Number = 0) -> Number:
    places = int(digits)
    if abs(places) > 100:
        raise InvalidInput("not defined for these numbers")
    return round(a, places) if places else round(a)


_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: _divide,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: _power,
}

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": lambda *values: min(values),
    "max": lambda *values: max(values),
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": _round,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
}
