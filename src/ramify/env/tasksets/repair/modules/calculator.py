"""Arithmetic with whole numbers, +, -, *, / (rounded down) and round brackets."""


def tokenize(text: str) -> list[str]:
    """Return the numbers and symbols of an expression, without spaces: "12+(3 )" -> ["12", "+", "(", "3", ")"]."""
    tokens: list[str] = []
    for index, character in enumerate(text):
        if character.isdigit() and index > 0 and text[index - 1].isdigit():
            tokens[-1] += character
        elif not character.isspace():
            tokens.append(character)
    return tokens


def evaluate(text: str) -> int:
    """Return the value of an expression; * and / bind stronger than + and -, equal ones are computed from the left."""
    tokens = tokenize(text)
    value, end = _evaluate_sum(tokens, 0)
    if end != len(tokens):
        raise ValueError("unexpected " + tokens[end])
    return value


def _evaluate_sum(tokens: list[str], index: int) -> tuple[int, int]:
    value, index = _evaluate_product(tokens, index)
    while index < len(tokens) and tokens[index] in "+-":
        operand, next_index = _evaluate_product(tokens, index + 1)
        value = value + operand if tokens[index] == "+" else value - operand
        index = next_index
    return value, index


def _evaluate_product(tokens: list[str], index: int) -> tuple[int, int]:
    value, index = _evaluate_atom(tokens, index)
    while index < len(tokens) and tokens[index] in "*/":
        operand, next_index = _evaluate_atom(tokens, index + 1)
        value = value * operand if tokens[index] == "*" else value // operand
        index = next_index
    return value, index


def _evaluate_atom(tokens: list[str], index: int) -> tuple[int, int]:
    if tokens[index] == "(":
        value, index = _evaluate_sum(tokens, index + 1)
        return value, index + 1
    return int(tokens[index]), index + 1
