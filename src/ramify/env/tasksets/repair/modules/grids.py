"""Rectangular grids, written as a list of rows."""


def rotate_right(grid: list[list[int]]) -> list[list[int]]:
    """Return the grid turned by 90 degrees clockwise: [[1, 2], [3, 4]] -> [[3, 1], [4, 2]]."""
    if not grid:
        return []
    height, width = len(grid), len(grid[0])
    return [[grid[height - 1 - row][column] for row in range(height)] for column in range(width)]


def walk_spiral(grid: list[list[int]]) -> list[int]:
    """Return the values in the order of a clockwise spiral that starts at the top left."""
    values: list[int] = []
    if not grid:
        return values
    top, bottom, left, right = 0, len(grid) - 1, 0, len(grid[0]) - 1
    while top <= bottom and left <= right:
        values.extend(grid[top][left : right + 1])
        for row in range(top + 1, bottom + 1):
            values.append(grid[row][right])
        if top < bottom and left < right:
            for column in range(right - 1, left - 1, -1):
                values.append(grid[bottom][column])
            for row in range(bottom - 1, top, -1):
                values.append(grid[row][left])
        top, bottom, left, right = top + 1, bottom - 1, left + 1, right - 1
    return values


def sum_neighbours(grid: list[list[int]], row: int, column: int) -> int:
    """Return the sum of the up to eight values around a cell, without the cell itself."""
    total = 0
    for other_row in range(max(row - 1, 0), min(row + 2, len(grid))):
        for other_column in range(max(column - 1, 0), min(column + 2, len(grid[0]))):
            if other_row != row or other_column != column:
                total += grid[other_row][other_column]
    return total
