"""Keeps code out of scorers that evaluate an answer.

Some scorers of reasoning-gym give the model's text to `eval` or to sympy's parser, which is `eval`
in disguise. A rewarded model looks for such doors. Answers to those families pass only as plain
literals or plain arithmetic; what they cost to compute is limited elsewhere.
"""

import ast

_LITERAL = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
"""Scorers that `eval` an answer which is not the expected text, hoping for a list."""

_FORMULA = frozenset(
    {
        "countdown",
        "puzzle24",
        "polynomial_multiplication",
        "simple_integration",
        "intermediate_integration",
    }
)
"""Scorers that read a formula with sympy."""

_MOST_CHARS = 2000

_LITERAL_NODES = (
    ast.Expression,
    ast.List,
    ast.Tuple,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.UnaryOp,
    ast.USub,
    ast.UAdd,
)
_FORMULA_NODES = (
    ast.Expression,
    ast.Name,
    ast.Load,
    ast.UnaryOp,
    ast.USub,
    ast.UAdd,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.Pow,
)
_FUNCTIONS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "a")
    for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")
) | {"cot", "sec", "csc", "exp", "log", "ln", "sqrt", "Abs", "erf", "erfi", "Ei", "Si", "Ci", "li"}


def refusal(family: str, answer: str) -> str | None:
    """Why a family's scorer must not see an answer; None when it may."""
    if family not in _LITERAL and family not in _FORMULA:
        return None
    if len(answer) > _MOST_CHARS:
        return f"the answer is longer than {_MOST_CHARS} characters"
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError):
        # No Python expression cannot be evaluated; sympy, though, reads more than Python.
        return None if family in _LITERAL else "the answer is no formula"
    except (RecursionError, MemoryError):
        return "the answer is nested too deeply"
    allowed = _plain if family in _LITERAL else _arithmetic
    return None if all(map(allowed, ast.walk(tree))) else "the answer is more than a plain value"


def _plain(node: ast.AST) -> bool:
    return isinstance(node, _LITERAL_NODES)


def _arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    return isinstance(node, _FORMULA_NODES)
