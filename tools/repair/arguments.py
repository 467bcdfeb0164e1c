"""The arguments with which the tests call the functions of the `repair` modules.

Each function has a few calls that matter (empty inputs, boundaries) and a generator for the rest.
"""

import random
from collections.abc import Callable
from typing import Any

Arguments = list[Any]
Generator = Callable[[random.Random], Arguments]


def draw_numbers(rng: random.Random, low: int = -9, high: int = 9, longest: int = 7) -> list[int]:
    """Return up to `longest` numbers."""
    return [rng.randint(low, high) for _ in range(rng.randint(0, longest))]


def draw_text(rng: random.Random, alphabet: str, longest: int = 10, shortest: int = 0) -> str:
    """Return a text of characters of the alphabet."""
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(shortest, longest)))


def draw_intervals(rng: random.Random) -> list[list[int]]:
    """Return up to five intervals."""
    starts = [rng.randint(0, 20) for _ in range(rng.randint(0, 5))]
    return [[start, start + rng.randint(0, 4)] for start in starts]


def draw_grid(rng: random.Random, smallest: int = 0) -> list[list[int]]:
    """Return a grid of up to four rows and columns."""
    height, width = rng.randint(smallest, 4), rng.randint(1, 4)
    return [[rng.randint(0, 9) for _ in range(width)] for _ in range(height)]


def draw_cell(rng: random.Random) -> Arguments:
    """Return a grid and one of its cells."""
    grid = draw_grid(rng, smallest=1)
    return [grid, rng.randrange(len(grid)), rng.randrange(len(grid[0]))]


def draw_words(rng: random.Random) -> str:
    """Return up to eight words."""
    return " ".join(draw_text(rng, "abcdefg", 7, 1) for _ in range(rng.randint(0, 8)))


def draw_version(rng: random.Random) -> str:
    """Return a version number."""
    numbers = ".".join(str(rng.choice([0, 1, 2, 9, 10])) for _ in range(rng.randint(1, 3)))
    return numbers + rng.choice(["", "", "", "-beta"])


def draw_time(rng: random.Random) -> str:
    """Return a time of a day."""
    return f"{rng.choice([0, 1, 11, 12, 13, 23, rng.randrange(24)]):02d}:{rng.choice([0, 59, rng.randrange(60)]):02d}"


def draw_rolls(rng: random.Random) -> list[int]:
    """Return the rolls of a complete game of bowling."""
    rolls: list[int] = []
    for frame in range(10):
        first = rng.choice([10, 10, rng.randint(0, 9)])
        rolls.append(first)
        if first == 10:
            if frame == 9:
                rolls += [rng.randint(0, 10), rng.randint(0, 4)]
            continue
        second = rng.choice([10 - first, rng.randint(0, 10 - first)])
        rolls.append(second)
        if frame == 9 and first + second == 10:
            rolls.append(rng.randint(0, 10))
    return rolls


def draw_expression(rng: random.Random, depth: int = 0) -> str:
    """Return an expression of small numbers that divides only by positive numbers."""
    text = str(rng.randint(1, 20))
    for _ in range(rng.randint(0, 3)):
        operator = rng.choice("+-*/")
        is_nested = depth < 2 and operator != "/" and rng.random() < 0.4
        operand = f"({draw_expression(rng, depth + 1)})" if is_nested else str(rng.randint(1, 20))
        space = rng.choice(["", " "])
        text += f"{space}{operator}{space}{operand}"
    return text


def draw_graph(rng: random.Random) -> dict[str, list[str]]:
    """Return a graph of up to six nodes."""
    names = "abcdef"[: rng.randint(1, 6)]
    return {name: sorted(rng.sample(names, rng.randint(0, min(2, len(names))))) for name in names}


def draw_ordered_graph(rng: random.Random) -> dict[str, list[str]]:
    """Return a graph that is mostly without circles."""
    names = rng.sample("abcdef", rng.randint(1, 6))
    graph = {name: rng.sample(names[:index], min(index, rng.randint(0, 2))) for index, name in enumerate(names)}
    return graph if rng.random() < 0.85 else draw_graph(rng)


def draw_results(rng: random.Random) -> list[list[Any]]:
    """Return results of up to eight games of four teams."""
    games = [rng.sample(["ash", "elm", "fir", "oak"], 2) for _ in range(rng.randint(0, 8))]
    return [[*teams, rng.randint(0, 3), rng.randint(0, 3)] for teams in games]


def draw_digits(rng: random.Random) -> str:
    """Return 12 to 19 digits, in most cases with a valid Luhn sum."""
    digits = draw_text(rng, "0123456789", 19, 11)[:18]
    doubled = [2 * int(digit) - 9 * (int(digit) > 4) for digit in digits[::-2]]
    total = sum(doubled) + sum(int(digit) for digit in digits[-2::-2])
    return digits + str((-total + rng.choice([0, 0, 0, 1, 5])) % 10)


def draw_isbn(rng: random.Random) -> str:
    """Return an ISBN of ten characters, in most cases a valid one."""
    digits = draw_text(rng, "0123456789", 9, 9)
    total = sum(int(digit) * (10 - index) for index, digit in enumerate(digits))
    check = (-total + rng.choice([0, 0, 0, 1])) % 11
    return f"{digits[0]}-{digits[1:]}-{'X' if check == 10 else check}"


def draw_csv_line(rng: random.Random) -> str:
    """Return a line of fields, some of them quoted."""
    fields = [draw_text(rng, 'ab,"', 4) for _ in range(rng.randint(1, 4))]
    quoted = [field.replace('"', '""') for field in fields]
    return ",".join(f'"{field}"' if set(field) & set(',"') else field for field in quoted)


def draw_path(rng: random.Random) -> str:
    """Return a path of a few parts."""
    parts = [rng.choice(["a", "b", "c.txt", "..", ".", ""]) for _ in range(rng.randint(0, 5))]
    return rng.choice(["/", "", "/"]) + "/".join(parts)


def draw_drawer(rng: random.Random) -> dict[str, int]:
    """Return the coins of a drawer."""
    return {coin: rng.randint(0, 4) for coin in ("1", "2", "5", "10", "20", "50") if rng.random() < 0.8}


def draw_sorted(rng: random.Random, shortest: int = 0) -> list[int]:
    """Return sorted numbers."""
    return sorted(rng.randint(0, 12) for _ in range(rng.randint(shortest, 8)))


def draw_keys(rng: random.Random) -> list[str]:
    """Return up to twelve keys."""
    return list(draw_text(rng, "abcd", 12))


def draw_date(rng: random.Random) -> Arguments:
    """Return year, month and day."""
    year, month = rng.choice([1900, 2000, 2023, 2024]), rng.choice([1, 2, 2, 4, 11, 12])
    return [year, month, rng.choice([1, 28, 30 if month in (4, 11) else 31]) if month != 2 else rng.randint(1, 28)]


BRACKETS = "()[]{}a"
LETTERS = "abxyzABXYZ ,!"

# module -> function -> (calls that matter, generator)
ARGUMENTS: dict[str, dict[str, tuple[list[Arguments], Generator]]] = {
    "intervals": {
        "merge_intervals": ([[[]], [[[1, 2], [3, 4]]], [[[1, 9], [2, 3]]]], lambda rng: [draw_intervals(rng)]),
        "count_numbers": ([[[]], [[[4, 4]]]], lambda rng: [draw_intervals(rng)]),
        "find_gaps": ([[[]], [[[1, 2], [5, 6]]]], lambda rng: [draw_intervals(rng)]),
    },
    "roman": {
        "to_roman": ([[n] for n in (0, 1, 3999, 4000, 4, 9, 40, 90, 400, 900, -1)], lambda rng: [rng.randint(1, 3999)]),
        "from_roman": (
            [
                ["I"],
                ["IV"],
                ["MCMXCIV"],
                ["XLII"],
                ["CDXLIV"],
                ["MMXXVI"],
                ["IX"],
                ["VI"],
                ["XC"],
                ["DCCC"],
                ["MMMCMXCIX"],
            ],
            lambda rng: [
                "M" * rng.randint(0, 2) + rng.choice(["CM", "D", "XL"]) + rng.choice(["IX", "VII", "I", "IV"])
            ],
        ),
    },
    "run_lengths": {
        "find_runs": ([[""], ["a"], ["aab"]], lambda rng: [draw_text(rng, "aaab")]),
        "compress": ([[""], ["aaa"], ["aa"]], lambda rng: [draw_text(rng, "aaab", 14)]),
        "longest_run": ([[""], ["aabb"]], lambda rng: [draw_text(rng, "aab")]),
    },
    "grids": {
        "rotate_right": ([[[]], [[[1]]]], lambda rng: [draw_grid(rng)]),
        "walk_spiral": ([[[]], [[[1, 2, 3]]], [[[1], [2], [3]]]], lambda rng: [draw_grid(rng)]),
        "sum_neighbours": ([[[[5]], 0, 0]], draw_cell),
    },
    "windows": {
        "window_sums": ([[[], 1], [[1, 2], 2], [[1], 2]], lambda rng: [draw_numbers(rng), rng.randint(1, 4)]),
        "best_window": ([[[], 1], [[1, 1], 1]], lambda rng: [draw_numbers(rng), rng.randint(1, 3)]),
        "max_subarray": ([[[]], [[-1]], [[2, -1, 3]]], lambda rng: [draw_numbers(rng)]),
    },
    "bisection": {
        "lower_bound": ([[[], 1], [[1], 1], [[1], 2]], lambda rng: [draw_sorted(rng), rng.randint(-1, 13)]),
        "count_between": ([[[1, 2], 3, 1]], lambda rng: [draw_sorted(rng), rng.randint(0, 8), rng.randint(4, 12)]),
        "nearest": ([[[1, 3], 2], [[1], 9]], lambda rng: [draw_sorted(rng, 1), rng.randint(-2, 15)]),
        "integer_root": ([[0], [1], [2], [3], [4], [15], [16]], lambda rng: [rng.randint(0, 2000)]),
    },
    "wrapping": {
        "wrap_words": ([["", 5], ["a bb", 4], ["a bb", 3]], lambda rng: [draw_words(rng), rng.randint(4, 12)]),
        "center": ([["", 3], ["abc", 2], ["a", 4]], lambda rng: [draw_text(rng, "ab", 6), rng.randint(0, 9)]),
        "shorten": ([["abc", 3], ["abcd", 3]], lambda rng: [draw_text(rng, "abc", 12), rng.randint(3, 9)]),
    },
    "brackets": {
        "is_balanced": (
            [[""], ["("], [")"], ["([)]"], ["([]){}"], ["{[()]}"], ["a(b)c"], ["[[]]"]],
            lambda rng: [draw_text(rng, BRACKETS, 5)],
        ),
        "max_depth": ([[""], ["))(("], ["{[()]}"]], lambda rng: [draw_text(rng, BRACKETS)]),
        "count_missing": ([[""], [")("]], lambda rng: [draw_text(rng, "()()[")]),
    },
    "version_numbers": {
        "parse_version": ([["0"], ["1.0.0"], ["1.10-rc"]], lambda rng: [draw_version(rng)]),
        "compare_versions": ([["1.2", "1.10"], ["1.0", "1"]], lambda rng: [draw_version(rng), draw_version(rng)]),
        "find_newest": ([[[]], [["1.0", "1"]]], lambda rng: [[draw_version(rng) for _ in range(rng.randint(0, 5))]]),
        "is_compatible": ([["1.2", "1.2"]], lambda rng: [draw_version(rng), draw_version(rng)]),
    },
    "clock_times": {
        "to_minutes": ([["00:00"], ["23:59"]], lambda rng: [draw_time(rng)]),
        "add_minutes": ([["23:50", 20], ["00:10", -20]], lambda rng: [draw_time(rng), rng.randint(-1500, 1500)]),
        "duration": ([["10:00", "10:00"], ["23:00", "01:00"]], lambda rng: [draw_time(rng), draw_time(rng)]),
        "to_twelve_hours": ([["00:05"], ["12:00"], ["13:00"], ["11:59"]], lambda rng: [draw_time(rng)]),
    },
    "bowling": {
        "score_game": ([[[0] * 20], [[10] * 12], [[5] * 21]], lambda rng: [draw_rolls(rng)]),
        "split_frames": ([[[]], [[10] * 12], [[10, 3]]], lambda rng: [draw_rolls(rng)[: rng.choice([3, 30])]]),
    },
    "calculator": {
        "tokenize": ([[""], ["12 + 3"], ["1 2"]], lambda rng: [draw_expression(rng)]),
        "evaluate": ([["7"], ["8-3-2"], ["2*(3+4)"], ["7/2"], ["1)"]], lambda rng: [draw_expression(rng)]),
    },
    "routes": {
        "count_steps": ([[{}, "a", "a"], [{}, "a", "b"]], lambda rng: [draw_graph(rng), "a", rng.choice("abcd")]),
        "find_reachable": ([[{}, "a", 2]], lambda rng: [draw_graph(rng), "a", rng.randint(1, 3)]),
        "sort_by_dependencies": ([[{}], [{"a": ["b"], "b": ["a"]}]], lambda rng: [draw_ordered_graph(rng)]),
    },
    "factors": {
        "is_prime": ([[0], [1], [2], [3], [4], [9], [25], [49], [-7]], lambda rng: [rng.randint(0, 60)]),
        "factorize": ([[1], [2], [4], [12], [49]], lambda rng: [rng.randint(1, 400)]),
        "sum_proper_divisors": ([[1], [2], [6], [28]], lambda rng: [rng.randint(1, 60)]),
        "greatest_common_divisor": ([[0, 5], [5, 0], [-4, 6]], lambda rng: [rng.randint(-40, 40), rng.randint(0, 40)]),
    },
    "checksums": {
        "luhn_sum": ([[""], ["5"], ["50"], ["59"]], lambda rng: [draw_text(rng, "0123456789", 8)]),
        "is_valid_card": (
            [[""], ["0" * 11], ["0" * 12], ["0" * 19], ["0" * 20], ["4 x"]],
            lambda rng: [draw_digits(rng)],
        ),
        "is_valid_isbn": ([[""], ["X000000000"], ["0-306-40615-2"], ["080442957X"]], lambda rng: [draw_isbn(rng)]),
    },
    "standings": {
        "count_points": ([[[]]], lambda rng: [draw_results(rng)]),
        "goal_difference": ([[[], "oak"]], lambda rng: [draw_results(rng), "oak"]),
        "rank_teams": ([[[]]], lambda rng: [draw_results(rng)]),
        "longest_winning_streak": ([[[], "oak"]], lambda rng: [draw_results(rng), "oak"]),
    },
    "csv_lines": {
        "split_line": ([[""], ["a,b"], ['"a,b",c'], ['"a""b"'], [","]], lambda rng: [draw_csv_line(rng)]),
        "join_fields": ([[[""]], [["a,b", 'c"d', "e"]]], lambda rng: [[draw_text(rng, 'ab,"', 4) for _ in range(3)]]),
        "count_columns": (
            [[[]], [["a,b", "c"]], [["a,b", "c,d"]], [['"a,b"', "c"]], [["a"]], [["a", "b,c", "d"]]],
            lambda rng: [[rng.choice(["a,b", "c,d", '"a,b",c', "x,y"]) for _ in range(rng.randint(1, 4))]],
        ),
    },
    "coins": {
        "fewest_coins": (
            [[0, [1]], [3, [2]], [6, [1, 3, 4]]],
            lambda rng: [rng.randint(0, 30), rng.sample(range(1, 12), 3)],
        ),
        "count_ways": ([[0, [1]], [3, [2]], [4, [1, 2]]], lambda rng: [rng.randint(0, 25), rng.sample(range(1, 9), 3)]),
        "give_change": ([[0, {}], [3, {"2": 2}]], lambda rng: [rng.randint(0, 120), draw_drawer(rng)]),
    },
    "similarity": {
        "edit_distance": (
            [["", ""], ["", "ab"], ["ab", ""]],
            lambda rng: [draw_text(rng, "abc", 6), draw_text(rng, "abc", 6)],
        ),
        "common_prefix": (
            [[[]], [["ab", "a"]]],
            lambda rng: [["aab"[: rng.randint(0, 3)] + draw_text(rng, "ab", 4) for _ in "123"]],
        ),
        "longest_common_substring": (
            [["", "a"], ["ab", "ba"]],
            lambda rng: [draw_text(rng, "abc", 8), draw_text(rng, "abc", 8)],
        ),
    },
    "ciphers": {
        "shift_letter": (
            [["a", 1], ["z", 1], ["Z", 2], ["A", -1], ["!", 3]],
            lambda rng: [rng.choice(LETTERS), rng.randint(-30, 30)],
        ),
        "encrypt_caesar": ([["", 1], ["Abc xyz", 3]], lambda rng: [draw_text(rng, LETTERS), rng.randint(-30, 30)]),
        "encrypt_vigenere": (
            [["", "a"], ["a a", "bc"]],
            lambda rng: [draw_text(rng, LETTERS), draw_text(rng, "abcz", 3, 1)],
        ),
        "encrypt_rails": ([["", 2], ["abcde", 2]], lambda rng: [draw_text(rng, "abcdefgh", 12), rng.randint(2, 4)]),
    },
    "calendar_days": {
        "is_leap_year": (
            [[1900], [2000], [2023], [2024], [2100], [2400], [1600]],
            lambda rng: [rng.randint(1890, 2110)],
        ),
        "days_in_month": (
            [[2024, 2], [2023, 2], [1900, 2], [2024, 12]],
            lambda rng: [rng.choice([1900, 2023, 2024]), rng.randint(1, 12)],
        ),
        "day_of_year": ([[2024, 1, 1], [2024, 3, 1], [2023, 12, 31]], draw_date),
        "next_day": ([[2023, 2, 28], [2024, 2, 28], [2024, 2, 29], [2024, 12, 31], [2023, 12, 30]], draw_date),
        "count_leap_years": (
            [[2024, 2024], [2023, 2023], [1900, 2000]],
            lambda rng: [rng.randint(1890, 1990), rng.randint(1980, 2030)],
        ),
    },
    "statistics_tables": {
        "median": ([[[1]], [[2, 1]], [[3, 1, 2]]], lambda rng: [[*draw_numbers(rng), rng.randint(-9, 9)]]),
        "most_common": ([[[]], [[2, 1, 2, 1]]], lambda rng: [draw_numbers(rng, 0, 4)]),
        "count_in_bins": ([[[], 2], [[-1], 2], [[0], 1]], lambda rng: [draw_numbers(rng, -3, 12), rng.randint(1, 4)]),
        "moving_ranks": ([[[]], [[1, 1]], [[1, 2]]], lambda rng: [draw_numbers(rng, 0, 5)]),
    },
    "file_paths": {
        "normalize": ([[""], ["/"], ["../a"], ["/.."], ["a/.."], ["../../a"]], lambda rng: [draw_path(rng)]),
        "get_extension": (
            [["a"], [".b"], ["a.b"], ["a.b.c"], ["x.y/z"], ["a."], ["d/.e"], ["d/e.txt"]],
            lambda rng: ["/".join(draw_text(rng, "ab.", 5, 1) for _ in range(rng.randint(1, 3)))],
        ),
        "is_inside": (
            [["/a", "/a"], ["/ab", "/a"], ["/a/b", "/a"], ["/a", "/"], ["/a/../b", "/a"]],
            lambda rng: ["/" + draw_path(rng), "/" + rng.choice(["a", "a/b", "", "b"])],
        ),
    },
    "caches": {
        "simulate_lru": ([[[], 1], [["a", "a"], 1]], lambda rng: [draw_keys(rng), rng.randint(1, 3)]),
        "count_evictions": ([[[], 1], [["a", "b", "a"], 1]], lambda rng: [draw_keys(rng), rng.randint(1, 3)]),
        "find_expired": (
            [[[], 5, 1], [[["a", 3]], 5, 2], [[["a", 3]], 6, 2]],
            lambda rng: [[[key, rng.randint(0, 9)] for key in "abcd"], rng.randint(5, 12), rng.randint(1, 6)],
        ),
    },
    "number_bases": {
        "to_base": (
            [[0, 2], [255, 16], [-5, 2], [35, 36]],
            lambda rng: [rng.randint(-300, 300), rng.choice([2, 3, 8, 16, 36])],
        ),
        "group_thousands": ([[0], [999], [1000], [-1234567], [1000000]], lambda rng: [rng.randint(-(10**8), 10**8)]),
        "to_ordinal": (
            [[n] for n in (1, 2, 3, 4, 10, 11, 12, 13, 14, 21, 111, 113)],
            lambda rng: [rng.randint(1, 130)],
        ),
        "count_ones": ([[0], [1], [2], [7], [8]], lambda rng: [rng.randint(0, 1000)]),
    },
}
