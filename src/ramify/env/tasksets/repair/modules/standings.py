"""Tables of a league. A result is [home team, away team, home goals, away goals]."""


def count_points(results: list[list]) -> dict[str, int]:
    """Return the points of each team: 3 for a win, 1 for a draw, 0 for a loss."""
    points: dict[str, int] = {}
    for home, away, home_goals, away_goals in results:
        points.setdefault(home, 0)
        points.setdefault(away, 0)
        if home_goals > away_goals:
            points[home] += 3
        elif home_goals < away_goals:
            points[away] += 3
        else:
            points[home] += 1
            points[away] += 1
    return points


def goal_difference(results: list[list], team: str) -> int:
    """Return the goals that a team scored minus those that it conceded."""
    difference = 0
    for home, away, home_goals, away_goals in results:
        if team == home:
            difference += home_goals - away_goals
        elif team == away:
            difference += away_goals - home_goals
    return difference


def rank_teams(results: list[list]) -> list[str]:
    """Return the teams by points, then by goal difference, both descending, then by name."""
    points = count_points(results)
    return sorted(points, key=lambda team: (-points[team], -goal_difference(results, team), team))


def longest_winning_streak(results: list[list], team: str) -> int:
    """Return the largest number of games of a team in a row that it won; games of other teams do not matter."""
    longest = current = 0
    for home, away, home_goals, away_goals in results:
        if team not in (home, away):
            continue
        margin = home_goals - away_goals if team == home else away_goals - home_goals
        current = current + 1 if margin > 0 else 0
        longest = max(longest, current)
    return longest
