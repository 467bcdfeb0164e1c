"""Amounts of money as coins."""


def fewest_coins(amount: int, coins: list[int]) -> int:
    """Return the smallest number of coins, each used as often as needed, that make the amount; -1 if none do."""
    fewest = [0] + [amount + 1] * amount
    for total in range(1, amount + 1):
        for coin in coins:
            if coin <= total and fewest[total - coin] + 1 < fewest[total]:
                fewest[total] = fewest[total - coin] + 1
    return fewest[amount] if fewest[amount] <= amount else -1


def count_ways(amount: int, coins: list[int]) -> int:
    """Return in how many ways the coins, each used as often as needed, make the amount; their order is ignored."""
    ways = [1] + [0] * amount
    for coin in coins:
        for total in range(coin, amount + 1):
            ways[total] += ways[total - coin]
    return ways[amount]


def give_change(amount: int, drawer: dict[str, int]) -> dict[str, int]:
    """Return the coins to give for an amount: from the largest coin down, as many of each as fit and are in the drawer.

    The drawer maps values to counts, and so does the result, without coins that are not used. It is {} if the amount
    cannot be given in this way.
    """
    change: dict[str, int] = {}
    for coin in sorted(drawer, key=int, reverse=True):
        count = min(amount // int(coin), drawer[coin])
        if count > 0:
            change[coin] = count
            amount -= count * int(coin)
    return change if amount == 0 else {}
