"""The score of a game of ten-pin bowling."""


def score_game(rolls: list[int]) -> int:
    """Return the score of a complete game of ten frames.

    A frame counts its pins. A spare (ten pins with two rolls) also counts the next roll, a strike (ten with one roll)
    the next two rolls.
    """
    total = index = 0
    for _ in range(10):
        if rolls[index] == 10:
            total += 10 + rolls[index + 1] + rolls[index + 2]
            index += 1
        elif rolls[index] + rolls[index + 1] == 10:
            total += 10 + rolls[index + 2]
            index += 2
        else:
            total += rolls[index] + rolls[index + 1]
            index += 2
    return total


def split_frames(rolls: list[int]) -> list[list[int]]:
    """Return the rolls of each frame. The tenth frame has all rolls that are left."""
    frames: list[list[int]] = []
    index = 0
    while index < len(rolls) and len(frames) < 9:
        size = 1 if rolls[index] == 10 else 2
        frames.append(rolls[index : index + size])
        index += size
    if index < len(rolls):
        frames.append(rolls[index:])
    return frames
